"""How long what runs here may still take, and whether anybody wants it: the *limit* of a handler or of a block.

A limit is carried by a context variable, so it holds for all that a handler or a block starts: nested calls, ``async
def``, callbacks. It is a time of the worker's clock; what travels is how many seconds are left, so that clocks of
different hosts need not agree. Knows nothing of calls: those who wait ask.
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
_registering = threading.Lock()  # guards the making of a limit's table of wakers


class CancelScope:
    """Until when something may run. Limits nest; only the outermost, a handler's, can be cancelled.

    Attributes:
        label: What it is the limit of, for people.
        until: When it is over, by ``now``.
        cancelled: Of the outermost: nobody wants it any more.
        at_end: Of the outermost: what to call when it is over, perhaps more than once.
    """

    label: str
    now: Callable[[], float]
    until = FOREVER
    cancelled = False
    outermost: CancelScope | None = None  # None: this one is
    at_end: Callable[[], None] | None = None
    _wakers: dict[int, Callable[[], None]] | None = None

    @property
    def root(self) -> CancelScope:
        """The limit that this one lies in and that can be cancelled; may be itself."""
        return self.outermost or self

    @property
    def left(self) -> float:
        """Seconds until it is over; 0 if it is, or was cancelled."""
        return 0.0 if self.root.cancelled else max(self.until - self.now(), 0.0)

    def cancel(self) -> None:
        """Nobody wants it any more: wake those who wait inside."""
        self.cancelled = True
        for waker in list((self._wakers or {}).values()):
            waker()

    def wake_with(self, waker: Callable[[], None]) -> int:
        """Call ``waker`` if this is cancelled, at once if it was; until ``forget`` of the number that is returned."""
        root, number = self.root, next(_numbers)
        with _registering:
            if root._wakers is None:
                root._wakers = {}
            root._wakers[number] = waker
        # In this order; who cancels sets the flag and then looks for wakers. So one of them sees the other.
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
        """While inside, ``waker`` is called if this is cancelled."""
        number = self.wake_with(waker)
        try:
            yield
        finally:
            self.forget(number)

    def cut(self, what: str) -> CallTimeoutError:
        """The error of something that had to end because of this limit."""
        return CallTimeoutError(f"{what}: the deadline of {self.label} was over", cut_by=self.label)

    def unwanted(self, what: str) -> CallCancelledError:
        """The error of something that had to end because this was cancelled."""
        return CallCancelledError(f"{what}: {self.root.label}, for which it was, was cancelled")


class Block(CancelScope):
    """The limit of a block inside of ``outer``, or of the program itself."""

    def __init__(self, label: str, seconds: float, now: Callable[[], float], outer: CancelScope | None) -> None:
        self.now = now
        until = now() + seconds
        if outer is not None:
            self.outermost = outer.root
        if outer is not None and outer.until < until:
            self.label, self.until = outer.label, outer.until
        else:
            self.label, self.until = label, until


current: contextvars.ContextVar[CancelScope | None] = contextvars.ContextVar("backhaul_limit", default=None)
"""The limit of what runs here."""


def _forget() -> None:
    current.set(None)  # it was the parent's


os.register_at_fork(after_in_child=_forget)


def wait(one_shot: OneShotEvent, timeout: float | None, what: str) -> bool:
    """Wait at a gate, but not beyond the current limit; False if ``timeout`` passed.

    Raises:
        CallTimeoutError: The limit's time is over.
        CallCancelledError: It was cancelled. The gate may be open then.
    """
    limit = current.get()
    if limit is None:
        return one_shot.wait(timeout)
    with limit.waking(one_shot.open):
        left = limit.until - limit.now()
        cut = timeout is None or left < timeout
        opened = one_shot.wait((None if left == FOREVER else left) if cut else timeout)
    if limit.root.cancelled:
        raise limit.unwanted(what)
    if cut and not opened:
        raise limit.cut(what)
    return opened


def check(what: str) -> None:
    """Raise as ``wait`` does if the current limit is over already."""
    limit = current.get()
    if limit is not None and not limit.left:
        raise limit.unwanted(what) if limit.root.cancelled else limit.cut(what)


@graph_break
def time_left() -> float | None:
    """How many seconds are left to what runs here: until the caller of this handler gives up, or the block of
    ``deadline`` is to end. 0: the time is over, or the call was cancelled. None: any time.

    Example:
        >>> import backhaul as bh
        >>> with bh.cluster(2):
        ...     print(bh.time_left(), round(bh.rpc_sync("worker1", bh.time_left, timeout=30)))
        None 30
    """
    limit = current.get()
    if limit is None:
        return None
    left = limit.left
    return None if left == FOREVER else left


@graph_break
def cancelled() -> bool:
    """Whether nobody waits any more for the handler that runs here, since its caller has cancelled the call, or given
    up waiting. Its result will be discarded, so a handler that works long may ask now and then, and end.

    Example:
        >>> import backhaul as bh
        >>> with bh.cluster(2):
        ...     bh.rpc_sync("worker1", bh.cancelled)
        False
    """
    limit = current.get()
    return limit is not None and limit.root.cancelled


class deadline:
    """Give a block so many seconds: no call, wait or backward pass inside of it waits longer.

    Those that would fail with ``CallTimeoutError`` (a pass with ``BackwardTimeoutError``), whose ``cut_by`` is
    ``"bh.deadline"``. Nothing else is interrupted. It can only shorten the time that is left already.

    Args:
        seconds: How many; None: neither the deadline nor the cancellation of the handler around the block holds
            inside, for what has to be done in any case.

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
        limit: CancelScope | None = None
        if self._seconds is not None:
            limit = Block("bh.deadline", self._seconds, runtime_here().now, current.get())
        self._tokens.append(current.set(limit))

    @graph_break
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        current.reset(self._tokens.pop())
