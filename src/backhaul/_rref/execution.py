"""Runs users' functions on the owner of a value, and passes outcomes from one future to another."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from backhaul._rpc.calls.async_results import Later, answers_later
from backhaul._rpc.calls.served_call import run_here
from backhaul._rpc.futures import Future
from backhaul._rpc.node import Node
from backhaul._wire.callables import label_of
from backhaul._worker.worker import current_worker


def execute(
    find: Callable[[], Callable[..., Any]], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> torch.futures.Future[Any]:
    """Run the function that ``find`` returns. The future gets its outcome: also what ``find`` raises, what a coroutine
    returns, and what the future of an ``async_execution`` function gets.
    """
    made: Future[Any] = Future()
    try:
        function = find()
        result = run_here(function, args, kwargs)
        if answers_later(function, result) or inspect.iscoroutine(result):
            return outcome_of(function, result, (args, kwargs))
        made.set_result(result)
    except BaseException as error:  # also SystemExit and the like: they end the call, not the worker
        made.set_exception(error)
    return made


def outcome_of(function: Callable[..., Any], result: Any, given: object) -> torch.futures.Future[Any]:
    """The future of what ``function`` will have returned: its ``result`` is a coroutine, or it ``answers_later``.
    ``given``: its arguments.
    """
    if inspect.iscoroutine(result):
        return current_worker().part(Node).server.async_results.complete(result, given)
    return future_of(function, result)


def future_of(function: Callable[..., Any], result: Any) -> torch.futures.Future[Any]:
    """The future that ``function`` has returned, since it ``answers_later``."""
    if type(result) is Later:
        return result.future
    if not isinstance(result, torch._C.Future):
        raise TypeError(
            f"{label_of(function)} is marked with async_execution, so it must return a Future, but it returned "
            f"a {type(result).__name__}"
        )
    return cast("torch.futures.Future[Any]", result)


def relay(
    source: torch.futures.Future[Any],
    target: Future[Any],
    *,
    change: Callable[[Any], Any] | None = None,
    reword: Callable[[BaseException], BaseException] | None = None,
) -> None:
    """Complete ``target`` when ``source`` is completed, unless it was completed before. ``change`` maps the value,
    ``reword`` the exception.
    """

    def settle(done: torch.futures.Future[Any]) -> None:
        if target.done():
            return
        error = done._failure() if isinstance(done, Future) else None
        if error is None:  # an error is not raised here: it would collect the frames of the completing thread
            try:
                value = done.value() if change is None else change(done.value())
            except BaseException as raised:
                error = raised
        if error is None:
            target.set_result(value)
        else:
            target.set_exception(error if reword is None else reword(error))

    source.add_done_callback(settle)
