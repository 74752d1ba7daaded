"""Fake streams that find a missing wait: each stream and each event has a vector clock.

A ``Cell`` is memory. A stream that reads it must come after the last write, and a stream that writes it must come after
all reads and writes; else it raises ``RaceError``. No work is ever done by itself, so every missing wait is found;
``finish`` completes the work of all streams, as a real device does in time.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

Clock = dict[int, int]


class RaceError(AssertionError):
    """A stream, or the host, did not wait."""


class FakeStream:
    def __init__(self, backend: FakeCuda, device: int, number: int, external: bool = False) -> None:
        self.backend = backend
        self.device = device
        self.number = number
        self.external = external
        self.clock: Clock = {}
        self.waits = 0

    @property
    def key(self) -> tuple[int, int]:
        return self.device, self.number

    @property
    def now(self) -> int:
        return self.clock.get(self.number, 0)

    def step(self) -> int:
        self.clock[self.number] = self.now + 1
        return self.now

    def query(self) -> bool:
        if self.backend.broken:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return self.backend.passed({self.number: self.now})

    def __repr__(self) -> str:
        return f"<stream {self.number} of {self.device}>"


class FakeEvent:
    """Recorded on streams of one device only, like an event of CUDA."""

    foreign = False  # whether another process records it

    def __init__(self, backend: FakeCuda, device: int | None = None) -> None:
        self.backend = backend
        self.device = device
        self.clock: Clock = {}
        self.records = 0

    def query(self) -> bool:
        return self.backend.passed(self.clock)

    def synchronize(self) -> None:
        for number, time in self.clock.items():
            self.backend.done[number] = max(self.backend.done.get(number, 0), time)


class FakeCuda:
    """A ``backend.StreamBackend`` for threads of this process."""

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self.broken = False
        self.capture = False
        self.no_flags = False  # streams cannot write what other processes see
        self.done: Clock = {}  # of every stream, how much of its work is done
        self.events = 0
        self.relaxed = 0
        self.pools: set[int] = set()  # devices of which there are streams besides the default one
        self.foreign_waits = 0  # for flags
        self._numbers = 0
        self._streams: list[FakeStream] = []
        self._here = threading.local()
        self._defaults = [self._make(device) for device in range(count)]

    def _make(self, device: int, external: bool = False) -> FakeStream:
        self._numbers += 1
        stream = FakeStream(self, device, self._numbers, external)
        self._streams.append(stream)
        return stream

    def finish(self) -> None:
        """Complete the work of all streams."""
        for stream in self._streams:
            self.done[stream.number] = stream.now

    def passed(self, clock: Clock) -> bool:
        return all(self.done.get(number, 0) >= time for number, time in clock.items())

    def devices(self) -> Sequence[int]:
        return range(self.count)

    def current(self, device: int) -> FakeStream:
        used: FakeStream = getattr(self._here, "streams", {}).get(device, self._defaults[device])
        return used

    def default(self, device: int) -> FakeStream:
        return self._defaults[device]

    def fresh(self, device: int) -> FakeStream:
        if device not in self.pools:
            # CUDA makes no streams while one waits for another process.
            assert not self.foreign_waits, "the first stream of a device, and one of them waits for another process"
            self.pools.add(device)
        return self._make(device)

    def external(self, device: int) -> FakeStream:
        return self._make(device, external=True)

    def use(self, stream: FakeStream) -> None:
        self._here.__dict__.setdefault("streams", {})[stream.device] = stream

    def adopt(self, tensor: object, stream: FakeStream) -> None:
        """The fake has no allocator that could reuse memory."""

    def lasting(self, stream: FakeStream) -> bool:
        return not stream.external

    def event(self, device: int) -> FakeEvent:
        self.events += 1
        return FakeEvent(self, device)

    def record(self, event: FakeEvent, stream: FakeStream) -> None:
        if event.foreign and self.no_flags:
            raise RuntimeError("CUDA error: operation not supported")
        assert event.foreign or event.device in (None, stream.device), "an event of another device"
        event.device = stream.device
        event.records += 1
        event.clock = dict(stream.clock)

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        stream.waits += 1
        self.foreign_waits += event.foreign
        for number, time in event.clock.items():
            stream.clock[number] = max(stream.clock.get(number, 0), time)

    def relax(self) -> bool:
        self.relaxed += 1
        return True

    def capturing(self) -> bool:
        return self.capture


class Cell:
    """Memory of a device."""

    def __init__(self, backend: FakeCuda, device: int = 0) -> None:
        self._backend = backend
        self._device = device
        self._write: tuple[int, int] = (0, 0)
        self._reads: Clock = {}

    def write(self) -> None:
        """Write it on the calling thread's stream."""
        self.write_on(self._backend.current(self._device))

    def read(self) -> None:
        self.read_on(self._backend.current(self._device))

    def write_on(self, stream: FakeStream) -> None:
        self._check(stream, *self._write)
        for number, time in self._reads.items():
            self._check(stream, number, time)
        self._write, self._reads = (stream.number, stream.step()), {}

    def read_on(self, stream: FakeStream) -> None:
        self._check(stream, *self._write)
        self._reads[stream.number] = stream.step()

    def look(self) -> None:
        """The host reads it."""
        self._check_done(*self._write)

    def put(self) -> None:
        """The host writes it."""
        self._check_done(*self._write)
        for number, time in self._reads.items():
            self._check_done(number, time)
        self._write, self._reads = (0, 0), {}

    def _check_done(self, number: int, time: int) -> None:
        if time > self._backend.done.get(number, 0):
            raise RaceError(f"the host does not wait for {number} to be at {time}")

    def _check(self, stream: FakeStream, number: int, time: int) -> None:
        if time > max(stream.clock.get(number, 0), self._backend.done.get(number, 0)):
            raise RaceError(f"{stream!r} does not wait for {number} to be at {time}")


class Threads:
    """Threads that run what the test passes to them, one at a time, each with its own streams."""

    def __init__(self) -> None:
        self._boxes: dict[str, queue.SimpleQueue[Any]] = {}
        self._threads: list[threading.Thread] = []

    def run(self, name: str, act: Callable[[], Any]) -> Any:
        box = self._boxes.get(name)
        if box is None:
            box = self._boxes[name] = queue.SimpleQueue()
            thread = threading.Thread(target=self._work, args=(box,), daemon=True)
            self._threads.append(thread)
            thread.start()
        result: Future[Any] = Future()
        box.put((act, result))
        return result.result(10)

    @staticmethod
    def _work(box: queue.SimpleQueue[Any]) -> None:
        while (item := box.get()) is not None:
            act, result = item
            try:
                result.set_result(act())
            except BaseException as error:
                result.set_exception(error)
            del item, act, result

    def close(self) -> None:
        for box in self._boxes.values():
            box.put(None)
        for thread in self._threads:
            thread.join(10)
