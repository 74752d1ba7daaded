"""The future that ``rpc_async`` returns: torch's, which keeps the types of exceptions and can be awaited in asyncio.

Knows nothing of calls: a future that belongs to a call has a number and an object that cancels by number.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import threading
import weakref
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch.futures

from backhaul._devices import seam
from backhaul._devices.seam import Mark
from backhaul._rpc.exception_copies import copy_of, copy_without_frames
from backhaul._runtime import interrupts, runtime
from backhaul._runtime.compile_marks import graph_break
from backhaul._runtime.runtime import OneShotEvent
from backhaul._wire.faults import described
from backhaul._worker import deadlines
from backhaul._worker.deadlines import FOREVER, Wait
from backhaul._worker.worker import blocking, name_here, observer_here, runtime_here

T = TypeVar("T")
S = TypeVar("S")

_counting = threading.Lock()  # guards ``Future._waiting``

# Methods of torch's C++ class, without the Python functions around them.
_init: Callable[[Any, list[torch.device]], None] = torch._C.Future.__init__
set_result: Callable[[Any, Any], None] = torch._C.Future.set_result
is_done: Callable[[Any], bool] = torch._C.Future.done
_value_of: Callable[[Any], Any] = torch._C.Future.wait
call_when_done: Callable[[Any, Callable[[Any], None]], None] = torch._C.Future.add_done_callback


class CallsOfFutures(Protocol):
    """The calls of a worker, by number."""

    def cancel(self, number: int) -> bool:
        """Cancel a call; see ``Future.cancel``."""

    def wait(self, numbers: Collection[int], one_shot: OneShotEvent, timeout: float | None) -> bool:
        """Wait for ``one_shot``, which opens after the calls ``numbers``. The calling thread may read their replies."""


class Future(torch.futures.Future[T]):
    """A value to come. Thread-safe; may be waited for by threads and awaited by asyncio tasks.

    Callbacks run in the context (current worker, context variables) in which they were added, on the thread that
    completes the future, or at once if it is complete.

    Example:
        >>> future = Future()
        >>> doubled = future.then(lambda done: done.value() * 2)
        >>> future.set_result(21)
        >>> doubled.wait()
        42
    """

    # The error is an attribute here, not in torch's C++ object: the garbage collector must see it. An exception refers
    # to all frames that it passed. These refer to the future, if a thread waits for it there.
    _error: BaseException | None = None
    _call: tuple[Callable[[], CallsOfFutures | None], int] | None = None  # finds the calls; the call's number
    _cancel: Callable[[], bool] | None = None  # cancels what a future without a call waits for
    _waiting = 0  # how many threads and asyncio tasks wait for it
    _mark: Mark | None = None  # the work on device streams of the thread that completed it
    has_callbacks = False
    """Whether the thread that completes the future runs code of the user's."""

    def __init__(self, *, devices: list[int | str | torch.device] | None = None) -> None:
        if devices is None:
            _init(self, [])
        else:
            super().__init__(devices=devices)

    @graph_break
    def wait(self, timeout: float | None = None) -> T:
        """Block until the future is done. Return its value or raise its exception.

        Args:
            timeout: Give up after so many seconds with ``TimeoutError``; the future itself goes on.

        Raises:
            CallTimeoutError: The deadline of the handler or block around this wait is over, see ``deadline``.
            CallCancelledError: The future, or the handler that waits here, was cancelled.
        """
        if not is_done(self):
            self._wait_until_done(timeout)
        if self._mark is not None:
            return seam.streams.join(self._mark, _value_of(self))  # type: ignore[no-any-return]
        return _value_of(self)  # type: ignore[no-any-return]

    @graph_break
    def value(self) -> T:
        """The value of a future that is done; raises its exception if it has one."""
        return seam.streams.join(self._mark, super().value())

    @graph_break
    def set_result(self, result: T) -> None:
        """Complete the future with a value."""
        self._mark = seam.streams.mark(self._mark)
        super().set_result(result)

    def _wait_until_done(self, timeout: float | None) -> None:
        if not is_done(self):
            one_shot = runtime_here().one_shot()
            call_when_done(self, lambda _: one_shot.open())
            with blocking(), self._counted():
                if not deadlines.wait(one_shot, timeout, "the future was not done", reading((self,))):
                    raise TimeoutError(f"the future was not done within {timeout:g} s")

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Inside, one more thread or task counts as waiting for the future."""
        with _counting:
            self._waiting += 1
        try:
            yield
        finally:
            with _counting:
                self._waiting -= 1

    @graph_break
    def cancel(self) -> bool:
        """Cancel the call of this future. Once this returns True, the future is done, and ``wait`` raises
        ``CallCancelledError``.

        The other worker is told. There, a call that has not begun is dropped, and a coroutine is cancelled. A function
        cannot be interrupted, but what it waits for is cancelled (its own calls, futures, backward passes), and
        ``cancelled()`` returns True there. Its result is discarded.

        An asyncio task that is cancelled while it awaits the future cancels the call too, if no other task or thread
        waits for the future. ``asyncio.shield`` prevents that.

        For a future that ``then`` or ``collect_all`` returned, this cancels the calls behind it. The future is done
        when its callback has run.

        Returns:
            Whether there was something to cancel: False if the call is done, or if the future has no call.

        Example:
            >>> import time, backhaul as bh
            >>> with bh.cluster(2):
            ...     future = bh.rpc_async("worker1", time.sleep, args=(0.1,))
            ...     print(future.cancel(), future.cancel())
            True False
        """
        if is_done(self):
            return False
        if self._call is not None:
            find, number = self._call
            calls = find()
            return calls is not None and calls.cancel(number)
        return self._cancel is not None and self._cancel()

    def _failure(self) -> BaseException | None:
        """The exception that ``wait`` raises once the future is done."""
        return self._error

    @graph_break
    def set_exception(self, result: Any) -> None:
        """Complete the future with an exception, which ``wait`` raises.

        Raises:
            RuntimeError: The future is complete already; it stays as it is.
        """
        if self.done():
            raise RuntimeError("the future is complete already")
        if not isinstance(result, BaseException):
            raise TypeError(f"{result!r} is not an exception")
        self._error = result
        this, spare = weakref.ref(self), copy_of(result)

        def raise_error(_: Any) -> None:
            future = this()  # None: only torch's C++ object is left
            raise (None if future is None else future._failure()) or spare

        self._set_unwrap_func(raise_error)
        try:
            super().set_result(None)  # type: ignore[arg-type]
        except RuntimeError:  # another thread was faster
            self._error = None
            self._set_unwrap_func(lambda value: value)
            raise

    def _when_done(self, callback: Callable[[Any], None]) -> None:
        super().add_done_callback(callback)

    @graph_break
    def add_done_callback(self, callback: Callable[[Future[T]], None]) -> None:
        """Call ``callback(self)`` when done. What it raises is logged, not raised."""
        _check(callback)
        context = contextvars.copy_context()
        self.has_callbacks = True

        def run(_: Any) -> None:
            try:
                context.run(_go_on, callback, self)
            except KeyboardInterrupt as error:  # torch would log it, and go on
                if not interrupts.postpone(error):
                    raise

        super().add_done_callback(run)

    @graph_break
    def then(self, callback: Callable[[Future[T]], S]) -> Future[S]:
        """Return the future of ``callback(self)``, which is called when this one is done, failed or not.

        What ``callback`` raises becomes the new future's exception, its type kept.
        """
        _check(callback)
        made: Future[S] = Future()
        made._cancel = self.cancel
        context = contextvars.copy_context()
        self.has_callbacks = True

        def run(_: Any) -> None:
            try:
                result = context.run(_go_on, callback, self)
            except Exception as error:
                made.set_exception(error)
            except BaseException as error:  # meant for this thread, but the new future must not wait forever
                made.set_exception(described(error, name_here()))
                if not interrupts.postpone(error):
                    raise
            else:
                made.set_result(result)

        super().add_done_callback(run)
        return made

    def __await__(self) -> Generator[Any, None, T]:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()

        def settle() -> None:
            if not waiter.done():
                waiter.set_result(None)

        def notify(_: Any) -> None:
            try:
                loop.call_soon_threadsafe(settle)
            except RuntimeError:  # the loop is closed: no task waits any more
                return

        self._when_done(notify)
        scope, timer = deadlines.current.get(), None
        if scope is not None and scope.until != FOREVER:
            error = scope.deadline_error("the future was not done")
            timer = loop.call_later(scope.left, lambda: None if waiter.done() else waiter.set_exception(error))
        try:
            with self._counted():
                yield from waiter
        except asyncio.CancelledError:
            if not self._waiting:  # else other tasks or threads still wait for it
                self.cancel()
            raise
        finally:
            if timer is not None:
                timer.cancel()
        return self.wait()


class Kept(Future[T]):
    """A future that outlives the callers of ``wait``: each caller gets a copy of the exception. The exception itself
    would collect the callers' frames. These may refer to the object that keeps the future, and keep it forever.

    Example:
        >>> future, error = Kept(), KeyError("gone")
        >>> future.set_exception(error)
        >>> try:
        ...     future.wait()
        ... except KeyError as raised:
        ...     raised is error, error.__traceback__
        (False, None)
    """

    def _failure(self) -> BaseException | None:
        error = self._error
        return None if error is None else copy_without_frames(error).with_traceback(error.__traceback__)


def reading(futures: Sequence[torch.futures.Future[Any]]) -> Wait:
    """How to wait for futures: if they belong to calls of one worker, by reading the replies."""
    numbers: list[int] = []
    found: set[Callable[[], CallsOfFutures | None]] = set()
    for future in futures:
        call = future._call if isinstance(future, Future) else None
        if call is not None:
            found.add(call[0])
            numbers.append(call[1])
    calls = found.pop()() if len(found) == 1 else None
    return deadlines.sleep if calls is None else functools.partial(calls.wait, numbers)


@interrupts.calls_out
def _go_on(callback: Callable[[Future[T]], S], done: Future[T]) -> S:
    observer = observer_here()
    with runtime.UserCode():
        if observer is None:
            return callback(done)
        with observer.going_on():
            return callback(done)


def _check(callback: Any) -> None:
    if not callable(callback):
        raise TypeError(f"a callback must be callable, not {type(callback).__name__}")
