"""Calls all owners of parameters at once, and combines their failures into one error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from backhaul._autograd.api import find_gradients
from backhaul._rpc.api import rpc_async
from backhaul._rpc.futures import Future
from backhaul._rref.handle import RRef
from backhaul._types import WorkerInfo
from backhaul.errors import UnknownContextError

T = TypeVar("T")

Answers = list[tuple[list[int], Any]]
"""For each owner: the indices of its parameters among all parameters, and its reply."""


class Owners(Protocol):
    """Parameters on many workers. A function can be applied to them on their owners."""

    def ask(self, what: str, function: Callable[..., Any], *args: Any) -> Answers:
        """Run ``function(parameters, *args)`` on each owner."""


class Listed:
    """Parameters given as a list of references."""

    def __init__(self, rrefs: Sequence[RRef[Any]]) -> None:
        self._rrefs = check_rrefs(rrefs)

    def ask(self, what: str, function: Callable[..., Any], *args: Any) -> Answers:
        """Run ``function(parameters, *args)`` on each owner."""
        places = by_owner(self._rrefs)

        def call(owner: WorkerInfo) -> Callable[[], Future[Any]]:
            own = [self._rrefs[place] for place in places[owner]]
            return lambda: rpc_async(owner, apply, args=(function, own, *args))

        answers = ask_all({owner: call(owner) for owner in places}, what)
        return [(places[owner], answer) for owner, answer in answers.items()]


def apply(function: Callable[..., T], rrefs: Sequence[RRef[Any]], *args: Any) -> T:
    """Call a function with the values of references that this worker owns."""
    return function([rref.local_value() for rref in rrefs], *args)


def check_rrefs(rrefs: Any) -> list[RRef[Any]]:
    """Return ``rrefs`` as a list. Raises ``TypeError`` that names the item which is not an RRef."""
    if isinstance(rrefs, RRef) or not hasattr(rrefs, "__iter__"):
        raise TypeError(f"parameters must be a list of RRefs, got a {type(rrefs).__name__}")
    found = list(rrefs)
    for place, rref in enumerate(found):
        if not isinstance(rref, RRef):
            raise TypeError(f"parameter {place} is a {type(rref).__name__}, not an RRef; wrap it with RRef(...)")
    return found


def by_owner(rrefs: Sequence[RRef[Any]]) -> dict[WorkerInfo, list[int]]:
    """Return the indices of references in a list, grouped by the worker that owns them."""
    places: dict[WorkerInfo, list[int]] = {}
    for place, rref in enumerate(rrefs):
        places.setdefault(rref.owner(), []).append(place)
    return places


def ask_all(
    calls: Mapping[WorkerInfo, Callable[[], Future[T]]],
    what: str,
    finish: Mapping[WorkerInfo, Callable[[T], None]] | None = None,
) -> dict[WorkerInfo, T]:
    """Start all calls, wait until each has ended, and return the results by owner.

    Args:
        calls: The function that starts the call, by owner.
        what: What the calls do, for errors.
        finish: Functions that take the results, also if other owners fail.

    Raises:
        Exception: The error of the first owner that failed. Its notes name that owner and all others that failed.
    """
    started: dict[WorkerInfo, Future[T]] = {}
    errors: dict[WorkerInfo, Exception] = {}
    results: dict[WorkerInfo, T] = {}
    for owner, call in calls.items():
        try:
            started[owner] = call()
        except Exception as error:
            errors[owner] = error
    for owner, future in started.items():
        try:
            results[owner] = future.wait()
            if finish is not None:
                finish[owner](results[owner])
        except Exception as error:
            errors[owner] = error
    if errors:
        raise _one_of(errors, what, len(calls))
    return results


def _one_of(errors: Mapping[WorkerInfo, Exception], what: str, of: int) -> Exception:
    (owner, first), *others = errors.items()
    first.add_note(f"{what} failed on worker '{owner.name}' ({len(errors)} of {of} owners of parameters failed)")
    for other, error in others:
        if error is not first:
            first.add_note(f"{what} failed on worker '{other.name}' too: {type(error).__name__}: {error}")
    return first


def check_context(context: int | None, answers: Sequence[Any]) -> None:
    """Raise ``UnknownContextError`` if neither this worker nor any owner knows the context (all answers are None)."""
    if context is None or any(answer is not None for answer in answers):
        return
    if find_gradients(context) is None:
        raise UnknownContextError(
            f"no owner of these parameters knows context {context}; call this after backward, inside the "
            "`with bh.context()` block",
            context=context,
        )
