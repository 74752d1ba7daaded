"""Which stream waits for what: work on devices follows the order of messages, and the host waits for nothing of it.

What is done on the streams of one thread before a message leaves, or a value is handed to another thread, comes before
what is done on the streams of those who got it. ``Backend`` is all that is needed of CUDA, so that tests can have
streams of their own which find a wait that is missing. Knows no message and no worker.

[Note: frontier] A thread that lets a message go records an event on each of its current streams that is not idle. The
latest event of each stream is the process's *frontier*. A thread that goes on with a message lets its current streams
wait for all of it, and for the default streams. That is more than the message depends on, and has to be: parameters
that one handler has changed are seen by the next although no tensor of theirs travels.

[Note: idle] Nobody has to wait for a stream that is idle, or for an event that has passed: what was done there is done.
"""

from __future__ import annotations

import collections
import logging
import threading
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

log = logging.getLogger("backhaul")

_DEEP = 8  # how far into a value to look for tensors

Key = tuple[int, int]
"""Names a stream: its device and a number."""


class DeviceEvent(Protocol):
    """A point on a stream, which any stream may wait for."""

    def query(self) -> bool:
        """Whether the stream has passed it; also if it was never recorded."""


class OwnEvent(DeviceEvent, Protocol):
    """One of this process's. After the first, only streams of the same device may record it."""

    def synchronize(self) -> None:
        """Wait, on the host, until the stream has passed it."""


class Stream(Protocol):
    """Work on one device that is done in order."""

    @property
    def key(self) -> Key:
        """Its name."""

    def query(self) -> bool:
        """Whether it is idle."""


class Backend(Protocol):
    """What CUDA does. All of it is cheap; raises ``RuntimeError`` where a device has failed."""

    def devices(self) -> Sequence[int]:
        """Those on which this process has done anything."""

    def current(self, device: int) -> Stream:
        """The calling thread's stream."""

    def default(self, device: int) -> Stream:
        """The one that threads begin with."""

    def fresh(self, device: int) -> Stream:
        """One of the pool."""

    def use(self, stream: Stream) -> None:
        """Make it the calling thread's; the thread's device stays as it is."""

    def lasting(self, stream: Stream) -> bool:
        """Whether it is there as long as the process is."""

    def event(self, device: int) -> OwnEvent:
        """A new one."""

    def record(self, event: DeviceEvent, stream: Stream) -> None:
        """The event is at the end of what the stream has to do now."""

    def wait(self, stream: Stream, event: DeviceEvent) -> None:
        """What the stream is given from now on is done after the event."""

    def adopt(self, tensor: torch.Tensor, stream: Stream) -> None:
        """The tensor's memory is used on the stream."""

    def relax(self) -> bool:
        """From now on the calling thread does not disturb others that make a CUDA graph. False: CUDA has not been
        started, so there are none, and this is to be asked again.
        """

    def capturing(self) -> bool:
        """Whether what the calling thread does becomes part of a CUDA graph: then it is left alone."""


class Mark:
    """What was under way on a thread's streams when it handed a value on. Made by ``StreamOrder.mark``."""

    __slots__ = ("_events",)

    def __init__(self, events: list[tuple[Key, DeviceEvent]]) -> None:
        self._events = events

    @property
    def pending(self) -> list[tuple[Key, DeviceEvent]]:
        """What of it is still under way."""
        if self._events:
            self._events = [(key, event) for key, event in self._events if not event.query()]
        return self._events


class _Lanes(dict[int, "Stream"]):
    """A thread's own stream of each device; when it ends, another gets them: there are not many, and some may be taken
    by who makes a CUDA graph, where they must not be asked for anything.
    """

    def __init__(self, spare: dict[int, collections.deque[Stream]]) -> None:
        super().__init__()
        self._spare = spare

    def __del__(self) -> None:
        for device, lane in self.items():
            self._spare.setdefault(device, collections.deque()).append(lane)


class _ThreadStreams(threading.local):
    """What is known of a thread."""

    lanes: _Lanes | None = None  # if it has any
    relaxed = False


class StreamOrder:
    """The order of one process's streams. Thread-safe and without locks: destructors come here too, from anywhere.

    Attributes:
        trouble: What CUDA said when a device had failed, after which nothing can be done on it; empty: nothing.
    """

    def __init__(self, backend: Backend) -> None:
        self.trouble = ""
        self._backend = backend
        self._departed: dict[Key, DeviceEvent] = {}
        self._known: dict[Key, Stream] = {}  # all streams that were ever used by those who call here
        self._drains: dict[int, Stream] = {}
        self._spare: dict[int, collections.deque[Stream]] = {}  # of threads that have ended
        self._ended: collections.deque[tuple[DeviceEvent, int, Callable[[], None]]] = (
            collections.deque()
        )  # to be drained
        self._held_up = False  # something could not be drained
        self._here = _ThreadStreams()

    def quiet(self) -> bool:
        """Whether nothing is under way on any stream that is known here."""
        return bool(self._try(lambda: all(stream.query() for stream in list(self._known.values()))))

    def failed(self) -> bool:
        """Whether nothing can be done on the devices any more."""
        if not self.trouble:
            try:
                for device in self._backend.devices():
                    self._backend.default(device).query()
            except RuntimeError as error:
                self.trouble = (str(error) or type(error).__name__).splitlines()[0]
                log.error("CUDA has failed in this process: %s", self.trouble)
        return bool(self.trouble)

    def prepare(self, device: int) -> None:
        """Streams of ``device`` are going to wait for another process. While one does, CUDA may make no new ones, and
        who asks for the first of them would wait too, with all threads of Python's: so it is made now.
        """
        for one in {device, *self._backend.devices()}:
            if one not in self._drains:
                self._drains.setdefault(one, self._backend.fresh(one))

    def try_out(self, event: DeviceEvent, device: int) -> None:
        """Record an event on a stream apart. Raises ``RuntimeError`` if the device cannot."""
        self._backend.record(event, self._drains[device])

    # Threads.

    def enter(self) -> None:
        """The calling thread, one of the crew's, begins something new: it does so on streams of its own."""
        self._try(self._enter)

    def _enter(self) -> None:
        backend, here = self._backend, self._here
        if not here.relaxed:
            self._relax()
        lanes = here.lanes
        if lanes is None:
            lanes = here.lanes = _Lanes(self._spare)
        for device in backend.devices():
            lane = lanes.get(device)
            if lane is None:
                lane = lanes[device] = self._spare_lane(device) or backend.fresh(device)
                self._known.setdefault(lane.key, lane)
            if backend.current(device) is not lane:
                backend.use(lane)

    def _spare_lane(self, device: int) -> Stream | None:
        try:
            return self._spare.setdefault(device, collections.deque()).popleft()
        except IndexError:
            return None

    # Messages.

    def depart(self) -> None:
        """A message is about to go out: who gets it comes after what this thread has begun."""
        self._try(self._depart)

    def _depart(self) -> None:
        backend = self._backend
        if not self._here.relaxed:
            self._relax()
        if backend.capturing():
            return
        for device in backend.devices():
            stream = self._current(device)
            if stream.query():
                continue
            key = stream.key
            event = self._departed.get(key)
            if event is None:
                event = self._departed.setdefault(key, backend.event(device))
            backend.record(event, stream)  # those who wait for what it was before have noted that

    def arrive(self) -> None:
        """A message has come, and this thread goes on with it: after all that has departed. See [Note: frontier]."""
        self._try(self._arrive)

    def _arrive(self) -> None:
        backend = self._backend
        if backend.capturing():
            return
        if self._ended:
            self._drain()
        streams = [self._current(device) for device in backend.devices()]
        own = streams[0].key if len(streams) == 1 else None  # which comes after itself in any case
        pending = [item for item in list(self._departed.items()) if item[0] != own and not item[1].query()]
        for stream in streams:
            if pending:
                self._follow(stream, pending)
            self._follow_stream(stream, backend.default(stream.key[0]))

    # Values that go from thread to thread.

    def mark(self, earlier: Mark | None = None) -> Mark | None:
        """What this thread has begun, for who gets a value that comes of it; and what there was before that others
        have. None: no device is in use.
        """
        made: Mark | None = self._try(lambda: self._mark(earlier))
        return made or earlier

    def _mark(self, earlier: Mark | None) -> Mark | None:
        backend = self._backend
        if backend.capturing():
            return None
        events: list[tuple[Key, DeviceEvent]] = []
        for device in backend.devices():
            stream = self._current(device)
            if not stream.query():
                event = backend.event(device)
                backend.record(event, stream)
                events.append((stream.key, event))
        if not backend.devices():
            return None
        if earlier is not None:
            new = {key for key, _ in events}
            events += [(key, event) for key, event in earlier.pending if key not in new]
        return Mark(events)  # if there are none, the memory is another thread's all the same, see ``join``

    def join(self, mark: Mark, value: Any = None) -> None:
        """This thread goes on with a value that came with ``mark``: after what it came of. The memory of the tensors in
        ``value`` is not used for anything else before this thread's streams are done with it.
        """
        self._try(lambda: self._join(mark, value))

    def _join(self, mark: Mark, value: Any) -> None:
        backend = self._backend
        pending = mark.pending
        if not backend.capturing():
            for device in backend.devices() if pending else ():
                self._follow(self._current(device), pending)
            self.adopt(value)

    def adopt(self, value: Any) -> None:
        """Tensors of another thread are used on this thread's streams from now on: their memory is not to be given
        away before that is done.
        """
        self._try(lambda: self._adopt(value))

    def _adopt(self, value: Any) -> None:
        streams: dict[int, Stream] = {}
        for tensor in tensors_in(value):
            device = tensor.device
            if device.type != "cuda":
                continue
            stream = streams.get(device.index)
            if stream is None:
                stream = streams[device.index] = self._current(device.index)
            for part in _parts(tensor):
                self._backend.adopt(part, stream)

    def check(self) -> None:
        """Raise ``RuntimeError`` if what the calling thread does becomes part of a CUDA graph: what is copied then is
        copied whenever the graph is run, and not now.
        """
        if self._backend.capturing():
            raise RuntimeError("no tensor of a device can be sent or received while a CUDA graph is being made")

    # Memory that others may use again.

    def drain(self, event: DeviceEvent, device: int, then: Callable[[], None]) -> None:
        """Record ``event`` behind all that this process has begun on any stream it is known to use, and call ``then``:
        now, or soon, if the calling thread makes a CUDA graph, which this is not to be part of.

        On a stream apart, which waits for those: none of them has to wait for another.
        """
        self._ended.append((event, device, then))
        self._try(self._drain)

    def _drain(self) -> None:
        backend = self._backend
        if backend.capturing():
            return
        while self._ended:
            try:
                event, device, then = self._ended.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                self._record_behind(event, device)
            except RuntimeError as error:
                if not self.failed():  # a stream that cannot be asked now: another thread makes a graph on it, say
                    self._ended.append((event, device, then))
                    if not self._held_up:
                        self._held_up = True
                        log.warning("memory that came from another process cannot go back yet: %s", error)
                    return
            except BaseException:  # an interrupt
                self._ended.append((event, device, then))
                raise
            self._held_up = False
            then()

    def _record_behind(self, event: DeviceEvent, device: int) -> None:
        """Record an event behind all streams that are not idle; on one of them, if it is the only one. Where several
        processes share a device, whatever one of them does costs a switch to it.
        """
        backend = self._backend
        streams = dict(self._known)
        for used in backend.devices():
            for stream in (self._current(used), backend.default(used)):
                streams[stream.key] = stream
        busy = [stream for stream in streams.values() if not stream.query()]
        if not busy:
            return  # see [Note: idle]: what the event was recorded for before has passed
        if len(busy) == 1 and busy[0].key[0] == device:
            backend.record(event, busy[0])
            return
        drain = self._drains.get(device)
        if drain is None:
            drain = self._drains.setdefault(device, backend.fresh(device))
        for stream in busy:
            self._follow_stream(drain, stream)
        backend.record(event, drain)

    def follow(self, device: int, events: Iterable[DeviceEvent]) -> None:
        """What this thread begins on ``device`` from now on is done after these events."""
        stream = self._current(device)
        for event in events:
            if not event.query():
                self._backend.wait(stream, event)

    def idle(self, device: int) -> bool:
        """Whether nothing that this thread has begun on ``device`` is under way."""
        return self._current(device).query()

    def record(self, event: DeviceEvent, device: int) -> None:
        """Record an event behind what this thread has begun on ``device``."""
        self._backend.record(event, self._current(device))

    def record_new(self, device: int) -> OwnEvent:
        """The same, for a new event."""
        event = self._backend.event(device)
        self.record(event, device)
        return event

    def settle(self, devices: Iterable[int]) -> None:
        """Wait, on the host, for what this thread has begun. Only for what must leave by another way."""
        for event in [self.record_new(device) for device in devices]:
            event.synchronize()

    # Within.

    def _relax(self) -> None:
        self._here.relaxed = self._backend.relax()

    def _current(self, device: int) -> Stream:
        stream = self._backend.current(device)
        key = stream.key
        if key not in self._known and self._backend.lasting(stream):
            self._known.setdefault(key, stream)
        return stream

    def _follow(self, stream: Stream, events: Iterable[tuple[Key, DeviceEvent]]) -> None:
        key = stream.key
        for origin, event in events:
            if origin != key:
                self._backend.wait(stream, event)

    def _follow_stream(self, stream: Stream, other: Stream) -> None:
        backend = self._backend
        key = other.key
        if key == stream.key or other.query():
            return
        event = backend.event(key[0])
        backend.record(event, other)
        backend.wait(stream, event)

    def _try(self, act: Callable[[], Any]) -> Any:
        """A device that has failed is no reason for messages to fail: they are to say so."""
        try:
            return act()
        except RuntimeError as error:
            if not self.failed():
                log.warning("CUDA could not do something that others may wait for: %s", error)
            return None


def _parts(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    """The tensors that have the memory of one."""
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()


def tensors_in(value: Any) -> Iterable[torch.Tensor]:
    """The tensors in lists, tuples, sets, dicts, and objects that have them as attributes; not all too deep."""
    stack, seen = [(value, 0)], set()
    while stack:
        item, depth = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            yield item
        elif depth < _DEEP:
            stack += [(inner, depth + 1) for inner in reversed(list(_inside(item)))]


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if isinstance(value, (type, types.ModuleType, types.FunctionType)):
        return ()
    return getattr(value, "__dict__", {}).values()
