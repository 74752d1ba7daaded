"""The conformance kit: what every transport must do, as tests. It knows ``transport.base`` and no backend.

A backend passes if a subclass of ``TransportConformance`` that names it passes under pytest. Nothing here sleeps or
measures time: each wait ends as soon as what it waits for is there, and fails after ``PATIENCE`` seconds.

[Note: progress] A transport has no threads of its own, so an endpoint accepts, reads and writes on only while somebody
polls it. Tests that leave bytes to be sent later therefore poll both ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar, Generic, TypeVar

import pytest

from backhaul._transport.base import Channel, ChannelClosedError, Endpoint, EndpointFactory, Event, Lost, Received
from backhaul._wire.frames import Frame
from backhaul._wire.memory import Buffer

PATIENCE = 30.0
"""Seconds after which something that must happen is taken not to happen. No test waits that long to pass."""

T = TypeVar("T")
Content = tuple[int, int, bytes, list[bytes]]

_KIB, _MIB = 1 << 10, 1 << 20
# Around the limits of a reader's scratch memory, of what a writer copies, and of recycled blocks; and well beyond.
_SIZES = (
    *(0, 1, 31, 32, 33),
    *(limit + off for limit in (32 * _KIB, 64 * _KIB, 128 * _KIB) for off in (-33, -32, -1, 0, 1)),
    3 * _MIB + 1,
)


# What the tests are made of.


def pattern(size: int, seed: int = 0) -> bytes:
    """``size`` bytes that differ from seed to seed.

    >>> pattern(3) == pattern(3), pattern(3) == pattern(3, seed=1)
    (True, False)
    """
    return random.Random(seed).randbytes(size)


def content(frame: Frame) -> Content:
    """All that must survive the way, by value.

    >>> content(Frame(3, 7, b"hello", [bytearray(b"abc")]))
    (3, 7, b'hello', [b'abc'])
    """
    return frame.kind, frame.number, bytes(frame.body), [bytes(buffer) for buffer in frame.buffers]


def assert_same(came: Sequence[Frame], sent: Sequence[Frame]) -> None:
    """Assert that the frames that came are those that were sent, in that order."""
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
        """Wait for the call; return or raise what it did."""
        self._thread.join(patience)
        assert self.done, f"a call still blocks after {patience:g} s: {self._call}"
        if self._error is not None:
            raise self._error
        return self._value[0]


def next_event(endpoint: Endpoint) -> Event:
    """Poll until there is an event; the channel stays held."""
    for _ in range(10_000):  # a poll may return early with nothing to tell, but not for ever
        event = endpoint.poll(PATIENCE)
        if event is not None:
            return event
    raise AssertionError("poll keeps returning, but nothing comes")


def next_frames(endpoint: Endpoint, count: int) -> list[Frame]:
    """Poll until ``count`` frames have come, resuming their channels."""
    frames: list[Frame] = []
    while len(frames) < count:
        event = next_event(endpoint)
        assert isinstance(event, Received), f"{event} after {len(frames)} of {count} frames"
        assert event.frames, "a Received without frames"
        frames += event.frames
        event.channel.release()
    return frames


def until_lost(endpoint: Endpoint, channel: Channel) -> list[Frame]:
    """Poll until ``channel`` is lost; return the frames that came before. No other channel may have events."""
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
    """Assert that no event is there now."""
    for _ in range(20):
        assert endpoint.poll(0) is None


class Pollers:
    """Threads that poll an endpoint, note each event, and resume its channel. A context manager.

    Args:
        endpoint: What to poll.
        threads: How many threads.
        act: Called with each ``Received`` after it is noted and before its channel resumes.
    """

    def __init__(self, endpoint: Endpoint, *, threads: int = 1, act: Callable[[Received], None] | None = None) -> None:
        self._endpoint = endpoint
        self._act = act
        self._changed = threading.Condition()  # guards what follows
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
        """The frames that have come, on ``channel`` or on all."""
        with self._changed:
            return [
                frame
                for event in self._events
                if isinstance(event, Received) and channel in (None, event.channel)
                for frame in event.frames
            ]

    def losses(self) -> list[Channel]:
        """The channels that were lost, each as often as it was told."""
        with self._changed:
            return [event.channel for event in self._events if isinstance(event, Lost)]

    def wait_for(self, frames: int = 0, losses: int = 0, *, patience: float = PATIENCE) -> None:
        """Wait until that many frames and losses have come, altogether."""

        def enough() -> bool:
            return bool(self._errors) or (self._frames >= frames and self._losses >= losses)

        with self._changed:
            came = self._changed.wait_for(enough, patience)
        self._raise_errors()
        assert came, f"only {self._frames} of {frames} frames, {self._losses} of {losses} losses in {patience:g} s"


@dataclass(frozen=True, slots=True)
class Line:
    """A channel with both its ends, and their endpoints."""

    here: Endpoint
    there: Endpoint
    near: Channel
    far: Channel

    def turned(self) -> Line:
        """The same, seen from the other end."""
        return Line(self.there, self.here, self.far, self.near)


def join(here: Endpoint, there: Endpoint) -> Line:
    """Open a channel. Nothing else may happen at ``there`` meanwhile."""

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
    near.send(Frame(1, 1, b"first"))  # an accepted channel shows itself by its first frame
    event = next_event(there)
    assert isinstance(event, Received)
    assert [content(frame) for frame in event.frames] == [(1, 1, b"first", [])]
    event.channel.release()
    return Line(here, there, near, event.channel)


def send_all(channel: Channel, frames: Sequence[Frame], timeout: float | None = None) -> None:
    """Send them in order."""
    for frame in frames:
        channel.send(frame, timeout=timeout)


def carry(line: Line, frames: Sequence[Frame]) -> list[Frame]:
    """Send ``frames`` from here to there, reading all the while; return what came."""
    sending = Aside(lambda: send_all(line.near, frames))
    came = next_frames(line.there, len(frames))
    sending.result()
    return came


def count_descriptors() -> int:
    """How many descriptors this process has; 0 where the system does not tell."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0


# The tests.


class TransportConformance:
    """Tests that every transport passes. Subclass it, and let the fixture ``endpoints`` make endpoints of yours.

    Example:
        >>> from backhaul._transport.inproc import InprocEndpoint
        >>> class TestInproc(TransportConformance):
        ...     @pytest.fixture
        ...     def endpoints(self):
        ...         return InprocEndpoint

    Attributes:
        can_hold: Whether channels of this transport offer ``acquire`` and ``receive``.
    """

    can_hold: ClassVar[bool] = False

    @pytest.fixture
    def endpoints(self) -> EndpointFactory:
        """Makes the endpoints under test, each able to reach the others."""
        raise NotImplementedError("a subclass names its transport here")

    @pytest.fixture
    def make(self, endpoints: EndpointFactory) -> Iterator[EndpointFactory]:
        """As ``endpoints``; what it makes is closed after the test."""
        with contextlib.ExitStack() as stack:

            def make_one() -> Endpoint:
                endpoint = endpoints()
                stack.callback(endpoint.close)
                return endpoint

            yield make_one

    @pytest.fixture
    def line(self, make: EndpointFactory) -> Line:
        """Two endpoints and a channel between them."""
        return join(make(), make())

    # Frames arrive in order and intact.

    @pytest.mark.parametrize("size", _SIZES)
    def test_any_size_arrives_intact_both_ways(self, line: Line, size: int) -> None:
        one, two = pattern(size, 1), pattern(size, 2)
        frames = [
            Frame(3, 1, one),
            Frame(3, 2, b"", [one]),
            Frame(3, 3, one, [two, b"", one[:7]]),
            Frame(3, 4, b"tail"),
        ]
        for way in (line, line.turned()):
            assert_same(carry(way, frames), frames)

    @pytest.mark.parametrize("count", [1, 2, 511, 512, 513, 1024, 1025, 5000])
    def test_many_buffers_some_of_them_empty(self, line: Line, count: int) -> None:
        frames = [
            Frame(3, 1, b"body", [pattern(index % 3 * 11, index) for index in range(count)]),
            Frame(3, 2, b"", [b""] * count),
            Frame(3, 3, b"tail"),
        ]
        for way in (line, line.turned()):
            assert_same(carry(way, frames), frames)

    def test_many_large_buffers(self, line: Line) -> None:
        frame = Frame(3, 1, b"body", [pattern(size, size) for size in (*_SIZES, *reversed(_SIZES))])
        assert_same(carry(line, [frame]), [frame])

    def test_kind_and_number_use_their_full_range(self, line: Line) -> None:
        frames = [Frame(kind, number) for kind in (0, 1, 255) for number in (0, 1, (1 << 64) - 1)]
        assert_same(carry(line, frames), frames)

    def test_buffers_may_be_any_memory(self, line: Line) -> None:
        size = 200 * _KIB
        with mmap.mmap(-1, size) as mapped:
            mapped[:] = pattern(size)
            array = (ctypes.c_ubyte * size).from_buffer_copy(pattern(size, 1))
            view = memoryview(bytearray(pattern(2 * size, 2)))[17 : 17 + size]
            buffers: list[Buffer] = [mapped, array, view, bytearray(pattern(size, 3)), bytes(view[:9]), view[:0]]
            sent = Frame(3, 1, memoryview(b"body")[1:], buffers)
            (came,) = carry(line, [sent])
            assert content(came) == content(sent)

    def test_what_arrives_is_the_receivers_own_memory(self, line: Line) -> None:
        sent = Frame(3, 1, b"body", [bytearray(pattern(size, size)) for size in (10, 40 * _KIB, 300 * _KIB)])
        before = content(sent)
        (came,) = carry(line, [sent])
        for buffer in came.buffers:
            memoryview(buffer).cast("B")[:] = bytes(len(buffer))  # fails if it cannot be written
        assert content(sent) == before

    def test_long_streams_both_ways_at_once(self, line: Line) -> None:
        streams = []
        for seed in (1, 2):
            draw = random.Random(seed)
            sizes = [draw.choice([0, 5, 700, 9 * _KIB, 33 * _KIB, 70 * _KIB, 150 * _KIB]) for _ in range(400)]
            streams.append([Frame(3, n, pattern(size % 977, n), [pattern(size, n)]) for n, size in enumerate(sizes)])
        with Pollers(line.here) as here, Pollers(line.there) as there:
            sending = [
                Aside(functools.partial(send_all, channel, stream))
                for channel, stream in zip((line.near, line.far), streams, strict=True)
            ]
            there.wait_for(frames=len(streams[0]))
            here.wait_for(frames=len(streams[1]))
            for aside in sending:
                aside.result()
            for stream, came in zip(streams, (there.frames(line.far), here.frames(line.near)), strict=True):
                assert_same(came, stream)

    # Once ``send`` returns, the memory may be changed.

    @pytest.mark.parametrize("size", [1, 1000, 40 * _KIB, 100 * _KIB, 2 * _MIB])
    def test_memory_may_change_once_sent(self, line: Line, size: int) -> None:
        with Pollers(line.there) as there:
            memory = bytearray(size)
            for round_ in range(20):
                memory[:] = bytes([round_]) * size
                line.near.send(Frame(3, round_, memory[:1], [memory, memoryview(memory)[: size // 2]]))
            memory[:] = b"x" * size
            there.wait_for(frames=20)
            for round_, frame in enumerate(there.frames()):
                fill = bytes([round_])
                assert content(frame) == (3, round_, fill, [fill * size, fill * (size // 2)])

    @pytest.mark.parametrize("size", [1000, 40 * _KIB, 100 * _KIB, 2 * _MIB])
    def test_memory_may_change_although_the_peer_has_not_read(self, line: Line, size: int) -> None:
        memory = bytearray(size)
        count = max(3, 8 * _MIB // size)
        for number in range(count):
            memory[:] = bytes([number % 251]) * size
            line.near.send(Frame(3, number, b"", [memory]), timeout=0)
        memory[:] = b"x" * size
        with Pollers(line.here), Pollers(line.there) as there:
            there.wait_for(frames=count)
            for number, frame in enumerate(there.frames()):
                assert content(frame) == (3, number, b"", [bytes([number % 251]) * size])

    # Each event goes to one poller.

    def test_each_event_goes_to_exactly_one_poller(self, make: EndpointFactory) -> None:
        here, there = make(), make()
        lines = [join(here, there) for _ in range(8)]
        count = 60
        with Pollers(here, threads=3) as ours, Pollers(there, threads=4) as theirs:
            senders = []
            for line in lines:
                for channel in (line.near, line.far):
                    frames = [Frame(3, number, pattern(number * 37 % 900, number)) for number in range(count)]
                    senders.append(Aside(functools.partial(send_all, channel, frames)))
            for sender in senders:
                sender.result()
            ours.wait_for(frames=len(lines) * count)
            theirs.wait_for(frames=len(lines) * count)
            for line in lines:
                assert [frame.number for frame in ours.frames(line.near)] == list(range(count))
                assert [frame.number for frame in theirs.frames(line.far)] == list(range(count))
            closers = [
                Aside(channel.close)
                for index, line in enumerate(lines)
                for channel in ((line.near,), (line.far,), (line.near, line.far))[index % 3]
            ]
            for closer in closers:
                closer.result()
            ours.wait_for(losses=len(lines))
            theirs.wait_for(losses=len(lines))
        assert_nothing(here)
        assert_nothing(there)
        assert sorted(map(id, ours.losses())) == sorted(id(line.near) for line in lines)
        assert sorted(map(id, theirs.losses())) == sorted(id(line.far) for line in lines)

    # A channel that has delivered is held until it resumes.

    def test_a_channel_that_delivered_is_silent_until_it_resumes(self, line: Line) -> None:
        other = join(line.here, line.there)
        line.near.send(Frame(3, 1))
        event = next_event(line.there)
        assert isinstance(event, Received)
        assert event.channel is line.far
        for number in (2, 3, 4):
            line.near.send(Frame(3, number))
        other.near.send(Frame(3, 9))
        marker = next_event(line.there)
        assert marker.channel is other.far
        assert_nothing(line.there)
        line.far.release()
        assert [frame.number for frame in next_frames(line.there, 3)] == [2, 3, 4]
        other.far.release()

    def test_a_held_channel_still_sends(self, line: Line) -> None:
        line.near.send(Frame(3, 1))
        event = next_event(line.there)
        event.channel.send(Frame(4, 1, b"reply"))
        assert [content(frame) for frame in next_frames(line.here, 1)] == [(4, 1, b"reply", [])]
        event.channel.release()

    def test_a_held_channel_tells_its_loss_only_when_it_resumes(self, line: Line) -> None:
        other = join(line.here, line.there)
        line.near.send(Frame(3, 1))
        next_event(line.there)
        line.near.send(Frame(3, 2))
        line.near.close()
        other.near.send(Frame(3, 9))
        assert next_event(line.there).channel is other.far
        assert_nothing(line.there)
        line.far.release()
        assert [frame.number for frame in until_lost(line.there, line.far)] == [2]

    def test_resume_races_with_arrival(self, line: Line) -> None:
        count = 2000
        with Pollers(line.there, threads=2) as there:
            for number in range(count):
                line.near.send(Frame(3, number))
            there.wait_for(frames=count)
            assert [frame.number for frame in there.frames()] == list(range(count))

    # ``acquire`` and ``receive``, where offered.

    def _hold(self, channel: Channel, holder: object = None) -> None:
        if not self.can_hold:
            pytest.skip("this transport does not offer hold")
        assert channel.acquire(holder)

    def test_hold_is_refused_where_it_is_not_offered(self, line: Line) -> None:
        if self.can_hold:
            pytest.skip("this transport offers hold")
        assert not line.near.acquire()
        with pytest.raises(NotImplementedError):
            line.near.receive(0)

    def test_the_holder_receives_and_pollers_do_not(self, line: Line) -> None:
        other = join(line.here, line.there)
        line.near.send(Frame(3, 1))  # may be there before the hold
        self._hold(line.far)
        for number in (2, 3):
            line.near.send(Frame(3, number))
        other.near.send(Frame(3, 9))
        assert next_event(line.there).channel is other.far
        assert_nothing(line.there)
        came: list[Frame] = []
        while len(came) < 3:
            event = line.far.receive(PATIENCE)
            assert isinstance(event, Received)
            assert event.channel is line.far
            came += event.frames
        assert [frame.number for frame in came] == [1, 2, 3]
        line.near.send(Frame(3, 4))
        other.far.release()
        other.near.send(Frame(3, 10))
        assert next_event(line.there).channel is other.far
        assert_nothing(line.there)  # it is still held
        line.far.release()
        assert [frame.number for frame in next_frames(line.there, 1)] == [4]
        other.far.release()

    def test_receive_gives_up_after_its_timeout_and_stays_held(self, line: Line) -> None:
        self._hold(line.far)
        assert line.far.receive(0) is None
        assert line.far.receive(0.001) is None
        assert not line.far.acquire()
        line.near.send(Frame(3, 1))
        event = line.far.receive(PATIENCE)
        assert isinstance(event, Received)
        line.far.release()

    def test_a_held_channel_cannot_be_held_again(self, line: Line) -> None:
        self._hold(line.far)
        assert not line.far.acquire()
        line.far.release()
        line.near.send(Frame(3, 1))
        event = next_event(line.there)
        assert not event.channel.acquire()
        event.channel.release()
        assert line.far.acquire()
        line.far.release()

    def test_receive_waits_for_what_comes_later(self, line: Line) -> None:
        self._hold(line.far)
        receiving = Aside(lambda: line.far.receive(None))
        sent = Frame(3, 1, b"large", [pattern(3 * _MIB)])
        line.near.send(sent)
        event = receiving.result()
        assert isinstance(event, Received)
        assert_same(event.frames, [sent])
        line.far.release()

    @pytest.mark.parametrize("who", ["peer", "this side"])
    def test_receive_tells_the_loss_and_ends_the_hold(self, line: Line, who: str) -> None:
        holder = object()
        self._hold(line.far, holder)
        receiving = Aside(lambda: line.far.receive(None))
        (line.near if who == "peer" else line.far).close()
        event = receiving.result()
        assert isinstance(event, Lost)
        assert event.channel is line.far
        assert_nothing(line.there)
        assert not line.far.acquire()
        assert not line.far.acquire(holder), "nor by who held it then"

    def test_an_interrupt_after_the_loss_does_no_harm_to_others(self, line: Line) -> None:
        holder = object()
        self._hold(line.far, holder)
        line.far.abort("over")
        assert isinstance(line.far.receive(PATIENCE), Lost)
        assert isinstance(next_event(line.here), Lost)
        others = [join(line.here, line.there) for _ in range(4)]  # some with what the lost one had: descriptors, say
        line.far.recover_after_interrupt(holder, whole=True)
        for other in others:
            other.near.send(Frame(3, 1))
            assert next_event(line.there).channel is other.far
            other.far.release()

    def test_holders_and_pollers_lose_nothing_between_them(self, line: Line) -> None:
        self._hold(line.near)
        line.near.release()
        replies: dict[int, int] = {}

        def note(event: Received) -> None:
            for frame in event.frames:
                replies[frame.number] = replies.get(frame.number, 0) + 1

        def reply(event: Received) -> None:
            for frame in event.frames:
                event.channel.send(Frame(4, frame.number, frame.body))

        count = 500
        with Pollers(line.here, threads=2, act=note), Pollers(line.there, act=reply):
            for number in range(count):
                line.near.send(Frame(3, number, pattern(number % 100)))
                while number not in replies:
                    if line.near.acquire():
                        while number not in replies:
                            event = line.near.receive(PATIENCE)
                            assert isinstance(event, Received)
                            note(event)
                        line.near.release()
        assert replies == dict.fromkeys(range(count), 1)

    # The end of a channel.

    def test_what_was_sent_comes_before_the_loss(self, line: Line) -> None:
        for number in range(5):
            line.near.send(Frame(3, number, pattern(1000 * number)))
        line.near.close()
        assert [frame.number for frame in until_lost(line.there, line.far)] == list(range(5))
        assert until_lost(line.here, line.near) == []
        assert_nothing(line.here)
        assert_nothing(line.there)

    def test_a_large_frame_comes_before_the_loss(self, line: Line) -> None:
        sent = [Frame(3, number, b"", [pattern(3 * _MIB, number)]) for number in range(3)]

        def send_and_close() -> None:
            send_all(line.near, sent)
            line.near.close()

        sending = Aside(send_and_close)
        assert_same(until_lost(line.there, line.far), sent)
        sending.result()
        assert until_lost(line.here, line.near) == []

    def test_closing_keeps_what_a_slow_peer_has_not_read(self, line: Line) -> None:
        sent = [Frame(3, number, b"", [pattern(_MIB, number)]) for number in range(24)]
        send_all(line.near, sent, timeout=0)
        line.near.close()
        with Pollers(line.here) as here, Pollers(line.there) as there:
            there.wait_for(losses=1)
            here.wait_for(losses=1)
            assert_same(there.frames(), sent)

    def test_closing_keeps_what_has_come(self, line: Line) -> None:
        for number in range(3):
            line.near.send(Frame(3, number))
        line.far.close()
        assert [frame.number for frame in until_lost(line.there, line.far)] == [0, 1, 2]
        assert until_lost(line.here, line.near) == []

    def test_closing_while_held(self, line: Line) -> None:
        line.near.send(Frame(3, 1))
        event = next_event(line.there)
        event.channel.close()
        event.channel.release()
        assert until_lost(line.there, line.far) == []
        assert until_lost(line.here, line.near) == []

    def test_both_ends_closing_is_one_loss_each(self, line: Line) -> None:
        for channel in (line.near, line.far, line.near, line.far):
            channel.close()
        assert until_lost(line.here, line.near) == []
        assert until_lost(line.there, line.far) == []
        line.near.close()  # closing what is lost does no harm
        assert_nothing(line.here)
        assert_nothing(line.there)

    def test_one_channel_ends_alone(self, line: Line) -> None:
        other = join(line.here, line.there)
        line.near.close()
        assert until_lost(line.there, line.far) == []
        assert until_lost(line.here, line.near) == []
        assert [frame.number for frame in carry(other, [Frame(3, 1)])] == [1]
        assert [frame.number for frame in carry(other.turned(), [Frame(3, 2)])] == [2]

    def test_nothing_can_be_sent_on_a_closed_channel(self, line: Line) -> None:
        line.near.close()
        for size in (0, 100 * _KIB):
            with pytest.raises(ChannelClosedError):
                line.near.send(Frame(3, 1, b"", [bytes(size)]))
        assert until_lost(line.there, line.far) == []
        for timeout in (None, 0):
            with pytest.raises(ChannelClosedError):
                line.far.send(Frame(3, 1), timeout=timeout)
        assert until_lost(line.here, line.near) == []
        with pytest.raises(ChannelClosedError):
            line.near.send(Frame(3, 1))

    @pytest.mark.parametrize("who", ["this side", "peer", "peer's endpoint"])
    def test_the_end_frees_a_sender_that_waits(self, line: Line, who: str) -> None:
        some, closed = threading.Event(), threading.Event()

        def send_until_refused() -> None:
            frame = Frame(3, 1, b"", [pattern(_MIB)])
            for _ in range(48):  # nobody reads; a transport without back-pressure takes it all
                line.near.send(frame)
                some.set()
            closed.wait(PATIENCE)
            line.near.send(frame)

        sending = Aside(send_until_refused)
        assert some.wait(PATIENCE)
        closers = {"this side": line.near.close, "peer": line.far.close, "peer's endpoint": line.there.close}
        closers[who]()
        closed.set()
        with Pollers(line.here) as here, contextlib.ExitStack() as stack:
            if who != "peer's endpoint":
                stack.enter_context(Pollers(line.there))
            with pytest.raises(ChannelClosedError):
                sending.result()
            here.wait_for(losses=1)

    # Connecting.

    def test_connecting_to_nobody(self, make: EndpointFactory) -> None:
        here, gone = make(), make()
        gone.close()
        for address in gone.addresses:
            with pytest.raises(ConnectionError):
                here.connect(address, timeout=PATIENCE)

    @pytest.mark.parametrize("address", ["", ":", "nonsense", "carrier-pigeon:coop/7", "carrier-pigeon:host:1"])
    def test_connecting_to_a_foreign_address(self, make: EndpointFactory, address: str) -> None:
        with pytest.raises(ValueError):
            make().connect(address, timeout=PATIENCE)

    def test_a_closed_endpoint_connects_to_nobody(self, make: EndpointFactory) -> None:
        here, there = make(), make()
        here.close()
        with Pollers(there), pytest.raises(ConnectionError):
            here.connect(there.addresses[0], timeout=PATIENCE)

    def test_every_address_works(self, make: EndpointFactory) -> None:
        here, there = make(), make()
        assert there.addresses
        with Pollers(there) as theirs:
            for number, address in enumerate(there.addresses):
                here.connect(address, timeout=PATIENCE).send(Frame(3, number))
            theirs.wait_for(frames=len(there.addresses))

    def test_an_endpoint_may_connect_to_itself(self, make: EndpointFactory) -> None:
        here = make()
        with Pollers(here) as ours:
            near = here.connect(here.addresses[0], timeout=PATIENCE)
            near.send(Frame(3, 1))
            ours.wait_for(frames=1)
            near.close()
            ours.wait_for(losses=2)

    def test_many_channels_at_once(self, make: EndpointFactory) -> None:
        hub = make()
        spokes = [make() for _ in range(4)]

        def reply(event: Received) -> None:
            for frame in event.frames:
                event.channel.send(Frame(4, frame.number, frame.body, frame.buffers), timeout=0)

        per_spoke, rounds = 16, 6

        def talk(spoke: Endpoint) -> None:
            with Pollers(spoke) as ours:
                channels = [spoke.connect(hub.addresses[0], timeout=PATIENCE) for _ in range(per_spoke)]
                for number in range(rounds):
                    for index, channel in enumerate(channels):
                        body = pattern(index * 100, number)
                        channel.send(Frame(3, number, body, [pattern(index * 3000, number)]))
                ours.wait_for(frames=per_spoke * rounds)
                for index, channel in enumerate(channels):
                    assert list(map(content, ours.frames(channel))) == [
                        (4, number, pattern(index * 100, number), [pattern(index * 3000, number)])
                        for number in range(rounds)
                    ]
                for channel in channels:
                    channel.close()
                ours.wait_for(losses=per_spoke)

        with Pollers(hub, threads=2, act=reply) as hubs:
            for talking in [Aside(functools.partial(talk, spoke)) for spoke in spokes]:
                talking.result()
            hubs.wait_for(losses=per_spoke * len(spokes))

    # Back-pressure, and many writers.

    def test_send_without_waiting_never_blocks_and_loses_nothing(self, line: Line) -> None:
        draw = random.Random(1)
        sizes = [draw.choice([0, 200, 20 * _KIB, 60 * _KIB, 500 * _KIB, 2 * _MIB]) for _ in range(60)]
        sent = [Frame(3, number, b"", [pattern(size, number)]) for number, size in enumerate(sizes)]
        Aside(lambda: send_all(line.near, sent, timeout=0)).result()
        with Pollers(line.here), Pollers(line.there) as there:
            there.wait_for(frames=len(sent))
            assert_same(there.frames(), sent)

    def test_send_that_gave_up_waiting_loses_nothing(self, line: Line) -> None:
        sent = [Frame(3, number, b"", [pattern(3 * _MIB, number)]) for number in range(8)]
        Aside(lambda: send_all(line.near, sent, timeout=0.001)).result()
        with Pollers(line.here), Pollers(line.there) as there:
            there.wait_for(frames=len(sent))
            assert_same(there.frames(), sent)

    def test_waiting_and_hurried_senders_keep_their_order(self, line: Line) -> None:
        hurried = [Frame(3, number, b"", [pattern(_MIB, number)]) for number in range(16)]
        patient = [Frame(4, number, b"", [pattern(_MIB, number)]) for number in range(16)]
        send_all(line.near, hurried[:8], timeout=0)
        waiting = Aside(lambda: send_all(line.near, patient))
        send_all(line.near, hurried[8:], timeout=0)
        with Pollers(line.here), Pollers(line.there) as there:
            there.wait_for(frames=32)
            waiting.result()
            for stream in (hurried, patient):
                came = [frame for frame in there.frames() if frame.kind == stream[0].kind]
                assert_same(came, stream)

    def test_threads_that_share_a_channel_do_not_mix_their_frames(self, line: Line) -> None:
        threads, count = 8, 60
        sizes = (0, 10, 3000, 40 * _KIB, 90 * _KIB, 400 * _KIB)

        def sequence(thread: int) -> list[Frame]:
            draw = random.Random(thread)
            return [
                Frame(thread, number, pattern(number, thread), [pattern(draw.choice(sizes), number)])
                for number in range(count)
            ]

        sequences = [sequence(thread) for thread in range(threads)]
        with Pollers(line.here), Pollers(line.there, threads=2) as there:
            # Every second one does not wait for the peer.
            senders = [
                Aside(functools.partial(send_all, line.near, frames, None if thread % 2 else 0))
                for thread, frames in enumerate(sequences)
            ]
            for sender in senders:
                sender.result()
            there.wait_for(frames=threads * count)
            for thread, frames in enumerate(sequences):
                came = [frame for frame in there.frames() if frame.kind == thread]
                assert_same(came, frames)

    def test_both_directions_full_of_large_frames_do_not_block_each_other(self, line: Line) -> None:
        count, size = 5, 2 * _MIB
        with Pollers(line.here) as here, Pollers(line.there) as there:
            senders = []
            for channel in (line.near, line.far):
                for timeout in (0, None, None):
                    frames = [Frame(3, number, b"", [pattern(size, number)]) for number in range(count)]
                    senders.append(Aside(functools.partial(send_all, channel, frames, timeout)))
            for sender in senders:
                sender.result()
            here.wait_for(frames=3 * count)
            there.wait_for(frames=3 * count)
            for frame in (*here.frames(), *there.frames()):
                assert content(frame) == (3, frame.number, b"", [pattern(size, frame.number)])

    @pytest.mark.parametrize("attempt", range(3))  # it takes luck to catch the poller at the wrong moment
    def test_a_sender_that_waits_does_not_stop_a_poller(self, line: Line, attempt: int) -> None:
        other = join(line.here, line.there)
        size = (8 + attempt) * _MIB
        send_all(line.near, [Frame(3, number, b"", [bytes(size)]) for number in range(3)], timeout=0)
        waiting = Aside(lambda: line.near.send(Frame(3, 3, b"", [bytes(4 * size)])))
        with Pollers(line.here) as here:
            came = 0
            while came < 3:  # read some, so that the socket takes more; then no more, so that the sender waits on
                if came:
                    line.far.release()
                event = next_event(line.there)
                assert isinstance(event, Received)
                came += len(event.frames)
            other.far.send(Frame(3, 9))
            here.wait_for(frames=1, patience=PATIENCE / 3)
            line.far.release()
            with Pollers(line.there) as there:
                there.wait_for(frames=4 - came)
                waiting.result()

    def test_bytes_are_counted_where_they_are_sent(self, line: Line) -> None:
        if not line.near.bytes_sent:  # the first frame has gone out
            pytest.skip("this transport does not count bytes")
        sent, silent = line.near.bytes_sent, line.far.bytes_sent
        frames = [Frame(3, number, b"body", [pattern(size)]) for number, size in enumerate(_SIZES)]
        with Pollers(line.here), Pollers(line.there) as there:
            senders = [Aside(functools.partial(send_all, line.near, frames, timeout)) for timeout in (None, 0, 0.001)]
            for sender in senders:
                sender.result()
            there.wait_for(frames=3 * len(frames))
        assert line.near.bytes_sent - sent >= 3 * sum(frame.nbytes for frame in frames)
        assert line.far.bytes_sent == silent

    # Waiting.

    def test_poll_gives_up_after_its_timeout(self, line: Line) -> None:
        for timeout in (0, 0.001):
            for _ in range(3):
                assert line.here.poll(timeout) is None

    def test_wake_ends_the_next_poll(self, make: EndpointFactory) -> None:
        endpoint = make()
        for _ in range(50):
            endpoint.wake()
            polling = Aside(lambda: endpoint.poll(None))
            assert polling.result() is None

    def test_wake_ends_polls_that_wait(self, make: EndpointFactory) -> None:
        endpoint = make()
        polling = [Aside(lambda: endpoint.poll(None)) for _ in range(4)]
        with Pollers(endpoint, threads=2):  # more that wait; leaving wakes until all have ended
            pass
        while not all(aside.done for aside in polling):
            endpoint.wake()
        assert [aside.result() for aside in polling] == [None] * 4

    def test_wake_takes_no_event_away(self, line: Line) -> None:
        for number in range(100):
            line.near.send(Frame(3, number))
            line.there.wake()
            assert [frame.number for frame in next_frames(line.there, 1)] == [number]

    def test_wake_soon_ends_a_poll_too(self, make: EndpointFactory) -> None:
        endpoint = make()
        for _ in range(20):
            polling = Aside(lambda: endpoint.poll(None))
            endpoint.wake_soon()
            assert polling.result() is None

    def test_timeouts_may_be_long(self, line: Line) -> None:
        years = 1e9
        line.near.send(Frame(3, 1), timeout=years)
        event = None
        while event is None:
            event = line.there.poll(years)
        event.channel.release()
        sending = Aside(lambda: send_all(line.near, [Frame(3, 2, b"", [pattern(8 * _MIB)])], timeout=years))
        next_frames(line.there, 1)
        sending.result()

    def test_receive_may_wait_long(self, line: Line) -> None:
        self._hold(line.far)
        line.near.send(Frame(3, 1))
        assert isinstance(line.far.receive(1e9), Received)
        line.far.release()

    # The end of an endpoint.

    def test_closing_an_endpoint_is_a_loss_for_its_peers(self, line: Line) -> None:
        other = join(line.here, line.there)
        line.near.send(Frame(3, 1, pattern(1000)))
        line.here.close()
        with Pollers(line.there) as there:
            there.wait_for(frames=1, losses=2)
            assert [frame.number for frame in there.frames(line.far)] == [1]
        assert_nothing(line.there)
        assert sorted(map(id, there.losses())) == sorted(map(id, (line.far, other.far)))
        with pytest.raises(ChannelClosedError):
            line.near.send(Frame(3, 1))

    def test_closing_an_endpoint_frees_everything(self, endpoints: EndpointFactory) -> None:
        before = count_descriptors()
        threads = threading.active_count()
        here, there = endpoints(), endpoints()
        idle, held, closed, stalled = (join(here, there) for _ in range(4))
        held.near.send(Frame(3, 1))
        assert next_event(there).channel is held.far
        closed.near.close()
        for channel in (stalled.near, stalled.far):
            send_all(channel, [Frame(3, 1, b"", [pattern(_MIB)])] * 12, timeout=0)
        idle.near.send(Frame(3, 1, pattern(1000)))
        there.close()
        here.close()
        here.close()  # once more does no harm
        for line in (idle, held, closed, stalled):
            for channel in (line.near, line.far):
                channel.close()
                with pytest.raises(ChannelClosedError):
                    channel.send(Frame(3, 1))
        assert count_descriptors() == before
        assert threading.active_count() == threads
