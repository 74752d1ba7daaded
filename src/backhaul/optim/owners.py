"""Calls all owners of parameters at once, and combines their failures into one error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch

from backhaul._autograd.api import find_gradients
from backhaul._rpc.api import rpc_async, rpc_sync
from backhaul._rpc.futures import Future
from backhaul._rref.handle import RRef
from backhaul._types import WorkerInfo
from backhaul.errors import UnknownContextError

T = TypeVar("T")

OwnerCall = Callable[[bool], Any | Future[Any]]
"""Makes a call to an owner. It waits for the result if its argument is true, and returns a future if not. If the owner
is this worker, it may be a ``LocalCall``.
"""

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

        def call(owner: WorkerInfo) -> OwnerCall:
            own = [self._rrefs[place] for place in places[owner]]
            return function_call(owner, apply, function, own, *args)

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


def function_call(owner: WorkerInfo, function: Callable[..., Any] | str, *args: Any) -> OwnerCall:
    """A call of a function on an owner, or of what it exposes under that name."""
    return lambda wait: (rpc_sync if wait else rpc_async)(owner, function, args)


def method_call(value: RRef[Any], method: str, *args: Any) -> OwnerCall:
    """A call of a method of a value on its owner."""
    return lambda wait: (value._call_and_wait if wait else value._call)(method, args, None, None)


class LocalCall:
    """A call to this worker itself, on this thread."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._function = function
        self._args = args

    @torch.enable_grad()
    def __call__(self, wait: bool) -> Any:
        return self._function(*self._args)


def step_call(value: RRef[Any], method: str, *args: Any) -> OwnerCall:
    """As ``method_call``, for a method that shares no tensors with its caller: this worker itself is not called."""
    if value.is_owner():
        return LocalCall(getattr(value.local_value(), method), *args)
    return method_call(value, method, *args)


def ask_all(
    calls: Mapping[WorkerInfo, OwnerCall],
    what: str,
    finish: Mapping[WorkerInfo, Callable[[Any], None]] | None = None,
) -> dict[WorkerInfo, Any]:
    """Make all calls at once, wait until each has ended, and return the results by owner. No call is part of a graph.

    Args:
        calls: The function that makes the call, by owner.
        what: What the calls do, for errors.
        finish: Functions that take the results, also if other owners fail.

    Raises:
        Exception: The error of the first owner that failed. Its notes name that owner and all others that failed.
    """
    errors: dict[WorkerInfo, Exception] = {}
    results = _results_of(calls, errors)
    if finish is not None:
        for owner, result in results.items():
            try:
                finish[owner](result)
            except Exception as error:
                errors[owner] = error
    if errors:
        raise _one_of({owner: errors[owner] for owner in calls if owner in errors}, what, len(calls))
    return results


def _results_of(calls: Mapping[WorkerInfo, OwnerCall], errors: dict[WorkerInfo, Exception]) -> dict[WorkerInfo, Any]:
    """The results of calls that are made at once. What fails goes into ``errors``."""
    started: dict[WorkerInfo, Future[Any]] = {}
    results: dict[WorkerInfo, Any] = {}
    # This thread makes one of the calls itself, as the last one: it runs here, or is waited for without a future. That
    # takes half the time.
    own = next((owner for owner, call in calls.items() if isinstance(call, LocalCall)), None)
    own = own or next(reversed(list(calls)), None)
    graph = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    try:
        for owner in (*(owner for owner in calls if owner is not own), *([] if own is None else [own])):
            try:
                if owner is own:
                    results[owner] = calls[owner](True)
                else:
                    started[owner] = calls[owner](False)
            except Exception as error:
                errors[owner] = error
    finally:
        torch.set_grad_enabled(graph)
    for owner, future in started.items():
        try:
            results[owner] = future.wait()
        except Exception as error:
            errors[owner] = error
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
