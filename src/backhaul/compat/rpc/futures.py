"""The future that calls of this package return. As in the reference, an error in a callback becomes a ``RuntimeError``.

Importing this module replaces ``torch.futures.wait_all`` and ``torch.futures.collect_all``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.futures

from backhaul._rpc import futures as calls
from backhaul._rpc import several_futures
from backhaul._worker.worker import blocking, runtime_here
from backhaul.compat.errors import reworded

T = TypeVar("T")
S = TypeVar("S")


class Future(calls.Future[T]):
    """The future of a call."""

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call ``callback(self)`` when done."""
        super().add_done_callback(_require_callable(callback))

    def then(self, callback: Callable[[Any], S]) -> Future[S]:
        """Call ``callback(self)`` when done; returns a future of its result."""
        made: Future[S] = Future()

        def run(done: Any) -> None:
            try:
                result = callback(done)
            except BaseException as error:
                made.set_exception(RuntimeError(f"Got the following error in a callback: {_type_and_text(error)}"))
                if not isinstance(error, Exception):
                    raise  # such as SystemExit, which must reach this thread
            else:
                made.set_result(result)

        super().add_done_callback(run if callable(callback) else _require_callable(callback))
        return made


class CallFuture(Future[T]):
    """The future of a call, whose errors have the reference's texts."""

    def set_exception(self, result: Any) -> None:
        """Complete the future with an exception."""
        super().set_exception(reworded(result))


def wait_all(futures: Sequence[torch.futures.Future[Any]]) -> list[Any]:
    """As ``torch.futures.wait_all``: returns the values of all futures, or raises the first error as soon as it occurs.

    Torch's own function raises early only for errors that were set in C++. Python code cannot set such an error.
    """
    members, finished = list(futures), runtime_here().one_shot()
    lock = threading.Lock()  # guards pending
    pending, errors = len(members), list[BaseException]()

    def on_done(done: torch.futures.Future[Any]) -> None:
        nonlocal pending
        try:
            done.value()
        except BaseException as error:
            errors.append(error)
        with lock:
            pending -= 1
        if errors or not pending:
            finished.open()

    for member in members:
        member.add_done_callback(on_done)
    if members:
        with blocking():
            finished.wait()
    if errors:
        raise errors[0]
    return [member.wait() for member in members]


_torch_collect_all = torch.futures.collect_all


def collect_all(futures: list[torch.futures.Future[Any]]) -> torch.futures.Future[list[torch.futures.Future[Any]]]:
    """As ``torch.futures.collect_all``, but the result contains the same future objects.

    Torch's own function returns other objects, which lack Backhaul's errors and do not wait for device streams.
    """
    only_calls = bool(futures) and all(isinstance(member, calls.Future) for member in futures)
    return several_futures.collect_all(futures) if only_calls else _torch_collect_all(futures)


torch.futures.wait_all = wait_all
torch.futures.collect_all = collect_all


def _type_and_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _require_callable(callback: Any) -> Any:
    if not callable(callback):
        raise TypeError(f"incompatible function arguments. A callback must be callable, not {callback!r}")
    return callback


def follow(inner: torch.futures.Future[T], made: Future[T] | None = None) -> Future[T]:
    """A future that ends as ``inner`` does, with errors that have the reference's texts."""
    made = made or Future()

    def copy_outcome(done: torch.futures.Future[T]) -> None:
        try:
            result = done.wait()
        except BaseException as error:
            outer.set_exception(reworded(error))
        else:
            outer.set_result(result)

    outer = made
    inner.add_done_callback(copy_outcome)
    return made
