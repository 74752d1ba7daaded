"""Spins of the native core: what ends them, and that they leave the interpreter to other threads."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from backhaul._native import core
from backhaul._runtime.runtime import OneShotEvent
from backhaul._transport.base import Received
from backhaul._transport.processors import Processors
from backhaul._transport.signal_wait import SignalWait
from backhaul._transport.sockets.channel import SocketChannel
from backhaul._transport.sockets.endpoint import SocketEndpoint
from backhaul._transport.spin_wait import SpinLimit, SpinPolicy, new_signal
from backhaul._wire.frames import Frame

pytestmark = pytest.mark.skipif(core is None, reason="the native core is not compiled")

MANY = 1 << 62
READY, OVER, CROWDED = 0, 1, 2


class Machine(Processors):
    """A machine with many free processors."""

    count = 16.0  # type: ignore[assignment]

    def free(self) -> float:
        return 14.0


SERVER = SpinLimit("auto", Machine())


@pytest.fixture
def fd() -> Iterator[int]:
    made = os.eventfd(0, os.EFD_NONBLOCK)
    yield made
    os.close(made)


def aside(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def spin(*arguments: object) -> int:
    """The end of a spin. A busy machine may end one before its time; then another follows."""
    while (end := core.spin(*arguments)) == CROWDED:
        pass
    return int(end)


def test_a_descriptor_ends_it(fd: int) -> None:
    thread = aside(lambda: os.eventfd_write(fd, 1))
    assert spin((fd,), new_signal(), 0, MANY, 30.0) == READY
    thread.join()


def test_a_signal_ends_it(fd: int) -> None:
    signal = new_signal()

    def change() -> None:
        signal[0] += 1

    thread = aside(change)
    assert spin((fd,), signal, 0, MANY, 30.0) == READY
    thread.join()


def test_a_signal_that_came_before_ends_it_too() -> None:
    signal = new_signal()
    signal[0] += 1
    assert spin((), signal, 0, MANY, 30.0) == READY


def test_so_many_polls_end_it(fd: int) -> None:
    assert core.spin((fd,), new_signal(), 0, 10, 30.0) == OVER


def test_so_much_time_ends_it(fd: int) -> None:
    assert core.spin((fd,), new_signal(), 0, MANY, 0.001) in (OVER, CROWDED)


def test_others_have_the_interpreter_meanwhile(fd: int) -> None:
    """Several threads spin until this thread, which they would hold up forever otherwise, ends them one by one."""
    signals = [new_signal() for _ in range(4)]
    threads = [aside(lambda each=each: spin((fd,), each, 0, MANY, 30.0)) for each in signals]  # type: ignore[misc]
    for signal, thread in zip(signals, threads, strict=True):
        signal[0] += 1
        thread.join()


@pytest.mark.parametrize(
    "wrong",
    [
        ((), new_signal(), 0, 1),
        ([], new_signal(), 0, 1, 0.1),
        (("x",), new_signal(), 0, 1, 0.1),
        ((), bytearray(7), 0, 1, 0.1),
        ((), None, 0, 1, 0.1),
        ((), new_signal(), "0", 1, 0.1),
        ((), new_signal(), 0, 1, "long"),
    ],
)
def test_wrong_arguments_are_errors(wrong: tuple[object, ...]) -> None:
    with pytest.raises((TypeError, ValueError)):
        core.spin(*wrong)


class TestEndpoint:
    """An endpoint whose threads take the spins for which processors are free."""

    @pytest.fixture
    def ends(self) -> Iterator[tuple[SocketEndpoint, SocketEndpoint]]:
        pair = SocketEndpoint(secret=b"s" * 16), SocketEndpoint(secret=b"s" * 16)
        for end in pair:
            end.spin_limit = SERVER
            end._waiting, end._signal_wait = SpinPolicy(SERVER), SignalWait(SERVER)
        yield pair
        for end in pair:
            end.close()

    @pytest.fixture
    def channel(self, ends: tuple[SocketEndpoint, SocketEndpoint]) -> SocketChannel:
        here, there = ends
        came: list[Received] = []

        def let_in() -> None:
            while not came:
                event = there.poll(1.0)
                if isinstance(event, Received):
                    came.append(event)
                    event.channel.release()

        host = aside(let_in)
        made = here.connect(there.addresses[0], timeout=30.0)
        made.send(Frame(40, 1))
        host.join()
        assert isinstance(made, SocketChannel)
        return made

    def test_frames_arrive_while_threads_spin(
        self, ends: tuple[SocketEndpoint, SocketEndpoint], channel: SocketChannel
    ) -> None:
        there, numbers = ends[1], []

        def read() -> None:
            while len(numbers) < 200:
                event = there.poll(30.0)
                if isinstance(event, Received):
                    numbers.extend(frame.number for frame in event.frames)
                    event.channel.release()

        threads = [aside(read) for _ in range(3)]
        for number in range(200):
            channel.send(Frame(3, number))
        while any(thread.is_alive() for thread in threads):
            there.wake()
            for thread in threads:
                thread.join(0.01)
        assert sorted(numbers) == list(range(200))

    def test_wake_ends_a_poll(self, ends: tuple[SocketEndpoint, SocketEndpoint], channel: SocketChannel) -> None:
        for _ in range(50):
            ended = threading.Event()
            thread = aside(lambda ended=ended: (ends[1].poll(30.0), ended.set()))  # type: ignore[misc]
            while not ended.wait(0.001):
                ends[1].wake()
            thread.join()

    def test_a_single_wake_is_never_lost(
        self, ends: tuple[SocketEndpoint, SocketEndpoint], channel: SocketChannel
    ) -> None:
        """Threads that find nothing to do poll again. Each wake announces one thing."""
        there, done, given = ends[1], [], []
        over = threading.Event()

        def work() -> None:
            while not over.is_set():
                while given:
                    try:
                        done.append(given.pop())
                    except IndexError:
                        break
                there.poll(20.0)

        threads = [aside(work) for _ in range(2)]
        for number in range(300):
            given.append(number)
            there.wake()
            deadline = time.monotonic() + 10.0
            while len(done) <= number:
                assert time.monotonic() < deadline, f"the wake for {number} was lost"
                time.sleep(0)
        over.set()
        while any(thread.is_alive() for thread in threads):
            there.wake()
            for thread in threads:
                thread.join(0.01)

    def test_an_event_ends_the_spin_for_it(self, ends: tuple[SocketEndpoint, SocketEndpoint]) -> None:
        for _ in range(100):
            event = OneShotEvent()
            thread = aside(event.open)
            ends[0].spin_for(event, None)
            assert event.wait(30.0)
            thread.join()
