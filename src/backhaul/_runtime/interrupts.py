"""Ctrl-C while the main thread is inside Backhaul. Knows nothing of workers; imports nothing of Backhaul.

[Note: interrupts] Python runs signal handlers in the main thread, between any two instructions. An exception that the
handler of SIGINT raises there could leave a channel held, half a frame written, or a count wrong. Backhaul therefore
replaces Python's own handler of SIGINT. The replacement looks at the stack, and raises ``KeyboardInterrupt`` at once if

- no function of this package is running;
- the thread waits: the innermost function of this package is marked with ``waits``, so no message can get lost;
- this package has called the user's code: its innermost function is marked with ``calls_out``.

Otherwise the handler defers the interrupt. A short-lived thread repeats the signal until the handler can raise: in the
code that called Backhaul, in the next wait, or at the start of the next call. An ``__enter__`` that has begun therefore
ends with the block entered, and an interrupt that comes in a destructor is not lost. Without interrupts this costs one
test of a variable for each call.

Backhaul replaces no other handlers. What they raise may come anywhere, see ``Channel.recover_after_interrupt``. If it
comes in a callback of a future, torch logs it, and what the callback should have woken waits forever. So the main
thread completes no futures while there are such handlers, see ``may_raise_anywhere``.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _thread
import functools
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from signal import default_int_handler
from types import CodeType, FrameType
from typing import Any, Protocol, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_HERE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_TESTING = (_HERE + "testing" + os.sep, _HERE + "_sim" + os.sep)  # count as the user's code
SIGINT = int(signal.SIGINT)
getsignal: Callable[[int], Any] = _signal.getsignal  # ``signal.getsignal`` takes a hundred times as long
_OTHER_SIGNALS = tuple(number for number in map(int, signal.valid_signals()) if number != SIGINT)
_REPEAT_SECONDS, _LATER_REPEAT_SECONDS = 0.001, 0.02  # from one repetition to the next, at first and after a while
_PIECE_SECONDS = 0.5  # that the main thread waits at a time, see ``_pieces``
_LONGEST_SECONDS = 1e6  # that other threads wait at a time
_INSIST_SECONDS = 1.0  # if an interrupt is deferred for longer, the next one is raised wherever the thread is

_waits: set[CodeType] = set()
_calls_out: set[CodeType] = set()
_uninterruptible: set[CodeType] = set()

deferred: float | None = None
"""When the interrupt came that is still to be raised; None: there is none."""

_repeated = False  # the next signal is a repetition, not the user's


class _Lock(Protocol):
    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...

    def release(self) -> None: ...


def waits(function: F) -> F:
    """Mark a function that blocks and may be interrupted: it takes nothing that is lost if its result is lost."""
    _waits.add(function.__code__)
    return function


def calls_out(function: F) -> F:
    """Mark a function that calls the user's code, which may raise anything."""
    _calls_out.add(function.__code__)
    return function


def uninterruptible(function: F) -> F:
    """Mark a function that is not interrupted even while it waits. It must not wait long."""
    _uninterruptible.add(function.__code__)
    return function


def defer() -> None:
    """Handle interrupts as described in [Note: interrupts] from now on. Does nothing on other threads than the main
    thread, or if SIGINT has another handler than Python's own. Programs may put Python's handler back at any time;
    notebooks do so for every cell.
    """
    global _repeated
    if _in_main_thread() and getsignal(SIGINT) is default_int_handler:
        _repeated = False
        signal.signal(SIGINT, _on_signal)


def stop_deferring() -> None:
    """Put Python's own handler back."""
    if _in_main_thread() and getsignal(SIGINT) is _on_signal:
        signal.signal(SIGINT, default_int_handler)


def may_raise_anywhere() -> bool:
    """Whether a signal may raise an exception between any two instructions of the calling thread: the main thread, in a
    program with signal handlers that Backhaul does not know.
    """
    return _in_main_thread() and (
        any(map(callable, map(getsignal, _OTHER_SIGNALS)))  # takes a microsecond or two
        or (getsignal(SIGINT) is not _on_signal and callable(getsignal(SIGINT)))
    )


def acquire(lock: _Lock, timeout: float | None) -> bool:
    """Wait for a lock, ``timeout`` seconds at most (None: any time); may be interrupted. Whether it was taken."""
    taken: list[bool] = []
    try:
        _acquire(lock, timeout, taken)
    except BaseException:
        if taken and taken[0]:
            lock.release()
        raise
    return taken[0]


@waits
def _acquire(lock: _Lock, timeout: float | None, taken: list[bool]) -> None:
    for piece in _pieces(timeout):
        # No handler runs between the two calls, so none runs while the lock is taken and ``taken`` does not say so.
        taken[:] = map(lock.acquire, (True,), (-1.0 if piece is None else piece,))
        if taken[0]:
            return


@waits
def poll(poller: select.poll, timeout: float | None) -> list[tuple[int, int]]:
    """Like ``poller.poll``, with a timeout in seconds (None: any time); may be interrupted."""
    found: list[tuple[int, int]] = []
    for piece in _pieces(timeout):
        found = poller.poll(None if piece is None else piece * 1000)
        if found:
            break
    return found


@waits
def _pieces(timeout: float | None) -> Iterator[float | None]:
    """How long to wait, one time after the other.

    A signal that comes just before the main thread blocks does not end the wait, and Python runs its handler only
    afterwards. The main thread therefore waits for ``_PIECE_SECONDS`` at a time. The system takes no timeouts of more
    than a few weeks, so other threads wait for ``_LONGEST_SECONDS`` at a time.
    """
    in_main_thread = _in_main_thread()
    if timeout is None:
        while in_main_thread:
            yield _PIECE_SECONDS
        yield None
        return
    longest = _PIECE_SECONDS if in_main_thread else _LONGEST_SECONDS
    if timeout > longest:
        deadline = time.monotonic() + timeout
        while timeout > longest:
            yield longest
            timeout = deadline - time.monotonic()
    yield max(timeout, 0.0)


def check() -> None:
    """Raise an interrupt that was deferred. For loops whose waits may not be interrupted."""
    if deferred is not None and _in_main_thread():
        _raise(sys._getframe(1), in_wait=True)


def check_at_entry() -> None:
    """Raise an interrupt that was deferred, if the function that calls this was called by the user, directly or through
    one more function of Backhaul: then nothing has begun yet. Needed because the thread that repeats the signal
    often gets the interpreter only when a system call of Backhaul's releases it.
    """
    frame: FrameType | None = sys._getframe(2)
    if frame is not None and _is_ours(frame.f_code):
        frame = frame.f_back
    if _in_main_thread() and frame is not None and not _is_ours(frame.f_code) and _may_raise(frame):
        _raise(frame, in_wait=True)


def _raise(frame: FrameType | None, *, in_wait: bool) -> None:
    global deferred
    deferred = None
    try:
        default_int_handler(SIGINT, frame)
    except KeyboardInterrupt as error:
        error.in_wait = in_wait  # type: ignore[attr-defined]
        raise


def in_wait(error: BaseException) -> bool:
    """Whether an exception is an interrupt that was raised where it does no harm."""
    return getattr(error, "in_wait", False)


def from_signal(error: BaseException) -> bool:
    """Whether a signal handler raised this exception, and not the code that was running. Such an exception is for the
    program: it must not become the outcome of a call.
    """
    if not _in_main_thread():  # only the main thread runs signal handlers
        return False
    if hasattr(error, "in_wait"):
        return True
    if isinstance(error, KeyboardInterrupt) and getsignal(SIGINT) is default_int_handler:
        return True  # Python's own handler leaves no frame in the traceback
    handlers = {_code_of(getsignal(number)) for number in signal.valid_signals()}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False


def _code_of(handler: Any) -> CodeType | None:
    """The code of a signal handler, if it is Python code."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    code = getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None


def postpone(error: BaseException) -> bool:
    """If an exception is an interrupt, defer it, since it would be lost here. Returns whether it is one."""
    if not in_wait(error):
        return False
    _remember()
    return True


def _remember() -> None:
    global deferred
    if deferred is None:
        deferred = since = time.monotonic()
        _thread.start_new_thread(_repeat, (since,))


def _in_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


def _on_signal(number: int, frame: FrameType | None) -> None:
    global _repeated
    repeated, _repeated = _repeated, False
    if repeated and deferred is None:
        return  # the interrupt was raised meanwhile
    if _may_raise(frame):
        _raise(frame, in_wait=True)
    if not repeated and deferred is not None and time.monotonic() > deferred + _INSIST_SECONDS:
        _raise(frame, in_wait=False)
    _remember()


def _may_raise(frame: FrameType | None) -> bool:
    innermost, waiting = frame, False
    while frame is not None:
        code = frame.f_code
        if code in _uninterruptible:
            return False
        if not waiting and _is_ours(code):
            if code in _calls_out and frame is not innermost:
                return True
            if code not in _waits:
                return False
            waiting = True
        frame = frame.f_back
    return True


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(_HERE) and not code.co_filename.startswith(_TESTING)


def _repeat(since: float) -> None:
    """Repeat the signal until the interrupt is raised. Runs on a thread of its own."""
    global deferred, _repeated
    main = threading.main_thread().ident
    assert main is not None
    while True:
        time.sleep(_REPEAT_SECONDS if time.monotonic() < since + _INSIST_SECONDS / 4 else _LATER_REPEAT_SECONDS)
        if deferred is not since:
            return
        if getsignal(SIGINT) is _on_signal:
            _repeated = True
            signal.pthread_kill(main, SIGINT)
            continue
        # SIGINT has another handler now. Send it the signal, unless it got one as a repetition.
        had, deferred, _repeated = _repeated, None, False
        if not had and callable(getsignal(SIGINT)):
            signal.pthread_kill(main, SIGINT)
        return


def _forget() -> None:
    global deferred, _repeated
    deferred, _repeated = None, False


os.register_at_fork(after_in_child=_forget)
