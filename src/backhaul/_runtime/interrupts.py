"""Ctrl-C while the main thread is inside of Backhaul. Knows nothing of workers; imports nothing of ours.

[Note: interrupts] Handlers of signals run in the main thread, between any two instructions of whatever that does. What
the handler of SIGINT raises there would leave a channel held, half a frame written, a count wrong. So ours stands in
the place of Python's: it looks at the stack, and raises at once if

- no function of this package is at work;
- the thread waits: the innermost of our functions is one of ``waits``, which consume nothing;
- the user's own code runs that we have called: the innermost of our functions is one of ``calls_out``.

Else it remembers, and a thread that lives no longer than that repeats the signal until it can be raised: in the code
that has called us, in the next wait, or at the beginning of the next call. So when ``__enter__`` has begun it ends with
the block entered, and what comes in a destructor is not lost. Where nobody interrupts anything it costs a glance.

Handlers that are not Python's own are left alone. What they raise may come anywhere, see ``Channel.mend``.
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
_TESTING = (_HERE + "testing" + os.sep, _HERE + "_sim" + os.sep)  # programs of their own
SIGINT = int(signal.SIGINT)
getsignal: Callable[[int], Any] = _signal.getsignal  # what ``signal`` puts around it costs a hundred times as much
_OFTEN, _SELDOM = 0.001, 0.02  # seconds until the signal is repeated, at first and after a while
_PIECE_SECONDS = 0.5  # that the main thread waits at a time, see ``_pieces``
_LONGEST_SECONDS = 1e6  # that other threads wait at a time
_INSIST = 1.0  # seconds; after that another interrupt is raised wherever the thread is

_waits: set[CodeType] = set()
_calls_out: set[CodeType] = set()
_unwavering: set[CodeType] = set()

deferred: float | None = None
"""When an interrupt came that is still to be raised."""

_repeated = False  # the next signal is not the user's, but a repetition


class _Lock(Protocol):
    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...

    def release(self) -> None: ...


def waits(function: F) -> F:
    """Mark a function that blocks and may be interrupted: nothing is lost if what it returns is."""
    _waits.add(function.__code__)
    return function


def calls_out(function: F) -> F:
    """Mark a function that calls code of the user's, which may raise anything."""
    _calls_out.add(function.__code__)
    return function


def unwavering(function: F) -> F:
    """Mark a function in which nothing is interrupted, though it waits; it must not wait long."""
    _unwavering.add(function.__code__)
    return function


def defer() -> None:
    """From now on interrupts come as described in [Note: interrupts]; for the main thread, if Python's own handler is
    there. Programs may put that back at any time, as notebooks do for every cell.
    """
    global _repeated
    if _in_main_thread() and getsignal(SIGINT) is default_int_handler:
        _repeated = False
        signal.signal(SIGINT, _on_signal)


def defer_no_more() -> None:
    """Put Python's own handler back."""
    if _in_main_thread() and getsignal(SIGINT) is _on_signal:
        signal.signal(SIGINT, default_int_handler)


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
    """As ``poller.poll``, in seconds; may be interrupted."""
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
    """Raise an interrupt that was deferred: for loops which wait in what may not be interrupted."""
    if deferred is not None and _in_main_thread():
        _raise(sys._getframe(1), in_wait=True)


def check_at_entry() -> None:
    """The same, but only if what has called this was called by a function of ours, and that by the user: nothing has
    begun. The thread that repeats the signal often gets the interpreter only when system calls of ours let go of it.
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
    """Whether the handler of a signal raised an exception, and not the code that was running. Such an exception is for
    the program: it must not become the outcome of a call.
    """
    if not _in_main_thread():  # only the main thread runs handlers
        return False
    if hasattr(error, "in_wait"):
        return True
    if isinstance(error, KeyboardInterrupt) and getsignal(SIGINT) is default_int_handler:
        return True  # that handler leaves no frame
    handlers = {_code_of(getsignal(number)) for number in signal.valid_signals()}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False


def _code_of(handler: Any) -> CodeType | None:
    """The code that handles a signal, if it is Python code."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    code = getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None


def postpone(error: BaseException) -> bool:
    """If an exception is an interrupt, which would be lost here, raise it once more later; whether it is."""
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
        return  # it was raised meanwhile
    if _may_raise(frame):
        _raise(frame, in_wait=True)
    if not repeated and deferred is not None and time.monotonic() > deferred + _INSIST:
        _raise(frame, in_wait=False)
    _remember()


def _may_raise(frame: FrameType | None) -> bool:
    innermost, waiting = frame, False
    while frame is not None:
        code = frame.f_code
        if code in _unwavering:
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
    """What the thread does that repeats a signal."""
    global deferred, _repeated
    main = threading.main_thread().ident
    assert main is not None
    while True:
        time.sleep(_OFTEN if time.monotonic() < since + _INSIST / 4 else _SELDOM)
        if deferred is not since:
            return
        if getsignal(SIGINT) is _on_signal:
            _repeated = True
            signal.pthread_kill(main, SIGINT)
            continue
        # It is for another handler now, if there is one; which may have had it already, as a repetition.
        had, deferred, _repeated = _repeated, None, False
        if not had and callable(getsignal(SIGINT)):
            signal.pthread_kill(main, SIGINT)
        return


def _forget() -> None:
    global deferred, _repeated
    deferred, _repeated = None, False


os.register_at_fork(after_in_child=_forget)
