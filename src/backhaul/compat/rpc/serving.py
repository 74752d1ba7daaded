"""What runs at the callee. Calls go through here so that errors are reported there as in the reference."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.jit._builtins import _find_builtin

from backhaul._rpc import arguments
from backhaul._rpc.calls.async_results import ASYNC_MARK, async_execution
from backhaul._wire.callables import SCRIPT, name_of, resolve
from backhaul.compat.rpc import agent, internal, profiling
from backhaul.compat.rpc.containers import share


def outgoing(
    pickler: Any,
    function: Callable[..., Any],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    *,
    stays: bool = False,
) -> tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]:
    """The call to make for a call of ``function``: function, arguments, keyword arguments.

    Args:
        pickler: Pickles the call, if it is not the default.
        function: What is called.
        args: With what.
        kwargs: Likewise.
        stays: Whether the result stays where it is made.
    """
    if not callable(function):
        raise TypeError("function should be callable.")
    given, named = positional(args), kwargs or {}
    if isinstance(function, torch.jit.ScriptFunction):
        _check_count(function, given)
    later = bool(getattr(function, ASYNC_MARK, False)) or _returns_future(function)
    if pickler is not internal._internal_rpc_pickler:
        pickled = pickler.serialize(internal.PythonUDF(function, given, dict(named)))
        return (answer_pickled_later if later else answer_pickled), pickled, {}
    target = name_of(function) or function
    made_in_script = stays and isinstance(function, torch.jit.ScriptFunction)
    answering = answer_later if later else answer_in_script if made_in_script else answer
    return answering, (target, *given), named


def positional(args: Any) -> tuple[Any, ...]:
    """``args`` as a tuple. The reference takes anything that can be iterated. A tensor is refused all the same: the
    reference drops it, splits it or fails, as its elements are.
    """
    if isinstance(args, torch.Tensor):
        return arguments.positional(args)
    return tuple(args or ())


def _returns_future(function: Any) -> bool:
    """Whether it is a scripted function that answers later; scripting loses the mark."""
    if not isinstance(function, torch.jit.ScriptFunction):
        return False
    return isinstance(_returned(function), torch._C.FutureType)


def _returned(function: Any) -> Any:
    """The type that a scripted function returns."""
    return function.schema.returns[0].type


def _check_count(function: Any, args: tuple[Any, ...]) -> None:
    """The callee finds a function that takes more than its share without a word."""
    most, given = len(function.schema.arguments), len(args)
    if given > most:
        raise RuntimeError(f"{function.name}() expected at most {most} argument(s) but received {given} argument(s)")


def answer(target: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Run a call."""
    agent.wait_for_current()
    agent.note_interpreter_wait(_wait_for_interpreter)
    try:
        function = resolve(target) if isinstance(target, str) else target
        try:
            return profiling.observed(function, *args, **kwargs)
        except TypeError as error:
            if _find_builtin(function) is None:
                raise
            raise RuntimeError(
                f"Overloaded torch operator invoked from Python failed to match any schema: {error}"
            ) from error
    except Exception as error:
        print(f"On {agent.current().get_worker_info()}:\n{error!r}\n{traceback.format_exc()}", file=sys.stderr)
        raise


def answer_in_script(target: str, /, *args: Any, **kwargs: Any) -> Any:
    """Run a call of a scripted function whose result stays here."""
    return share(answer(target, *args, **kwargs), _returned(resolve(target)))


@async_execution
def answer_later(target: Any, /, *args: Any, **kwargs: Any) -> torch.futures.Future[Any]:
    """Run a call whose result is a future."""
    result: torch.futures.Future[Any] = answer(target, *args, **kwargs)
    if not isinstance(result, torch._C.Future):
        if isinstance(target, str) and target.startswith(SCRIPT):
            kind = type(result).__name__
            raise RuntimeError(f"Async functions must return an IValue of Future type, but got {kind}")
        raise RuntimeError(
            "Functions decorated with @rpc.async_function must return a torch.futures.Future object, "
            f"but got {type(result)}"
        )
    return result


def answer_pickled(data: bytes, tensors: Sequence[torch.Tensor]) -> Any:
    """Run a call that came through a pickler of the user's."""
    call = internal.deserialize(data, tensors)
    return answer(call.func, *call.args, **(call.kwargs or {}))


@async_execution
def answer_pickled_later(data: bytes, tensors: Sequence[torch.Tensor]) -> torch.futures.Future[Any]:
    """Likewise, and its result is a future."""
    call = internal.deserialize(data, tensors)
    return answer_later(call.func, *call.args, **(call.kwargs or {}))


def _wait_for_interpreter() -> float:
    begin = time.perf_counter()
    time.sleep(0)  # lets the interpreter go and takes it again
    return time.perf_counter() - begin
