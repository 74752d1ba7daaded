"""The future that calls return here: as in the reference, what a callback raises becomes a ``RuntimeError``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.futures

from backhaul._rpc import futures as calls
from backhaul._worker.worker import blocking, runtime_here
from backhaul.compat.errors import reworded

T = TypeVar("T")
S = TypeVar("S")


class Future(calls.Future[T]):
    """A value to come."""

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call ``callback(self)`` when done."""
        super().add_done_callback(_checked(callback))

    def then(self, callback: Callable[[Any], S]) -> Future[S]:
        """The future of ``callback(self)``."""
        made: Future[S] = Future()

        def run(done: Any) -> None:
            try:
                result = callback(done)
            except BaseException as error:
                made.set_exception(RuntimeError(f"Got the following error in a callback: {_named(error)}"))
                if not isinstance(error, Exception):
                    raise  # meant for this thread
            else:
                made.set_result(result)

        super().add_done_callback(run if callable(callback) else _checked(callback))
        return made


def wait_all(futures: Sequence[torch.futures.Future[Any]]) -> list[Any]:
    """As ``torch.futures.wait_all``: the values of all, or the first error as soon as it is there.

    Torch's own gives up early only for errors that were set in C++, and there is no way to set one from Python.
    """
    members, gate = list(futures), runtime_here().one_shot()
    left, lock, errors = len(members), threading.Lock(), list[BaseException]()

    def note(done: torch.futures.Future[Any]) -> None:
        nonlocal left
        try:
            done.value()
        except BaseException as error:
            errors.append(error)
        with lock:
            left -= 1
        if errors or not left:
            gate.open()

    for member in members:
        member.add_done_callback(note)
    if members:
        with blocking():
            gate.wait()
    if errors:
        raise errors[0]
    return [member.wait() for member in members]


_collect_all = torch.futures.collect_all


def collect_all(futures: list[torch.futures.Future[Any]]) -> torch.futures.Future[list[torch.futures.Future[Any]]]:
    """As ``torch.futures.collect_all``. Torch's own gives other objects for those that go in, and they know neither our
    errors nor whose streams to wait for.
    """
    ours = bool(futures) and all(isinstance(member, calls.Future) for member in futures)
    return calls.collect_all(futures) if ours else _collect_all(futures)


torch.futures.wait_all = wait_all
torch.futures.collect_all = collect_all


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _checked(callback: Any) -> Any:
    if not callable(callback):
        raise TypeError(f"incompatible function arguments. A callback must be callable, not {callback!r}")
    return callback


def follow(inner: torch.futures.Future[T], made: Future[T] | None = None) -> Future[T]:
    """A future that ends as ``inner`` does, with errors in the reference's words."""
    made = made or Future()

    def pass_on(done: torch.futures.Future[T]) -> None:
        try:
            result = done.wait()
        except BaseException as error:
            outer.set_exception(reworded(error))
        else:
            outer.set_result(result)

    outer = made
    inner.add_done_callback(pass_on)
    return made
