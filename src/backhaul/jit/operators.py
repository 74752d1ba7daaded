"""The operators that stand in graphs, and what they do."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from backhaul._autograd import api as autograd
from backhaul._rpc.futures import Future
from backhaul._worker.worker import current_worker
from backhaul.jit import references, torch_compiler
from backhaul.jit.names import Names
from backhaul.jit.references import itself
from backhaul.jit.results import key_of, settled, take_as, typed

names = Names()

_library = torch.library.Library("backhaul", "DEF")


def _define(schema: str, kernel: Any) -> None:
    # Conservative: these act on more than their arguments, so none may be left out, moved or merged.
    name = _library.define(schema, alias_analysis="CONSERVATIVE")
    _library.impl(name.partition("::")[2] or name, kernel, "CompositeImplicitAutograd")


def _call(  # noqa: PLR0917 (in the order of the operators)
    make: Callable[..., Any], to: Any, function: str, args: Any, kwargs: Any, timeout: float
) -> tuple[Any, torch_compiler.Type]:
    """Make a call; returns what came of it and the type of its result."""
    found = torch_compiler.find_function(function)
    if found is None:
        raise RuntimeError(f"there is no scripted function {function} here any more")
    schema = found.schema
    _check_keywords(schema, kwargs)
    target = to.name if hasattr(to, "_fields") else to
    limit = {} if timeout < 0 else {"timeout": timeout}
    given = tuple(itself(value) for value in args)
    named = {name: itself(value) for name, value in kwargs.items()}
    made = make(target, found, given, named, **limit)
    current_worker().endpoint.flush()  # whoever waits for this in script does not tell the worker
    return made, schema.returns[0].type


def _check_keywords(schema: Any, kwargs: Mapping[str, Any]) -> None:
    known = {argument.name for argument in schema.arguments}
    for name in kwargs:
        if name not in known:
            raise RuntimeError(f"Unknown keyword argument '{name}' for {schema.name}. Schema: {schema}")


def rpc_sync(api: str, to: Any, function: str, args: Any, kwargs: Any, timeout: float) -> Any:  # noqa: PLR0917 (likewise)
    """Calls; a future for ``results.converter``."""
    future, _ = _call(names.apis[api].start, to, function, args, kwargs, timeout)
    return settled(future)


def rpc_async(api: str, to: Any, function: str, args: Any, kwargs: Any, timeout: float) -> Any:  # noqa: PLR0917 (likewise)
    """Calls; a future."""
    future, kind = _call(names.apis[api].start, to, function, args, kwargs, timeout)
    return typed(future, key_of(kind))


def remote(api: str, to: Any, function: str, args: Any, kwargs: Any, timeout: float) -> Any:  # noqa: PLR0917 (likewise)
    """Calls; a future, done already, of a reference to the result, which stays there."""
    made, _ = _call(names.apis[api].remote, to, function, args, kwargs, timeout)
    future: Future[Any] = Future()
    future.set_result(made)
    return settled(future)


def backward(context: int, roots: list[torch.Tensor], retain_graph: bool = False) -> None:
    """See ``backhaul.backward``."""
    autograd.backward(context, roots, retain_graph=retain_graph)


def get_gradients(context: int) -> dict[torch.Tensor, torch.Tensor]:
    """See ``backhaul.get_gradients``."""
    return autograd.get_gradients(context)


_CALL = "(str api, Any to, str function, Any args, Any kwargs, float timeout)"
_define(f"rpc_sync{_CALL} -> Future(Any)", rpc_sync)
_define(f"rpc_async{_CALL} -> Future(Any)", rpc_async)
_define(f"remote{_CALL} -> Future(Any)", remote)
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
