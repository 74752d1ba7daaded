"""What the tests of the kit are made of: frames, threads that poll, and pairs of connected endpoints."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, TypeVar

from backhaul._transport.base import Channel, Endpoint, Event, Lost, Received
from backhaul._wire.frames import Frame

PATIENCE = 30.0
"""Seconds after which a test that waits for an event fails. No test waits that long to pass."""

KIB, MIB = 1 << 10, 1 << 20
# Around the sizes of a reader's scratch memory, of what a writer copies, and of recycled blocks; and well beyond.
SIZES = (
    *(0, 1, 31, 32, 33),
    *(limit + off for limit in (32 * KIB, 64 * KIB, 128 * KIB) for off in (-33, -32, -1, 0, 1)),
    3 * MIB + 1,
)

T = TypeVar("T")
Content = tuple[int, int, bytes, list[bytes]]


def pattern(size: int, seed: int = 0) -> bytes:
    """``size`` bytes that differ from seed to seed.

    >>> pattern(3) == pattern(3), pattern(3) == pattern(3, seed=1)
    (True, False)
    """
    return random.Random(seed).randbytes(size)


def content(frame: Frame) -> Content:
    """Everything that must arrive unchanged, by value.

    >>> content(Frame(3, 7, b"hello", [bytearray(b"abc")]))
    (3, 7, b'hello', [b'abc'])
    """
    return frame.kind, frame.number, bytes(frame.body), [bytes(buffer) for buffer in frame.buffers]


def assert_same(came: Sequence[Frame], sent: Sequence[Frame]) -> None:
    """Assert that the frames that came are the frames that were sent, in the same order."""
    numbers, expected = [frame.number for frame in came], [frame.number for frame in sent]
    assert numbers == expected, f"frames {numbers} came, frames {expected} were sent"
    changed = [one.number for one, other in zip(came, sent, strict=True) if content(one) != content(other)]
    assert not changed, f"frames arrived changed: {changed}"


class Aside(Generic[T]):
    """A call on a thread of its own.

    >>> Aside(lambda: 6 * 7).result()
    42
    """

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._value: list[T] = []
        self._error: BaseException | None = None
        self.done = False
        self._thread = threading.Thread(target=self._run, name="aside", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value.append(self._call())
        except BaseException as error:
            self._error = error
        self.done = True

    def result(self, patience: float = PATIENCE) -> T:
        """Wait for the call, and return its result or raise its error."""
        self._thread.join(patience)
        assert self.done, f"a call still blocks after {patience:g} s: {self._call}"
        if self._error is not None:
            raise self._error
        return self._value[0]


def next_event(endpoint: Endpoint) -> Event:
    """Poll until there is an event. Its channel stays held."""
    for _ in range(10_000):  # a poll may return early without an event, but not every time
        event = endpoint.poll(PATIENCE)
        if event is not None:
            return event
    raise AssertionError("poll keeps returning, but nothing comes")


def next_frames(endpoint: Endpoint, count: int) -> list[Frame]:
    """Poll until ``count`` frames have come, and release their channels."""
    frames: list[Frame] = []
    while len(frames) < count:
        event = next_event(endpoint)
        assert isinstance(event, Received), f"{event} after {len(frames)} of {count} frames"
        assert event.frames, "a Received without frames"
        frames += event.frames
        event.channel.release()
    return frames


def until_lost(endpoint: Endpoint, channel: Channel) -> list[Frame]:
    """Poll until ``channel`` is lost. Returns the frames that came before. No other channel may have events."""
    frames: list[Frame] = []
    while True:
        event = next_event(endpoint)
        assert event.channel is channel
        if isinstance(event, Lost):
            assert event.reason
            return frames
        frames += event.frames
        event.channel.release()


def assert_nothing(endpoint: Endpoint) -> None:
    """Assert that there is no event now."""
    for _ in range(20):
        assert endpoint.poll(0) is None


class Pollers:
    """Threads that poll an endpoint, note each event, and release its channel. A context manager.

    Args:
        endpoint: The endpoint to poll.
        threads: How many threads.
        act: Called with each ``Received`` after it is noted and before its channel is released.
    """

    def __init__(self, endpoint: Endpoint, *, threads: int = 1, act: Callable[[Received], None] | None = None) -> None:
        self._endpoint = endpoint
        self._act = act
        self._changed = threading.Condition()  # guards the four below
        self._events: list[Event] = []
        self._frames = self._losses = 0
        self._errors: list[BaseException] = []
        self._stopping = False
        self._threads = [threading.Thread(target=self._poll, name="poller", daemon=True) for _ in range(threads)]

    def __enter__(self) -> Pollers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping = True
        for _ in range(int(PATIENCE * 20) if kind is None else 20):
            alive = [thread for thread in self._threads if thread.is_alive()]
            if not alive:
                break
            self._endpoint.wake()
            alive[0].join(0.05)
        if kind is None:
            self._raise_errors()
            assert not any(thread.is_alive() for thread in self._threads), "wake does not end a poll"

    def _poll(self) -> None:
        try:
            while not self._stopping:
                event = self._endpoint.poll(PATIENCE)
                if event is not None:
                    self._note(event)
        except BaseException as error:
            with self._changed:
                self._errors.append(error)
                self._changed.notify_all()

    def _note(self, event: Event) -> None:
        with self._changed:
            self._events.append(event)
            self._losses += isinstance(event, Lost)
            self._frames += len(event.frames) if isinstance(event, Received) else 0
            self._changed.notify_all()
        if isinstance(event, Received):
            if self._act is not None:
                self._act(event)
            event.channel.release()

    def _raise_errors(self) -> None:
        for error in self._errors:
            raise error

    def frames(self, channel: Channel | None = None) -> list[Frame]:
        """The frames that have come on ``channel``, or on all channels."""
        with self._changed:
            return [
                frame
                for event in self._events
                if isinstance(event, Received) and channel in (None, event.channel)
                for frame in event.frames
            ]

    def losses(self) -> list[Channel]:
        """The channels that were lost, each as often as its loss was reported."""
        with self._changed:
            return [event.channel for event in self._events if isinstance(event, Lost)]

    def wait_for(self, frames: int = 0, losses: int = 0, *, patience: float = PATIENCE) -> None:
        """Wait until that many frames and losses have come in total."""

        def enough() -> bool:
            return bool(self._errors) or (self._frames >= frames and self._losses >= losses)

        with self._changed:
            came = self._changed.wait_for(enough, patience)
        self._raise_errors()
        assert came, f"only {self._frames} of {frames} frames, {self._losses} of {losses} losses in {patience:g} s"


@dataclass(frozen=True, slots=True)
class Line:
    """Two endpoints and the channel between them, with both its ends."""

    here: Endpoint
    there: Endpoint
    near: Channel
    far: Channel

    def turned(self) -> Line:
        """The same line, seen from the other end."""
        return Line(self.there, self.here, self.far, self.near)


def join(here: Endpoint, there: Endpoint) -> Line:
    """Open a channel. ``there`` may have no other event meanwhile."""

    def connect() -> Channel:
        try:
            return here.connect(there.addresses[0], timeout=PATIENCE)
        finally:
            connected.set()
            there.wake()

    connected = threading.Event()
    connecting = Aside(connect)
    while not connected.is_set():
        assert there.poll(PATIENCE) is None
    near = connecting.result()
    near.send(Frame(1, 1, b"first"))  # the other endpoint shows an accepted channel with its first frame
    event = next_event(there)
    assert isinstance(event, Received)
    assert [content(frame) for frame in event.frames] == [(1, 1, b"first", [])]
    event.channel.release()
    return Line(here, there, near, event.channel)


def send_all(channel: Channel, frames: Sequence[Frame], timeout: float | None = None) -> None:
    """Send the frames in order."""
    for frame in frames:
        channel.send(frame, timeout=timeout)


def carry(line: Line, frames: Sequence[Frame]) -> list[Frame]:
    """Send ``frames`` from here to there, and read them at the same time. Returns what came."""
    sending = Aside(lambda: send_all(line.near, frames))
    came = next_frames(line.there, len(frames))
    sending.result()
    return came


def count_descriptors() -> int:
    """How many descriptors this process has open; 0 where the system does not tell."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0
