"""What the owner of a value does for the workers that refer to it. Handles call these functions on the owner."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable
from typing import Any

import torch

from backhaul._autograd.api import backward
from backhaul._rpc.calls.async_results import Later, answers_later, may_answer_later
from backhaul._rpc.calls.request_encoder import hides_arguments
from backhaul._rpc.futures import Future
from backhaul._rref.execution import execute, future_of, relay
from backhaul._rref.registry import current_rrefs
from backhaul._wire.callables import resolve
from backhaul._worker.worker import current_worker

Named = tuple[int, int, int, str, str]
"""Value, fork (-1: the owner's own), id and incarnation of its holder, and the incarnation that owns the value."""


@may_answer_later
def fetch(*named: Any) -> Any:
    """The value, as soon as it is there."""
    value = current_rrefs().owned.use(*named)
    return value.wait() if value.done() else Later(value)


@may_answer_later
def type_of(*named: Any) -> Any:
    """The type of the value."""
    value = current_rrefs().owned.use(*named)
    return Later(value.then(lambda done: type(done.value())))


@may_answer_later
def backward_of(*arguments: Any) -> Any:
    """Run backward from the value."""
    *named, context, retain_graph = arguments
    value = current_rrefs().owned.use(*named)
    return Later(value.then(lambda done: run_backward(done.value(), context, retain_graph)))


@may_answer_later
@hides_arguments(6)
def invoke(  # noqa: PLR0917 (positional arguments travel without pickle)
    number: int,
    fork: int,
    holder: int,
    incarnation: str,
    own: str,
    what: str | Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call a method of the value, or a function with the value as its first argument. ``what``: the name of the method,
    or the function, or its full name, which has a colon.
    """
    value = current_rrefs().owned.use(number, fork, holder, incarnation, own)
    if not value.done():
        made: Future[Any] = Future()

        def go_on(done: Future[Any]) -> None:
            # Each on a thread of its own: calls that wait for the value may wait for each other too.
            context = contextvars.copy_context()
            current_worker().thread_pool.submit(functools.partial(context.run, run, done))

        def run(done: Future[Any]) -> None:
            relay(execute(lambda: _find(done.wait(), what), args, kwargs), made)

        value.add_done_callback(go_on)
        return Later(made)
    function = _find(value.wait(), what)
    result = function(*args, **kwargs)
    return Later(future_of(function, result)) if answers_later(function, result) else result


def _find(value: Any, what: str | Callable[..., Any]) -> Callable[..., Any]:
    if not isinstance(what, str):
        return functools.partial(what, value)
    if ":" in what:
        return functools.partial(resolve(what), value)
    found: Callable[..., Any] = getattr(value, what)
    return found


def run_backward(value: Any, context: int, retain_graph: bool) -> None:
    """Run ``backward`` from a value of this worker."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"backward starts from a tensor; this reference is to a {type(value).__name__}")
    if context < 0:
        value.backward(retain_graph=retain_graph)
    else:
        backward(context, [value], retain_graph=retain_graph)
