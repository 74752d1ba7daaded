"""When a thread spins before it sleeps, and how a waiter waits for channels."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from backhaul._transport import spin_wait as module
from backhaul._transport.base import Event, Lost, Received
from backhaul._transport.sockets import channel as socket_channel
from backhaul._transport.sockets.channel import SocketChannel
from backhaul._transport.sockets.endpoint import SocketEndpoint
from backhaul._transport.spin_wait import SPIN_SECONDS, SpinPolicy
from backhaul._transport.waiter import ChannelWaiter
from backhaul._wire.frames import Frame


class Clocks:
    """Time that passes as a test says, and processor time."""

    def __init__(self) -> None:
        self.wall = 100.0
        self.processor = 7.0

    def perf_counter(self) -> float:
        return self.wall

    def thread_time(self) -> float:
        return self.processor


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    made = Clocks()
    monkeypatch.setattr(module, "time", made)
    monkeypatch.setattr(module, "MAX_SPINS", 300)
    return made


def wait(policy: SpinPolicy, clocks: Clocks, seconds: float, *, taken: float = 0.0) -> bool:
    """One wait that took so long, ``taken`` of it without the processor; whether the thread spun."""
    start = clocks.wall
    spins = policy.should_spin()
    clocks.wall += seconds
    clocks.processor += seconds - taken
    if spins:
        policy.stop()
    policy.waited = clocks.wall - start
    return spins


def test_spins_while_messages_come_soon(clocks: Clocks) -> None:
    policy = SpinPolicy()
    assert all(wait(policy, clocks, 0.0001) for _ in range(50))


def test_stops_when_messages_are_rare_and_begins_again(clocks: Clocks) -> None:
    policy = SpinPolicy()
    for _ in range(50):
        wait(policy, clocks, 0.01)
    rare = [wait(policy, clocks, 0.01) for _ in range(320)]
    assert sum(rare) == 10, "one wait of 32 spins in any case"
    for _ in range(3):
        wait(policy, clocks, 0.0001)
    assert all(wait(policy, clocks, 0.0001) for _ in range(50))


def test_pauses_after_others_had_the_processor(clocks: Clocks) -> None:
    policy = SpinPolicy()
    pauses = []
    for _ in range(8):
        assert wait(policy, clocks, 0.002, taken=0.0015)
        pauses.append(next(n for n in range(1000) if policy._waits + n + 1 > policy._min_waits))
        for _ in range(pauses[-1]):
            assert not wait(policy, clocks, 0.0001)
    assert pauses == sorted(pauses), "the more often it is taken, the longer"
    assert pauses[0] < 10 < 100 < pauses[-1] == pauses[-2]
    spun = sum(wait(policy, clocks, 0.0001) for _ in range(200))
    assert spun == 200
    assert wait(policy, clocks, 0.002, taken=0.0015)
    shorter = 0
    while not wait(policy, clocks, 0.0001):
        shorter += 1
    assert shorter < 10, "and that is forgotten when it no longer happens"


def test_never_spins_on_one_processor(clocks: Clocks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SPINS", 0)
    policy = SpinPolicy()
    assert not any(wait(policy, clocks, 0.0001) for _ in range(100))


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
    channel = here.connect(there.addresses[0], timeout=5.0)
    connected.set()
    poller.join()
    assert channel.acquire()
    waiter = ChannelWaiter(SpinPolicy(), here)
    assert waiter.wait([channel], 0.001, spin=spin) == []
    threading.Timer(0.01, waiter.wake).start()
    assert waiter.wait([channel], None, spin=spin) == []
    waiter.claim()
    waiter.wake()  # by the thread that waits, which knows
    assert waiter.wait([channel], 0.001, spin=spin) == []
    channel.send(Frame(40, 1, b"hello"))
    received = None
    while received is None:
        received = there.poll(5.0)
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
    channel = here.connect(there.addresses[0], timeout=5.0)
    channel.send(Frame(40, 1, b"hello"))
    host.join()
    back = accepted[0].channel
    back.release()
    assert isinstance(channel, SocketChannel)
    assert isinstance(back, SocketChannel)
    return channel, back


def comes(end: SocketEndpoint) -> Event:
    event = None
    deadline = time.monotonic() + 5
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
        time.sleep(2 * SPIN_SECONDS)

    monkeypatch.setattr(module, "offer", lose_the_processor)
    monkeypatch.setattr(module, "MAX_SPINS", 300)
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
