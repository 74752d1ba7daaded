"""The operators that rewritten graphs call, and their implementations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from backhaul._autograd import api as autograd
from backhaul._rpc.futures import Future
from backhaul._worker.worker import current_worker
from backhaul.jit import references, torch_compiler
from backhaul.jit.names import ApiNames
from backhaul.jit.references import unwrap
from backhaul.jit.results import outcome_to_await, register_type, take_as, typed_future

api_names = ApiNames()

_library = torch.library.Library("backhaul", "DEF")


def _define(schema: str, kernel: Any) -> None:
    # Conservative: the operators act on more than their arguments, so the compiler must not drop, move or merge them.
    name = _library.define(schema, alias_analysis="CONSERVATIVE")
    _library.impl(name.partition("::")[2] or name, kernel, "CompositeImplicitAutograd")


def _call(  # noqa: PLR0917 (same order as the arguments of the operators)
    make: Callable[..., Any], to: Any, function: str, args: Any, kwargs: Any, timeout: float
) -> tuple[Any, torch_compiler.Type]:
    """Make a call; returns what ``make`` returned and the type of the call's result."""
    found = torch_compiler.find_function(function)
    if found is None:
        raise RuntimeError(
            f"worker '{current_worker().name}' has no scripted function {function} any more: keep the functions that "
            "scripts call alive"
        )
    schema = found.schema
    _check_keywords(schema, kwargs)
    target = to.name if hasattr(to, "_fields") else to
    options = {} if timeout < 0 else {"timeout": timeout}
    positional = tuple(unwrap(value) for value in args)
    keywords = {name: unwrap(value) for name, value in kwargs.items()}
    made = make(target, found, positional, keywords, **options)
    current_worker().endpoint.flush()  # a script that waits for the result does not tell the worker
    return made, schema.returns[0].type


def _check_keywords(schema: Any, kwargs: Mapping[str, Any]) -> None:
    known = {argument.name for argument in schema.arguments}
    for name in kwargs:
        if name not in known:
            raise RuntimeError(f"Unknown keyword argument '{name}' for {schema.name}. Schema: {schema}")


def rpc_sync(api: str, to: Any, function: str, args: Any, kwargs: Any, timeout: float) -> Any:  # noqa: PLR0917 (see _call)
    """Make a call; returns a future of its outcome, for ``results.converter``."""
    future, _ = _call(api_names.apis[api].start, to, function, args, kwargs, timeout)
    return outcome_to_await(future)


def rpc_async(api: str, to: Any, function: str, args: Any, kwargs: Any, timeout: float) -> Any:  # noqa: PLR0917 (see _call)
    """Make a call; returns a future of its result."""
    future, result_type = _call(api_names.apis[api].start, to, function, args, kwargs, timeout)
    return typed_future(future, register_type(result_type))


def remote(api: str, to: Any, function: str, args: Any, kwargs: Any, timeout: float) -> Any:  # noqa: PLR0917 (see _call)
    """Make a call whose result stays on the callee; returns a completed future of a reference to the result."""
    reference, _ = _call(api_names.apis[api].remote, to, function, args, kwargs, timeout)
    future: Future[Any] = Future()
    future.set_result(reference)
    return outcome_to_await(future)


def backward(context: int, roots: list[torch.Tensor], retain_graph: bool = False) -> None:
    """See ``backhaul.backward``."""
    autograd.backward(context, roots, retain_graph=retain_graph)


def get_gradients(context: int) -> dict[torch.Tensor, torch.Tensor]:
    """See ``backhaul.get_gradients``."""
    return autograd.get_gradients(context)


_CALL_ARGUMENTS = "(str api, Any to, str function, Any args, Any kwargs, float timeout)"
_define(f"rpc_sync{_CALL_ARGUMENTS} -> Future(Any)", rpc_sync)
_define(f"rpc_async{_CALL_ARGUMENTS} -> Future(Any)", rpc_async)
_define(f"remote{_CALL_ARGUMENTS} -> Future(Any)", remote)
_define("to_here(Any reference, float timeout) -> Future(Any)", references.to_here)
_define("local_value(Any reference) -> Future(Any)", references.local_value)
_define("is_owner(Any reference) -> bool", references.is_owner)
_define("owner_name(Any reference) -> str", references.owner_name)
_define("owner_id(Any reference) -> int", references.owner_id)
_define("confirmed_by_owner(Any reference) -> bool", references.confirmed_by_owner)
_define("save_reference(Any reference) -> str", references.save)
_define("load_reference(str state) -> Future(Any)", references.load)
for _kind in ("Tensor", "bool", "int", "float", "str", "Any"):
    _define(f"take_{_kind}(Any outcome) -> {_kind}", functools.partial(take_as, _kind))
_define("get_gradients(int context) -> Dict(Tensor, Tensor)", get_gradients)
_define("dist_backward(int context, Tensor[] roots, bool retain_graph=False) -> ()", backward)
