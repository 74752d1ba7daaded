"""What the owner of a value does for the workers that refer to it. Handles call these functions on the owner."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from backhaul._autograd.api import backward
from backhaul._rpc.calls.async_results import async_execution
from backhaul._rpc.futures import Future
from backhaul._rref.execution import execute, relay
from backhaul._rref.registry import current_rrefs

Named = tuple[int, int, int, str, str]
"""Value, fork (-1: the owner's own), id and incarnation of its holder, and the incarnation that owns the value."""


@async_execution
def fetch(*named: Any) -> Future[Any]:
    """The value, as soon as it is there."""
    return current_rrefs().owned.use(*named)


@async_execution
def type_of(*named: Any) -> Future[Any]:
    """The type of the value."""
    return fetch(*named).then(lambda done: type(done.value()))


@async_execution
def backward_of(named: Named, context: int, retain_graph: bool) -> Future[None]:
    """Run backward from the value."""
    return fetch(*named).then(lambda done: run_backward(done.value(), context, retain_graph))


@async_execution
def invoke(named: Named, what: str | Callable[..., Any], args: Any, kwargs: Any) -> torch.futures.Future[Any]:
    """Call a method of the value, or a function with the value as its first argument."""
    value = fetch(*named)
    if value.done():
        return _invoke(value, what, args, kwargs)
    made: Future[Any] = Future()

    def go_on(done: Future[Any]) -> None:
        relay(_invoke(done, what, args, kwargs), made)

    value.add_done_callback(go_on)
    return made


def _invoke(value: Future[Any], what: str | Callable[..., Any], args: Any, kwargs: Any) -> torch.futures.Future[Any]:
    def find() -> Callable[..., Any]:
        owned = value.wait()
        return getattr(owned, what) if isinstance(what, str) else functools.partial(what, owned)

    return execute(find, args, kwargs)


def run_backward(value: Any, context: int, retain_graph: bool) -> None:
    """Run ``backward`` from a value of this worker."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"backward starts from a tensor; this reference is to a {type(value).__name__}")
    if context < 0:
        value.backward(retain_graph=retain_graph)
    else:
        backward(context, [value], retain_graph=retain_graph)
