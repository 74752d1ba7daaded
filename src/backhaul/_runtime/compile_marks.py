"""What ``torch.compile`` sees of Backhaul: that it cannot look inside. Imports nothing of ours, nor the compiler, which
takes seconds to import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

F = TypeVar("F", bound=Callable[..., Any])


def _find_skip() -> Callable[[Any], None]:
    """Tells the compiler to leave the frames of some code alone, and those of all that it calls. Versions of torch that
    cannot be told so trace into what our marked functions call, if they are called from code that is not compiled.
    """
    try:
        from torch._C._dynamo import eval_frame

        skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
        mark: Callable[..., None] = eval_frame.set_code_exec_strategy
    except (ImportError, AttributeError):
        return lambda code: None
    return lambda code: mark(code, skip)


_skip = _find_skip()


_REASON = "it talks to other workers, which is not an operation of a graph; backhaul.remote_op makes calls that are"


@overload
def graph_break(function: F) -> F: ...
@overload
def graph_break(function: str) -> Callable[[F], F]: ...


def graph_break(function: F | str) -> F | Callable[[F], F]:
    """Mark a function that ends the graph: a compiled function that calls it is compiled in two parts, before the call
    and after it, and the call itself runs as it is.

    The same as ``torch.compiler.disable``, without what that wraps around each call: the mark is all that tracing looks
    for, and frames are skipped by their code.

    Args:
        function: The function, or why the next one is to be marked: what the compiler says where it may not break.
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
