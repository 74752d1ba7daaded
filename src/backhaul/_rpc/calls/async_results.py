"""Results of handlers that are not there yet: futures (``async_execution``) and coroutines (``async def``). Such a
handler frees its thread until its result is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import torch

from backhaul._devices import seam
from backhaul._rpc.calls.coroutine_loop import CoroutineLoop, stepwise
from backhaul._rpc.futures import Future
from backhaul._wire.callables import label_of
from backhaul._worker import deadlines
from backhaul._worker.worker import Worker
from backhaul.errors import CallCancelledError

F = TypeVar("F", bound=Callable[..., Any])
ASYNC_MARK = "_backhaul_async_execution"


def async_execution(function: F) -> F:
    """Mark a function whose result is a future: the caller gets the future's value.

    The function must return a ``Future`` (or any ``torch.futures.Future``). Its thread is free for other calls while
    the future is not done. Works on functions, and innermost on static and class methods.

    Example:
        >>> import backhaul as bh, torch
        >>> @bh.async_execution
        ... def add_far_away(to, x, y):
        ...     return bh.rpc_async(to, torch.add, args=(x, y)).then(lambda done: done.value() + 1)
        >>> with bh.cluster(3):
        ...     bh.rpc_sync("worker1", add_far_away, args=("worker2", torch.ones(1), 2))
        tensor([4.])
    """
    if not callable(function):
        raise TypeError(f"async_execution marks functions, not a {type(function).__name__}; put it innermost")
    setattr(function, ASYNC_MARK, True)
    return function


class Later:
    """What a function that ``may_answer_later`` returns if it does."""

    __slots__ = ("future",)

    def __init__(self, future: torch.futures.Future[Any]) -> None:
        self.future = future


def may_answer_later(function: F) -> F:
    """Mark a function of a layer above: if it returns a ``Later``, the result is the value of the future in it."""
    setattr(function, ASYNC_MARK, Later)
    return function


def answers_later(function: Any, result: Any) -> bool:
    """Whether the value of a call is the value of the future that the function returned.

    A scripted function that returns a future counts as marked: a script that is found by name has lost its mark.
    """
    mark = getattr(function, ASYNC_MARK, None)
    if mark is None:
        return type(function) is torch.jit.ScriptFunction and isinstance(result, torch._C.Future)
    return mark is not Later or type(result) is Later


class AsyncResults:
    """Runs the coroutines of a worker's handlers, on one event loop. Thread-safe."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._loop = CoroutineLoop(worker)

    def complete(self, coroutine: Coroutine[Any, Any, Any], given: object) -> Future[Any]:
        """Run a coroutine and return the future of its result. ``given``: the arguments that it has."""
        made: Future[Any] = Future()

        def fail(error: BaseException) -> None:
            if isinstance(error, asyncio.CancelledError) and (self._worker.closed or deadlines.cancelled()):
                what = label_of(coroutine)
                error = CallCancelledError(f"{what} was cancelled", worker=self._worker.name, function=what)
            made.set_exception(error)

        self.run(coroutine, self.pass_on(given), made.set_result, fail)
        return made

    def run(
        self,
        coroutine: Coroutine[Any, Any, Any],
        go_on: Callable[[], None],
        succeed: Callable[[Any], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        """Run a coroutine; then call ``succeed`` with its result, or ``fail`` with what it raised.

        ``go_on`` comes from ``pass_on`` with the arguments of the coroutine.
        """

        async def run() -> None:
            go_on()
            try:
                result = await stepwise(coroutine)
            except BaseException as error:
                fail(error)
            else:
                succeed(result)

        self._loop.run(run())

    def pass_on(self, given: object) -> Callable[[], None]:
        """Let the event loop go on with arguments of a handler. Returns what its thread has to call first."""
        return seam.streams.carry(given)

    def close(self) -> None:
        """Stop the event loop, if there is one."""
        self._loop.close()
