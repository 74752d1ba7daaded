from __future__ import annotations

import functools
import gc
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from backhaul._runtime import interrupts

OURS = os.path.join(os.path.dirname(interrupts.__file__), "made_up.py")


@pytest.fixture(autouse=True)
def deferring() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    interrupts.defer()
    yield
    interrupts.stop_deferring()
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler
    assert interrupts.deferred is None


def ours(function: Callable[..., Any], filename: str = OURS) -> Callable[..., Any]:
    """The function, as if it stood in the package."""
    code = function.__code__.replace(co_filename=filename)
    return types.FunctionType(code, globals(), closure=function.__closure__)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def expect(seconds: float = 20.0) -> None:
    """Wait for what was deferred."""
    with pytest.raises(KeyboardInterrupt):
        time.sleep(seconds)


def test_outside_it_is_raised_at_once() -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupt()


def test_inside_it_waits() -> None:
    done = []

    def work() -> None:
        interrupt()
        done.append(interrupts.deferred is not None)

    ours(work)()
    assert done == [True]
    expect()


def test_several_are_one() -> None:
    def work() -> None:
        interrupt()
        interrupt()

    ours(work)()
    expect()
    time.sleep(0.05)


def test_tools_for_testing_are_programs() -> None:
    with pytest.raises(KeyboardInterrupt):
        ours(interrupt, os.path.join(os.path.dirname(os.path.dirname(OURS)), "testing", "made_up.py"))()


def test_where_we_wait_it_is_raised() -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        interrupts.waits(ours(interrupt))()
    assert interrupts.in_wait(caught.value)


def test_code_of_the_users_is_interrupted_but_not_who_calls_it() -> None:
    done = []

    def call(function: Callable[[], None]) -> None:
        signal.raise_signal(signal.SIGINT)
        done.append(True)
        function()

    with pytest.raises(KeyboardInterrupt):
        interrupts.calls_out(ours(call))(lambda: time.sleep(20.0))
    assert done == [True]


def test_nothing_is_raised_where_it_must_not() -> None:
    def work() -> None:
        interrupts.waits(ours(interrupt))()

    interrupts.uninterruptible(ours(work))()
    expect()


def test_in_a_destructor_it_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lost.append)

    class Thing:
        __del__ = ours(lambda self: signal.raise_signal(signal.SIGINT))

    thing: Any = Thing()
    del thing
    gc.collect()
    expect()
    assert not lost


def test_a_block_that_was_begun_is_entered() -> None:
    left = []

    class Block:
        @ours
        def __enter__(self) -> None:
            signal.raise_signal(signal.SIGINT)

        def __exit__(self, *_: object) -> None:
            left.append(True)

    with pytest.raises(KeyboardInterrupt), Block():
        time.sleep(20.0)
    assert left == [True]


def test_a_lock_that_was_not_had_is_not_held() -> None:
    lock = threading.Lock()
    with lock:
        threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            interrupts.acquire(lock, 20.0)
    assert interrupts.acquire(lock, 0.0)
    assert not interrupts.acquire(lock, 0.01)


def test_loops_may_ask() -> None:
    def loop() -> None:
        interrupt()
        for _ in range(1_000):
            interrupts.check()

    with pytest.raises(KeyboardInterrupt):
        ours(loop)()


def test_what_would_be_lost_comes_again() -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        interrupt()
    assert interrupts.postpone(caught.value)
    expect()
    assert not interrupts.postpone(KeyboardInterrupt())  # not by a signal


def test_who_insists_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "_INSIST_SECONDS", 0.0)

    def hang() -> None:
        interrupt()
        interrupt()

    with pytest.raises(KeyboardInterrupt) as caught:
        ours(hang)()
    assert not interrupts.in_wait(caught.value)


def test_it_goes_to_who_is_responsible_then() -> None:
    seen: list[int] = []

    def work() -> None:
        interrupt()
        signal.signal(signal.SIGINT, lambda number, _: seen.append(number))

    ours(work)()
    try:
        deadline = time.monotonic() + 20.0
        while (not seen or interrupts.deferred is not None) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_other_threads_install_nothing() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for function in (interrupts.defer, interrupts.check):
        thread = threading.Thread(target=function)
        thread.start()
        thread.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class Leaver:
    """Ends the program in several ways when a signal comes."""

    def leave(self, number: int, frame: Any) -> None:
        raise SystemExit(number)

    __call__ = leave


HANDLERS: dict[str, Any] = {
    "function": lambda number, frame: Leaver().leave(number, frame),
    "method": Leaver().leave,
    "object": Leaver(),
    "partial": functools.partial(functools.partial(Leaver().leave)),
}


@pytest.mark.parametrize("case", HANDLERS)
def test_what_handlers_of_signals_raise_is_told_from_what_code_raises(case: str) -> None:
    before = signal.signal(signal.SIGUSR1, HANDLERS[case])
    try:
        with pytest.raises(SystemExit) as caught:
            signal.raise_signal(signal.SIGUSR1)
    finally:
        ours = interrupts.from_signal(caught.value)
        signal.signal(signal.SIGUSR1, before)
    assert ours
    for error in (SystemExit(1), KeyboardInterrupt(), GeneratorExit()):
        with pytest.raises(type(error)) as other:
            raise error
        assert not interrupts.from_signal(other.value)


@pytest.mark.parametrize("deferred", [True, False])
def test_an_interrupt_is_told_from_what_code_raises(deferred: bool) -> None:
    if not deferred:
        interrupts.stop_deferring()
    with pytest.raises(KeyboardInterrupt) as caught:
        interrupt()
    assert interrupts.from_signal(caught.value)
    found = []
    other = threading.Thread(target=lambda: found.append(interrupts.from_signal(caught.value)))
    other.start()
    other.join()
    assert found == [False]  # there it has only travelled


def test_the_main_thread_waits_in_pieces() -> None:
    """Python does not notice a signal that comes just before a wait begins until that wait is over."""
    asked: list[float] = []

    class Lock:
        def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
            asked.append(timeout)
            return len(asked) == 3

        def release(self) -> None: ...

    assert interrupts.acquire(Lock(), None)
    assert asked == [interrupts._PIECE_SECONDS] * 3
    asked.clear()
    assert not interrupts.acquire(Lock(), 0.01)
    assert asked == [0.01]
