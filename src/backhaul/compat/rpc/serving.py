"""The functions that run on the callee. Every call goes through one of them, so that errors are reported as in the
reference.

``build_call`` chooses the function on the caller.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.jit._builtins import _find_builtin

from backhaul._rpc import arguments as rpc_arguments
from backhaul._rpc.calls.async_results import ASYNC_MARK, async_execution
from backhaul._wire.callables import SCRIPT, name_of, resolve
from backhaul.compat.rpc import agent, internal, profiling
from backhaul.compat.rpc.containers import share


def build_call(
    pickler: Any,
    function: Callable[..., Any],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    *,
    keep_result: bool = False,
) -> tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]:
    """The call to make in place of a call of ``function``: function, arguments, keyword arguments.

    Args:
        pickler: Pickles the call, if it is not the default pickler.
        function: The function that the user calls.
        args: Its arguments.
        kwargs: Its keyword arguments.
        keep_result: Whether the result stays on the callee.
    """
    if not callable(function):
        raise TypeError("function should be callable.")
    arguments, keywords = positional(args), kwargs or {}
    if isinstance(function, torch.jit.ScriptFunction):
        _check_count(function, arguments)
    is_async = bool(getattr(function, ASYNC_MARK, False)) or _returns_future(function)
    if pickler is not internal._internal_rpc_pickler:
        pickled = pickler.serialize(internal.PythonUDF(function, arguments, dict(keywords)))
        return (serve_pickled_async if is_async else serve_pickled), pickled, {}
    target = name_of(function) or function
    keep_script_result = keep_result and isinstance(function, torch.jit.ScriptFunction)
    serving_function = serve_async if is_async else serve_and_share if keep_script_result else serve
    return serving_function, (target, *arguments), keywords


def positional(args: Any) -> tuple[Any, ...]:
    """``args`` as a tuple. As in the reference, any iterable will do.

    A tensor is not accepted. The reference drops it, splits it or fails, depending on its elements.
    """
    if isinstance(args, torch.Tensor):
        return rpc_arguments.positional(args)
    return tuple(args or ())


def _returns_future(function: Any) -> bool:
    """Whether a scripted function returns a future. Scripting removes the mark of ``async_execution``."""
    if not isinstance(function, torch.jit.ScriptFunction):
        return False
    return isinstance(_result_type(function), torch._C.FutureType)


def _result_type(function: Any) -> Any:
    """The type that a scripted function returns."""
    return function.schema.returns[0].type


def _check_count(function: Any, args: tuple[Any, ...]) -> None:
    """Raise an error for too many arguments here, because the callee's function accepts them silently."""
    most, count = len(function.schema.arguments), len(args)
    if count > most:
        raise RuntimeError(f"{function.name}() expected at most {most} argument(s) but received {count} argument(s)")


def serve(target: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Run a call."""
    agent.before_handler(_measure_gil_wait)
    try:
        function = resolve(target) if isinstance(target, str) else target
        try:
            return profiling.call_profiled(function, *args, **kwargs)
        except TypeError as error:
            if _find_builtin(function) is None:
                raise
            raise RuntimeError(
                f"Overloaded torch operator invoked from Python failed to match any schema: {error}"
            ) from error
    except Exception as error:
        print(f"On {agent.current().get_worker_info()}:\n{error!r}\n{traceback.format_exc()}", file=sys.stderr)
        raise


def serve_and_share(target: str, /, *args: Any, **kwargs: Any) -> Any:
    """Run a call of a scripted function whose result stays on this worker, where other scripts share it."""
    return share(serve(target, *args, **kwargs), _result_type(resolve(target)))


@async_execution
def serve_async(target: Any, /, *args: Any, **kwargs: Any) -> torch.futures.Future[Any]:
    """Run a call whose function returns a future."""
    result: torch.futures.Future[Any] = serve(target, *args, **kwargs)
    if not isinstance(result, torch._C.Future):
        if isinstance(target, str) and target.startswith(SCRIPT):
            kind = type(result).__name__
            raise RuntimeError(f"Async functions must return an IValue of Future type, but got {kind}")
        raise RuntimeError(
            "Functions decorated with @rpc.async_function must return a torch.futures.Future object, "
            f"but got {type(result)}"
        )
    return result


def serve_pickled(data: bytes, tensors: Sequence[torch.Tensor]) -> Any:
    """Run a call that the user's pickler has pickled."""
    call = internal.deserialize(data, tensors)
    return serve(call.func, *call.args, **(call.kwargs or {}))


@async_execution
def serve_pickled_async(data: bytes, tensors: Sequence[torch.Tensor]) -> torch.futures.Future[Any]:
    """Run a call that the user's pickler has pickled and whose function returns a future."""
    call = internal.deserialize(data, tensors)
    return serve_async(call.func, *call.args, **(call.kwargs or {}))


def _measure_gil_wait() -> float:
    begin = time.perf_counter()
    time.sleep(0)  # releases the global interpreter lock and acquires it again
    return time.perf_counter() - begin
