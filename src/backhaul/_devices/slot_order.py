"""The order of copies into slots and of the use of slots, on the devices of this process. The host does not wait.

Used by the modules that move device memory; knows no message and no worker.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Iterable

from backhaul._devices.backend import DeviceEvent, OwnEvent, Stream, StreamBackend
from backhaul._devices.streams import Streams

log = logging.getLogger("backhaul")


class SlotOrder:
    """Thread-safe and without locks: destructors come here too, from anywhere."""

    def __init__(self, backend: StreamBackend, streams: Streams) -> None:
        self._backend = backend
        self._streams = streams
        self._drains: dict[int, Stream] = {}  # of each device, a stream on which only waits are queued
        self._returns: collections.deque[tuple[DeviceEvent, int, Callable[[], None]]] = collections.deque()
        self._held_up = False  # a slot could not be returned

    # The calling thread's stream.

    def check(self) -> None:
        """Raise ``RuntimeError`` if the calling thread captures a CUDA graph: a copy would be made whenever the graph
        runs, and not now.
        """
        if self._backend.capturing():
            raise RuntimeError(
                "cannot send or receive a tensor of a device while this thread captures a CUDA graph; "
                "send it before or after the capture"
            )

    def follow(self, device: int, events: Iterable[DeviceEvent]) -> None:
        """What this thread begins on ``device`` from now on is done after these events."""
        stream = self._streams.current(device)
        for event in events:
            if not event.query():
                self._backend.wait(stream, event)

    def is_idle(self, device: int) -> bool:
        """Whether all that this thread has begun on ``device`` is done."""
        return self._streams.current(device).query()

    def record(self, event: DeviceEvent, device: int) -> None:
        """Record an event behind what this thread has begun on ``device``."""
        self._backend.record(event, self._streams.current(device))

    def record_new(self, device: int) -> OwnEvent:
        """Record a new event behind what this thread has begun on ``device``."""
        event = self._backend.event(device)
        self.record(event, device)
        return event

    def synchronize(self, devices: Iterable[int]) -> None:
        """Block the host until all that this thread has begun is done. Only for memory that leaves through the host."""
        for event in [self.record_new(device) for device in devices]:
            event.synchronize()

    # All streams of the process.

    def is_quiet(self) -> bool:
        """Whether no known stream has work."""
        return self._streams.are_idle()

    def failed(self) -> bool:
        """Whether nothing can be done on the devices any more."""
        return self._streams.failed()

    def prepare(self, device: int) -> None:
        """Make the streams that ``device`` needs before a stream of it waits for another process.

        While a stream waits for another process CUDA may make no new stream, and the thread that asks for the first one
        would block too, with the interpreter's lock held.
        """
        for one in {device, *self._backend.devices()}:
            self._drain_of(one)

    def _drain_of(self, device: int) -> Stream:
        drain = self._drains.get(device)
        if drain is None:
            drain = self._drains.setdefault(device, self._backend.fresh(device))
        return drain

    def try_out(self, event: DeviceEvent, device: int) -> None:
        """Record an event on a separate stream. Raises ``RuntimeError`` if the device cannot."""
        self._backend.record(event, self._drains[device])

    # Slots that go back to their sender.

    def record_behind_all(self, event: DeviceEvent, device: int, then: Callable[[], None]) -> None:
        """Record ``event`` behind all that this process has begun on any known stream, then call ``then``: now, or soon
        if the calling thread captures a CUDA graph, of which this must not become a part.

        A separate stream waits for the others, so none of them has to wait for another.
        """
        self._returns.append((event, device, then))
        self._streams.attempt(self.record_pending)

    def record_pending(self) -> None:
        """Record the events that could not be recorded before."""
        backend = self._backend
        if not self._returns or backend.capturing():
            return
        while self._returns:
            try:
                event, device, then = self._returns.popleft()
            except IndexError:  # another thread has taken the last one
                return
            try:
                self._record_behind_all(event, device)
            except RuntimeError as error:
                if not self.failed():  # a stream that cannot be asked now, as another thread captures a graph on it
                    self._returns.append((event, device, then))
                    if not self._held_up:
                        self._held_up = True
                        log.warning("cannot return memory of another process yet; this is tried again: %s", error)
                    return
            except BaseException:  # an interrupt
                self._returns.append((event, device, then))
                raise
            self._held_up = False
            then()

    def _record_behind_all(self, event: DeviceEvent, device: int) -> None:
        """Record an event behind all streams that are not idle. If only one is not, record it there: where several
        processes share a device, whatever one of them does costs a switch to it.
        """
        backend, streams = self._backend, self._streams.known()
        for used in backend.devices():
            for stream in (self._streams.current(used), backend.default(used)):
                streams[stream.key] = stream
        busy = [stream for stream in streams.values() if not stream.query()]
        if not busy:
            return  # see [Note: idle] in stream_order: what the event was recorded for before has passed
        if len(busy) == 1 and busy[0].key[0] == device:
            backend.record(event, busy[0])
            return
        drain = self._drain_of(device)
        for stream in busy:
            self._streams.follow_stream(drain, stream)
        backend.record(event, drain)
