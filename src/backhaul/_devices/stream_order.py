"""Which stream waits for what: work on devices follows the order of messages, and the host waits for none of it.

What a thread does on its streams before it sends a message, or hands a value to another thread, comes before what the
receiving thread does on its streams. Knows no message and no worker.

[Note: departed] A thread that sends a message records an event on each of its current streams that is not idle. The
process keeps the latest event of each stream. A thread that goes on with a message lets its current streams wait for
all of these events, and for the default streams. That is more than the message depends on, and has to be: parameters
that one handler has changed are seen by the next, although no tensor of theirs travels.

[Note: idle] Nobody has to wait for a stream that is idle, or for an event that has passed: that work is done.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Any

import torch

from backhaul._devices.backend import DeviceEvent, Key, Stream, StreamBackend
from backhaul._devices.seam import Mark
from backhaul._devices.slot_order import SlotOrder
from backhaul._devices.streams import Streams
from backhaul._devices.tensor_walk import strided_parts, tensors_in
from backhaul.errors import RemoteTraceback


class _OwnStreams(dict[int, "Stream"]):
    """A thread's own stream of each device. When the thread ends, another thread gets them: CUDA has few, and some may
    be taken by a thread that captures a CUDA graph, where they must not be queried.
    """

    def __init__(self, spare: dict[int, collections.deque[Stream]]) -> None:
        super().__init__()
        self._spare = spare

    def __del__(self) -> None:
        for device, stream in self.items():
            self._spare.setdefault(device, collections.deque()).append(stream)


class _ThreadState(threading.local):
    streams: _OwnStreams | None = None  # if the thread has its own
    relaxed = False  # see StreamBackend.relax


class StreamOrder:
    """The order of one process's streams. Thread-safe and without locks: destructors come here too, from anywhere.

    Attributes:
        streams: The streams that are known.
        slot_order: The order of copies into slots and out of them.
    """

    def __init__(self, backend: StreamBackend) -> None:
        self.streams = Streams(backend)
        self.slot_order = SlotOrder(backend, self.streams)
        self._backend = backend
        self._departed: dict[Key, DeviceEvent] = {}
        self._spare: dict[int, collections.deque[Stream]] = {}  # of threads that have ended
        self._thread = _ThreadState()

    @property
    def trouble(self) -> str:
        """What CUDA said when a device had failed; empty: nothing."""
        return self.streams.trouble

    def failed(self) -> bool:
        """Whether nothing can be done on the devices any more."""
        return self.streams.failed()

    def in_use(self) -> bool:
        """Whether this process uses a device."""
        return bool(self._backend.devices())

    # Threads.

    def enter(self) -> None:
        """The calling thread, of a worker's pool, begins a new task: it does so on streams of its own."""
        self.streams.attempt(self._enter)

    def _enter(self) -> None:
        backend, thread = self._backend, self._thread
        if not thread.relaxed:
            thread.relaxed = backend.relax()
        own = thread.streams
        if own is None:
            own = thread.streams = _OwnStreams(self._spare)
        for device in backend.devices():
            stream = own.get(device)
            if stream is None:
                stream = own[device] = self._spare_stream(device) or backend.fresh(device)
                self.streams.know(stream)
            if backend.current(device) is not stream:
                backend.use(stream)

    def _spare_stream(self, device: int) -> Stream | None:
        try:
            return self._spare.setdefault(device, collections.deque()).popleft()
        except IndexError:
            return None

    # Messages.

    def depart(self) -> None:
        """A message is about to go out: its receiver comes after what this thread has begun."""
        self.streams.attempt(self._depart)

    def _depart(self) -> None:
        backend = self._backend
        if not self._thread.relaxed:
            self._thread.relaxed = backend.relax()
        if backend.capturing():
            return
        for device in backend.devices():
            stream = self.streams.current(device)
            if stream.query():
                continue
            key = stream.key
            event = self._departed.get(key)
            if event is None:
                event = self._departed.setdefault(key, backend.event(device))
            backend.record(event, stream)  # streams that wait for its earlier record go on waiting for that

    def arrive(self) -> None:
        """A message has come, and this thread goes on with it: after all that has departed. See [Note: departed]."""
        self.streams.attempt(self._arrive)

    def _arrive(self) -> None:
        backend = self._backend
        if backend.capturing():
            return
        self.slot_order.record_pending()
        streams = [self.streams.current(device) for device in backend.devices()]
        own = streams[0].key if len(streams) == 1 else None  # which comes after itself in any case
        pending = [item for item in list(self._departed.items()) if item[0] != own and not item[1].query()]
        for stream in streams:
            if pending:
                self.streams.follow_events(stream, pending)
            self.streams.follow_stream(stream, backend.default(stream.key[0]))

    # Values that go from thread to thread.

    def mark(self, earlier: Mark | None = None) -> Mark | None:
        """What this thread has begun, for the thread that gets a value computed by it; and what is still pending of
        ``earlier``, a mark of others. None: no device is in use.
        """
        made: Mark | None = self.streams.attempt(lambda: self._mark(earlier))
        return made or earlier

    def _mark(self, earlier: Mark | None) -> Mark | None:
        backend = self._backend
        if backend.capturing():
            return None
        events: list[tuple[Key, DeviceEvent]] = []
        for device in backend.devices():
            stream = self.streams.current(device)
            if not stream.query():
                event = backend.event(device)
                backend.record(event, stream)
                events.append((stream.key, event))
        if not backend.devices():
            return None
        if earlier is not None:
            new = {key for key, _ in events}
            events += [(key, event) for key, event in earlier.pending if key not in new]
        return Mark(events)  # also without events: the memory is another thread's all the same, see ``join``

    def join(self, mark: Mark | None, value: Any = None) -> Any:
        """This thread goes on with a value that came with ``mark``: after the work that computes it. The memory of the
        tensors in ``value`` is not reused before this thread's streams are done with it. Returns ``value``.
        """
        if mark is not None:
            self.streams.attempt(lambda: self._join(mark, value))
        return value

    def _join(self, mark: Mark, value: Any) -> None:
        backend = self._backend
        pending = mark.pending
        if not backend.capturing():
            for device in backend.devices() if pending else ():
                self.streams.follow_events(self.streams.current(device), pending)
            self.adopt(value)

    def adopt(self, value: Any) -> None:
        """Tensors of another thread are used on this thread's streams from now on: their memory is not reused before
        that is done.
        """
        self.streams.attempt(lambda: self._adopt(value))

    def _adopt(self, value: Any) -> None:
        streams: dict[int, Stream] = {}
        for tensor in tensors_in(value):
            device = tensor.device
            if device.type != "cuda":
                continue
            stream = streams.get(device.index)
            if stream is None:
                stream = streams[device.index] = self.streams.current(device.index)
            for part in strided_parts(tensor):
                self._backend.adopt(part, stream)

    def carry(self, value: object) -> Callable[[], None]:
        """A value leaves this thread. Another thread calls the result before it uses the value."""
        tensors = list(tensors_in(value))
        self.depart()

        def go_on() -> None:
            self.arrive()
            self.adopt(tensors)
            tensors.clear()  # so that memory which came with a request goes back before the reply does

        return go_on

    def value_of(self, future: Any) -> Any:
        """The value of a future that is done. Its own ``wait`` joins the mark that came with the value."""
        return future.wait()

    # Errors.

    def explain(self, error: BaseException, worker: str) -> None:
        """Add a note to an error of a device, which says whether the worker is still usable."""
        if not isinstance(error, RuntimeError) or isinstance(error.__cause__, RemoteTraceback):
            return  # an error from another worker already has its note
        if self.failed():
            error.add_note(f"CUDA has failed in the process of worker '{worker}' ({self.trouble}): restart that worker")
        elif isinstance(error, (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", ()))):
            error.add_note(f"worker '{worker}' and its CUDA devices are still usable")
