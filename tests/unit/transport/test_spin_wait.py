"""When a thread spins before it sleeps, and how a waiter waits for channels."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import pytest

from backhaul._transport import spin_wait as module
from backhaul._transport.base import Event, Lost, Received
from backhaul._transport.processors import Processors
from backhaul._transport.sockets import channel as socket_channel
from backhaul._transport.sockets.channel import SocketChannel
from backhaul._transport.sockets.endpoint import SocketEndpoint
from backhaul._transport.spin_wait import BRIEF_SECONDS, BRIEF_SPINS, LONG_SECONDS, SpinLimit, SpinPolicy
from backhaul._transport.waiter import ChannelWaiter
from backhaul._wire.frames import Frame


@pytest.fixture(autouse=True)
def without_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are of the loop in Python. ``test_native_spin`` tests the other."""
    monkeypatch.setattr(module, "core", None)


class Clocks:
    """Time that passes as a test says, and processor time."""

    def __init__(self) -> None:
        self.wall = 100.0
        self.processor = 7.0

    def perf_counter(self) -> float:
        return self.wall

    def thread_time(self) -> float:
        return self.processor


class Machine(Processors):
    """Processors as a test says."""

    def __init__(self, count: float, free: float) -> None:
        super().__init__()
        self._given = count, free

    @property
    def count(self) -> float:
        return self._given[0]

    def free(self) -> float:
        return self._given[1]


class Process:
    """What a thread that spins knows of its process."""

    quiet = True
    wakes = 0
    spinner: object | None = None


class Purpose:
    wanted = False


BRIEF = SpinLimit("auto", Machine(2, 1))  # no spin is long
SERVER = SpinLimit("auto", Machine(16, 14))


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    made = Clocks()
    monkeypatch.setattr(module, "time", made)
    return made


def wait(policy: SpinPolicy, clocks: Clocks, seconds: float, *, taken: float = 0.0, taken_at: int = 10) -> bool:
    """One wait that took so long, ``taken`` of it without the processor from one poll on; whether the thread spun."""
    polls: list[int] = []

    def poll(_: int) -> list[str]:
        polls.append(1)
        if len(polls) == taken_at:
            clocks.wall += taken
        if len(polls) == 20:
            clocks.wall += seconds - taken
            clocks.processor += seconds - taken
        return ["a message"] if len(polls) == 20 else []

    found = policy.spin_if_worthwhile(poll, Process(), Purpose())
    if not found:
        clocks.wall += seconds
    policy.waited = seconds
    return bool(polls)


def test_spins_while_messages_come_soon(clocks: Clocks) -> None:
    policy = SpinPolicy(BRIEF)
    assert all(wait(policy, clocks, 0.0001) for _ in range(50))


def test_stops_when_messages_are_rare_and_begins_again(clocks: Clocks) -> None:
    policy = SpinPolicy(BRIEF)
    for _ in range(50):
        wait(policy, clocks, 0.01)
    rare = [wait(policy, clocks, 0.01) for _ in range(320)]
    assert sum(rare) == 10, "one wait of 32 spins in any case"
    for _ in range(3):
        wait(policy, clocks, 0.0001)
    assert all(wait(policy, clocks, 0.0001) for _ in range(50))


@pytest.mark.parametrize("at", [1, 4, 10])
def test_pauses_after_others_had_the_processor(clocks: Clocks, at: int) -> None:
    policy = SpinPolicy(BRIEF)
    pauses = []
    for _ in range(8):
        assert wait(policy, clocks, 0.002, taken=0.0015, taken_at=at)
        pauses.append(next(n for n in range(1000) if policy._pause.is_over(policy._waits + n + 1)))
        for _ in range(pauses[-1]):
            assert not wait(policy, clocks, 0.0001)
    assert pauses == sorted(pauses), "the more often it is taken, the longer"
    assert pauses[0] < 10 < 100 < pauses[-1] == pauses[-2]
    spun = sum(wait(policy, clocks, 0.0001) for _ in range(200))
    assert spun == 200
    assert wait(policy, clocks, 0.002, taken=0.0015, taken_at=at)
    shorter = 0
    while not wait(policy, clocks, 0.0001):
        shorter += 1
    assert shorter < 10, "and that is forgotten when it no longer happens"


@pytest.mark.parametrize(
    "limit",
    [
        SpinLimit("auto", Machine(1, 0)),
        SpinLimit("auto", Machine(0.5, 0)),
        SpinLimit(0.01, Machine(1, 0)),
        SpinLimit(0, Machine(16, 15)),
        SpinLimit(False, Machine(16, 15)),
    ],
)
def test_never_spins_on_one_processor_or_if_told_so(clocks: Clocks, limit: SpinLimit) -> None:
    policy = SpinPolicy(limit)
    assert not any(wait(policy, clocks, 0.0001) for _ in range(100))


# Long spins.


class Spin:
    """One spin for a message that does not come. Each poll takes a microsecond.

    Attributes:
        polls: How many polls it took.
        lost: At which poll the thread loses the processor twice.
        slept: From which poll on the thread sleeps in each.
    """

    def __init__(self, clocks: Clocks, monkeypatch: pytest.MonkeyPatch) -> None:
        self.polls = 0
        self.lost = self.slept = 1 << 60
        self.process = Process()
        self._clocks = clocks
        monkeypatch.setattr(module, "offer", self._tick)
        monkeypatch.setattr(
            module, "count_switches", lambda: (max(self.polls - self.slept, 0), 2 * (self.polls >= self.lost))
        )

    def _tick(self) -> None:
        self._clocks.wall += 1e-6
        self._clocks.processor += 1e-6

    def poll(self, _: int) -> list[str]:
        self.polls += 1
        return []

    def run(self, policy: SpinPolicy, most: float | None = None) -> int:
        """Spin if the policy wants to. Returns the number of polls."""
        self.polls = 0
        assert policy.spin_if_worthwhile(self.poll, self.process, Purpose(), most) == []
        assert self.process.spinner is None
        return self.polls


@pytest.fixture
def spin(clocks: Clocks, monkeypatch: pytest.MonkeyPatch) -> Spin:
    return Spin(clocks, monkeypatch)


@pytest.mark.parametrize(
    ("count", "free", "share"),
    [(16, 15, 1), (16, 8, 1), (16, 4.5, 0.5), (16, 1, 0), (16, -3, 0), (4, 2, 1), (4, 1, 0), (3, 2, 0), (2, 1, 0)],
)
def test_a_spin_is_as_long_as_processors_are_free(spin: Spin, count: int, free: float, share: float) -> None:
    polls = spin.run(SpinPolicy(SpinLimit("auto", Machine(count, free))))
    assert polls == pytest.approx(max(share * LONG_SECONDS * 1e6, BRIEF_SPINS), rel=0.02)


def test_a_number_of_seconds_holds_whatever_is_free(spin: Spin) -> None:
    assert spin.run(SpinPolicy(SpinLimit(0.005, Machine(2, -1)))) == pytest.approx(5000, rel=0.02)
    assert spin.run(SpinPolicy(SpinLimit(0.0001, Machine(16, 15)))) == pytest.approx(100, rel=0.02)


def test_no_spin_is_longer_than_the_wait(spin: Spin) -> None:
    assert spin.run(SpinPolicy(SERVER), 0.004) == pytest.approx(4000, rel=0.02)


def test_a_long_spin_ends_when_others_get_the_processor(spin: Spin) -> None:
    policy = SpinPolicy(SERVER)
    spin.lost = 2000
    assert 2000 <= spin.run(policy) <= 2032
    brief = [spin.run(policy) for _ in range(4)]
    assert brief == [BRIEF_SPINS] * 4, "and no spin is long for a while"
    assert 2000 <= spin.run(policy) <= 2032
    assert [spin.run(policy) for _ in range(8)] == [BRIEF_SPINS] * 8, "the longer the more often that happens"


def test_switches_during_a_brief_spin_do_not_end_a_long_one(spin: Spin) -> None:
    """On few processors the other end of the channel needs the processor to answer."""
    spin.lost = 10
    assert spin.run(SpinPolicy(SERVER)) > 10 * BRIEF_SPINS


@pytest.mark.parametrize("limit", [BRIEF, SERVER])
@pytest.mark.parametrize("after", [0, 100])
def test_any_spin_ends_when_another_thread_wants_the_interpreter(spin: Spin, limit: SpinLimit, after: int) -> None:
    spin.slept = after + 1
    assert after < spin.run(SpinPolicy(limit)) <= after + 33


def test_a_thread_that_begins_to_spin_ends_the_spin_of_another(spin: Spin) -> None:
    first, second = SpinPolicy(SERVER), SpinPolicy(SERVER)
    seen = [0]

    def poll(_: int) -> list[str]:
        seen[0] += 1
        spin.run(second)
        return []

    assert first.spin_if_worthwhile(poll, spin.process, Purpose()) == []
    assert seen == [1]
    assert spin.polls > BRIEF_SPINS


def test_a_long_spin_needs_messages_that_come_in_time(spin: Spin, clocks: Clocks) -> None:
    policy = SpinPolicy(SERVER)

    def spins(waited: float, count: int) -> list[int]:
        found = []
        for _ in range(count):
            found.append(spin.run(policy))
            policy.waited = waited
        return found

    assert min(spins(0.005, 50)) > BRIEF_SPINS, "those that come after some milliseconds do"
    polls = spins(0.5, 1000)  # heartbeats
    assert sum(polls[:20]) < 20_000 * 10
    assert max(polls[20:]) == BRIEF_SPINS
    assert sum(count > 0 for count in polls[20:]) <= 1000 / 32, "an idle worker uses no processor"
    assert spins(0.005, 20)[-1] > BRIEF_SPINS, "and begins again"


@pytest.fixture
def ends() -> Iterator[tuple[SocketEndpoint, SocketEndpoint]]:
    pair = SocketEndpoint(secret=b"s"), SocketEndpoint(secret=b"s")
    yield pair
    for end in pair:
        end.close()


@pytest.mark.parametrize("spin", [True, False])
def test_a_wake_up_ends_a_wait_and_channels_do_too(ends: tuple[SocketEndpoint, SocketEndpoint], spin: bool) -> None:
    here, there = ends
    connected = threading.Event()

    def let_in() -> None:
        while not connected.is_set():
            there.poll(0.01)

    poller = threading.Thread(target=let_in)
    poller.start()
    channel = here.connect(there.addresses[0], timeout=30.0)
    connected.set()
    poller.join()
    assert channel.acquire()
    waiter = ChannelWaiter(SpinPolicy(BRIEF), here)
    assert waiter.wait([channel], 0.001, spin=spin) == []
    threading.Timer(0.01, waiter.wake).start()
    assert waiter.wait([channel], None, spin=spin) == []
    waiter.claim()
    waiter.wake()  # by the thread that waits, which knows
    assert waiter.wait([channel], 0.001, spin=spin) == []
    channel.send(Frame(40, 1, b"hello"))
    received = None
    while received is None:
        received = there.poll(30.0)
    assert isinstance(received, Received)
    received.channel.send(Frame(41, 1, b"and back"))
    received.channel.release()
    assert waiter.wait([channel], None, spin=spin) == [channel]
    event = channel.take()
    assert isinstance(event, Received)
    assert [bytes(frame.body) for frame in event.frames] == [b"and back"]
    assert channel.take() is None
    channel.release()
    waiter.close()


def test_a_thread_that_waits_gets_the_channel_from_one_that_spins(ends: tuple[SocketEndpoint, SocketEndpoint]) -> None:
    """One thread polls and spins, another holds the channel now and then: between them they see every
    frame once and in order, and the second gets it although the first always has it.
    """
    here, there = ends
    count, seen, held, over = 3000, [], 0, threading.Event()

    def collect(event: object) -> None:
        if isinstance(event, Received):
            seen.extend(frame.number for frame in event.frames)

    def poll() -> None:
        while not over.is_set():
            event = here.poll(0.05)
            collect(event)
            if isinstance(event, Received):
                event.channel.release()

    channel, back = connect(here, there)
    poller = threading.Thread(target=poll)
    poller.start()

    def send() -> None:
        for number in range(count):
            back.send(Frame(41, number, b""))

    sender = threading.Thread(target=send)
    sender.start()
    try:
        deadline = time.monotonic() + 30
        while len(seen) < count and time.monotonic() < deadline:
            if channel.acquire():
                held += 1
                collect(channel.receive(0.001))
                channel.release()
            time.sleep(0.0002)
    finally:
        over.set()
        here.wake()
        poller.join()
        sender.join()
    assert seen == list(range(count))
    assert held > 0


class Interrupt(BaseException):
    pass


def connect(here: SocketEndpoint, there: SocketEndpoint) -> tuple[SocketChannel, SocketChannel]:
    accepted: list[Received] = []

    def let_in() -> None:
        while not accepted:
            event = there.poll(0.01)
            if isinstance(event, Received):
                accepted.append(event)

    host = threading.Thread(target=let_in)
    host.start()
    channel = here.connect(there.addresses[0], timeout=30.0)
    channel.send(Frame(40, 1, b"hello"))
    host.join()
    back = accepted[0].channel
    back.release()
    assert isinstance(channel, SocketChannel)
    assert isinstance(back, SocketChannel)
    return channel, back


def comes(end: SocketEndpoint) -> Event:
    event = None
    deadline = time.monotonic() + 30
    while event is None and time.monotonic() < deadline:
        event = end.poll(0.1)
    assert event is not None
    return event


def test_spinning_ends_when_others_keep_the_processor(
    ends: tuple[SocketEndpoint, SocketEndpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the limit of polls is: a call with a timeout of 20 ms had waited for 300 ms on a busy machine."""
    mine, _ = connect(*ends)
    offered: list[None] = []

    def lose_the_processor() -> None:
        offered.append(None)
        time.sleep(2 * BRIEF_SECONDS)

    monkeypatch.setattr(module, "offer", lose_the_processor)
    monkeypatch.setattr(mine, "_spin_policy", SpinPolicy(SERVER))
    mine._endpoint.quiet = True
    assert mine.acquire(offered)
    assert mine.receive(0.0) is None
    mine.release()
    assert len(offered) == 1


def test_an_interrupt_while_a_thread_takes_a_channel_leaves_it_readable(
    ends: tuple[SocketEndpoint, SocketEndpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = ends
    channel, back = connect(here, there)
    channel._holder[0], channel._spinning = "another", True

    def interrupt(_: float) -> None:
        raise Interrupt

    with monkeypatch.context() as patch:
        patch.setattr(socket_channel.time, "sleep", interrupt)
        with pytest.raises(Interrupt):
            channel.acquire("the holder")
    channel._holder.clear()
    channel._spinning = False
    assert channel.recover_after_interrupt("the holder", whole=False) is None
    for number in range(2):  # armed, and again after it was read
        back.send(Frame(41, number))
        event = comes(here)
        assert isinstance(event, Received)
        assert [frame.number for frame in event.frames] == [number]
        channel.release()


def test_an_interrupt_while_a_channel_is_read_ends_it(
    ends: tuple[SocketEndpoint, SocketEndpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Part of a frame is lost, and no thread may wait for it for ever."""
    here, there = ends
    channel, back = connect(here, there)

    def interrupt(_: int) -> list[Frame]:
        raise Interrupt

    assert channel.acquire("the holder")
    monkeypatch.setattr(channel._reader, "fed", interrupt)
    back.send(Frame(41, 7))
    with pytest.raises(Interrupt):
        channel.receive(5.0)
    loss = channel.recover_after_interrupt("the holder", whole=False)
    assert isinstance(loss, Lost)
    assert "interrupted" in loss.reason
    assert isinstance(comes(there), Lost)


def test_an_interrupt_of_a_wait_for_a_channel_leaves_it_whole(ends: tuple[SocketEndpoint, SocketEndpoint]) -> None:
    here, there = ends
    channel, back = connect(here, there)
    assert channel.acquire("the holder")
    assert channel.recover_after_interrupt("the holder", whole=True) is None
    back.send(Frame(41, 7))
    event = comes(here)
    assert isinstance(event, Received)
    event.channel.release()


@pytest.mark.parametrize("spin", [0, 0.02])
def test_an_end_without_messages_sleeps(monkeypatch: pytest.MonkeyPatch, spin: float) -> None:
    """Counted in polls and in processor time, of which a spin without end would take all."""
    polls = [0]

    def count() -> None:
        polls[0] += 1

    monkeypatch.setattr(module, "offer", count)
    with (
        contextlib.closing(SocketEndpoint(secret=b"s", spin=spin)) as here,
        contextlib.closing(SocketEndpoint(secret=b"s", spin=spin)) as there,
    ):
        _, back = connect(here, there)
        for number in range(20):
            back.send(Frame(41, number))
            event = comes(here)
            assert isinstance(event, Received)
            event.channel.release()
        polls[0], begun = 0, time.thread_time()
        assert here.poll(1.0) is None
        assert time.thread_time() - begun < 0.5
        assert polls[0] <= spin * 1e7
        first = polls[0]
        assert here.poll(0.01) is None
        assert polls[0] == first, "not even at the begin of the next wait"
