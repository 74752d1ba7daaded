"""Marks that keep ``torch.compile`` from tracing into Backhaul. Imports nothing of Backhaul, and not the compiler,
which takes seconds to import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

F = TypeVar("F", bound=Callable[..., Any])


def _find_skip(called: str) -> Callable[[Any], None]:
    """Find the function that makes the compiler skip the frames of some code. ``called``: what it does with the frames
    of everything that this code calls.

    Some versions of torch have no such function. They trace into the functions that a marked function calls, if code
    that is not compiled calls the marked function.
    """
    try:
        from torch._C._dynamo import eval_frame

        actions = eval_frame._FrameAction
        skip = eval_frame._FrameExecStrategy(actions.SKIP, getattr(actions, called))
        mark: Callable[..., None] = eval_frame.set_code_exec_strategy
    except (ImportError, AttributeError):
        return lambda code: None
    return lambda code: mark(code, skip)


_skip = _find_skip("SKIP")
_skip_alone = _find_skip("DEFAULT")


def not_compiled(function: F) -> F:
    """Mark a function that the compiler does not compile. What the function calls may be compiled."""
    marked: Any = function
    _skip_alone(marked.__code__)
    return function


_REASON = "it talks to other workers, which no graph can contain; use backhaul.remote_op for calls inside a graph"


@overload
def graph_break(function: F) -> F: ...
@overload
def graph_break(function: str) -> Callable[[F], F]: ...


def graph_break(function: F | str) -> F | Callable[[F], F]:
    """Mark a function that breaks the graph. The compiler compiles the code before the call and the code after it, and
    the call itself runs uncompiled.

    The mark does the same as ``torch.compiler.disable``, but adds no wrapper to each call: tracing looks only for the
    mark, and frames are skipped by their code.

    Args:
        function: The function to mark. Or a reason: then this returns a decorator, and the compiler gives that reason
            where the graph must not break.
    """
    if isinstance(function, str):
        return lambda marked: _mark(marked, function)
    return _mark(function, _REASON)


def _mark(function: F, reason: str) -> F:
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = reason
    _skip(marked.__code__)
    return function
