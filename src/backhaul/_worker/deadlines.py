"""Deadlines and cancellation of a handler or of a block: its *scope*.

A context variable holds the scope. So it applies to everything that a handler or a block starts: nested calls, ``async
def``, callbacks. A deadline is a time of the worker's clock. Messages carry the number of seconds that are left, so
clocks of different hosts need not agree. This module knows nothing of calls: code that waits asks for the scope.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from types import TracebackType

from backhaul._runtime.compile_marks import graph_break
from backhaul._runtime.runtime import OneShotEvent
from backhaul._worker.worker import runtime_here
from backhaul.errors import CallCancelledError, CallTimeoutError

FOREVER = float("inf")

_numbers = itertools.count()
_registering = threading.Lock()  # guards ``CancelScope._wakers``


class CancelScope:
    """Until when something may run. Scopes nest; only the outermost, that of a handler, can be cancelled.

    Attributes:
        label: The name of the handler or block, for people.
        until: The deadline, by ``now``.
        cancelled: Only of the outermost scope: no caller waits for it any more.
        at_end: Only of the outermost scope: a function to call when it is over, perhaps more than once.
    """

    label: str
    now: Callable[[], float]
    until = FOREVER
    cancelled = False
    outermost: CancelScope | None = None  # None: this is the outermost scope
    at_end: Callable[[], None] | None = None
    _wakers: dict[int, Callable[[], None]] | None = None

    @property
    def root(self) -> CancelScope:
        """The outermost scope, which can be cancelled; may be this one."""
        return self.outermost or self

    @property
    def left(self) -> float:
        """Seconds until the deadline; 0 if it has passed or the scope was cancelled."""
        return 0.0 if self.root.cancelled else max(self.until - self.now(), 0.0)

    def cancel(self) -> None:
        """Mark the scope as cancelled and wake the threads that wait inside."""
        self.cancelled = True
        for waker in list((self._wakers or {}).values()):
            waker()

    def wake_with(self, waker: Callable[[], None]) -> int:
        """Call ``waker`` when the scope is cancelled, at once if it was. Returns a number for ``forget``."""
        root, number = self.root, next(_numbers)
        with _registering:
            if root._wakers is None:
                root._wakers = {}
            root._wakers[number] = waker
        # In this order: ``cancel`` sets the flag and then reads the wakers, so one of the two threads sees the other.
        if root.cancelled:
            waker()
        return number

    def forget(self, number: int) -> None:
        """Undo ``wake_with``."""
        wakers = self.root._wakers
        if wakers is not None:
            wakers.pop(number, None)

    @contextlib.contextmanager
    def waking(self, waker: Callable[[], None]) -> Iterator[None]:
        """Inside, ``waker`` is called if the scope is cancelled."""
        number = self.wake_with(waker)
        try:
            yield
        finally:
            self.forget(number)

    def deadline_error(self, what: str) -> CallTimeoutError:
        """The error of something that ended because of this deadline."""
        return CallTimeoutError(f"{what}: the deadline of {self.label} has passed", cut_by=self.label)

    def cancelled_error(self, what: str) -> CallCancelledError:
        """The error of something that ended because this scope was cancelled."""
        return CallCancelledError(f"{what} because its parent call {self.root.label} was cancelled")


class Block(CancelScope):
    """The scope of a block inside ``outer``; None: inside the program itself."""

    def __init__(self, label: str, seconds: float, now: Callable[[], float], outer: CancelScope | None) -> None:
        self.now = now
        until = now() + seconds
        if outer is not None:
            self.outermost = outer.root
        if outer is not None and outer.until < until:
            self.label, self.until = outer.label, outer.until
        else:
            self.label, self.until = label, until


current: contextvars.ContextVar[CancelScope | None] = contextvars.ContextVar("backhaul_scope", default=None)
"""The scope of the code that runs here; None: it has no deadline and cannot be cancelled."""


def _forget() -> None:
    current.set(None)  # the scope belongs to the parent process


os.register_at_fork(after_in_child=_forget)


Wait = Callable[[OneShotEvent, "float | None"], bool]
"""Waits until an event opens; False if so many seconds passed first."""


def sleep(one_shot: OneShotEvent, timeout: float | None) -> bool:
    """Wait for nothing else."""
    return one_shot.wait(timeout)


def wait(one_shot: OneShotEvent, timeout: float | None, what: str, how: Wait = sleep) -> bool:
    """Wait until ``one_shot`` opens, but not beyond the deadline of the current scope. False if ``timeout`` passed.

    Args:
        one_shot: The event.
        timeout: How many seconds to wait; None: any time.
        what: What was not done in time, for errors.
        how: Waits; the calling thread may do something useful meanwhile.

    Raises:
        CallTimeoutError: The deadline of the scope has passed.
        CallCancelledError: The scope was cancelled. ``one_shot`` may be open then.
    """
    scope = current.get()
    if scope is None:
        return how(one_shot, timeout)
    with scope.waking(one_shot.open):
        left = scope.until - scope.now()
        cut = timeout is None or left < timeout
        opened = how(one_shot, (None if left == FOREVER else left) if cut else timeout)
    if scope.root.cancelled:
        raise scope.cancelled_error(what)
    if cut and not opened:
        raise scope.deadline_error(what)
    return opened


def check(what: str) -> None:
    """Raise as ``wait`` does if the deadline of the current scope has passed or the scope was cancelled."""
    scope = current.get()
    if scope is not None and not scope.left:
        raise scope.cancelled_error(what) if scope.root.cancelled else scope.deadline_error(what)


@graph_break
def time_left() -> float | None:
    """How many seconds are left to the code that calls this: until the caller of the handler gives up, or until the
    deadline of the ``deadline`` block. 0: the deadline has passed, or the call was cancelled. None: there is no
    deadline.

    Example:
        >>> import backhaul as bh
        >>> with bh.cluster(2):
        ...     print(bh.time_left(), round(bh.rpc_sync("worker1", bh.time_left, timeout=30)))
        None 30
    """
    scope = current.get()
    if scope is None:
        return None
    left = scope.left
    return None if left == FOREVER else left


@graph_break
def cancelled() -> bool:
    """Whether no caller waits any more for the handler that calls this: its caller has cancelled the call, or has given
    up waiting. The result will be discarded. A handler that works for long may ask now and then, and end early.

    Example:
        >>> import backhaul as bh
        >>> with bh.cluster(2):
        ...     bh.rpc_sync("worker1", bh.cancelled)
        False
    """
    scope = current.get()
    return scope is not None and scope.root.cancelled


class deadline:
    """Give a block a deadline: no call, wait or backward pass inside waits longer.

    One that would wait longer fails with ``CallTimeoutError`` (a pass with ``BackwardTimeoutError``), whose ``cut_by``
    is ``"bh.deadline"``. Nothing else is interrupted. A block cannot have more time than the code around it.

    Args:
        seconds: Seconds that the block may take. None: the block ignores the deadline and the cancellation of the
            handler around it; for work that has to be done in any case.

    Example:
        >>> import time, backhaul as bh
        >>> with bh.cluster(2), bh.deadline(0.05):
        ...     try:
        ...         bh.rpc_sync("worker1", time.sleep, args=(0.2,))
        ...     except bh.CallTimeoutError as error:
        ...         print(error.cut_by)
        bh.deadline
    """

    @graph_break
    def __init__(self, seconds: float | None) -> None:
        if seconds is not None and not seconds >= 0:
            raise ValueError(f"a deadline must not be negative, got {seconds}")
        self._seconds = seconds
        self._tokens: list[contextvars.Token[CancelScope | None]] = []

    @graph_break
    def __enter__(self) -> None:
        scope: CancelScope | None = None
        if self._seconds is not None:
            scope = Block("bh.deadline", self._seconds, runtime_here().now, current.get())
        self._tokens.append(current.set(scope))

    @graph_break
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        current.reset(self._tokens.pop())
