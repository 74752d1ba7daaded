"""Handlers of signals that raise, other than Backhaul's own for Ctrl-C: what they raise may come between any two
instructions of the main thread.
"""

from __future__ import annotations

import itertools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

import backhaul as bh
from backhaul._rpc.futures import Future
from backhaul._transport.sockets.channel import SocketChannel
from backhaul._transport.sockets.endpoint import SocketEndpoint

from . import remote_functions as remote
from .remote_functions import PATIENCE


class AlarmError(BaseException):
    pass


def raise_alarm(*_: object) -> None:
    raise AlarmError


def socket_endpoint() -> SocketEndpoint:
    return SocketEndpoint(secret=b"of this test")


@pytest.fixture
def alarm() -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, raise_alarm)
    yield
    signal.signal(signal.SIGUSR1, before)


def threads_that_complete(count: int) -> set[int]:
    """The threads that complete futures for which the main thread waits."""
    threads, waiting = set(), False

    def note(_: object) -> None:
        if waiting:  # else the future was done before
            threads.add(threading.get_ident())

    with bh.cluster(2, endpoints=socket_endpoint):
        for number in range(count):
            future: Future[Any] = bh.rpc_async("worker1", remote.identity, args=(number,), timeout=PATIENCE)
            future._when_done(note)
            waiting = True
            assert future.wait() == number
            waiting = False
    return threads


@pytest.mark.usefixtures("alarm")
def test_the_main_thread_completes_no_future_that_a_signal_may_interrupt() -> None:
    assert threading.get_ident() not in threads_that_complete(50)


def test_without_such_handlers_it_completes_futures() -> None:
    assert threading.get_ident() in threads_that_complete(50)


def interrupt_at(step: int, work: Callable[[], None]) -> bool:
    """Raise ``AlarmError`` before the instruction number ``step`` that ``work`` runs in ``send_soon``; whether it got
    so far.
    """
    codes = {SocketChannel.acquire.__code__, SocketChannel.park.__code__, SocketChannel.send_soon.__code__}
    codes.add(getattr(SocketChannel, "_flush_soon", SocketChannel.send_soon).__code__)
    steps = itertools.count()
    reached = False

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal reached
        if reached or frame.f_code not in codes:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and next(steps) == step:
            reached = True
            raise AlarmError
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except AlarmError:
        pass
    finally:
        sys.settrace(before)
    return reached


def test_an_interrupt_while_calls_are_held_back_leaves_the_channel_in_order() -> None:
    def burst() -> None:
        for _ in range(8):
            bh.rpc_async("worker1", remote.identity, args=(1,), timeout=PATIENCE)

    with bh.cluster(2, endpoints=socket_endpoint):
        burst()
        step = 0
        # A burst that finds the channel read by another thread, or parked, runs fewer instructions than the next.
        while any(interrupt_at(step, burst) for _ in range(50)):
            done = threading.Event()  # nobody reads the channel but threads of the pool
            bh.rpc_async("worker1", remote.identity, args=(1,), timeout=PATIENCE).add_done_callback(
                lambda _, done=done: done.set()
            )
            assert done.wait(PATIENCE), f"the channel is stuck after an interrupt at step {step}"
            step += 1
        assert step > 100  # instructions
