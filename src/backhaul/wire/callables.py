"""Functions by name: how a callable that both workers can import is told to the other.

``name_of`` gives ``"module:qualname"`` for what can be found again under that name, else None (then the callable
travels by value, see ``codec``); ``resolve`` finds it. Names are how trust is kept narrow: a name runs only
what the worker already has.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from backhaul.errors import FunctionNotFoundError

SCRIPT = "torchscript"
"""Module part of the name of a scripted function, which lives in a compilation unit, not in a module."""


_builtins: dict[Any, str] = {}
"""Names of functions in C that belong to no object: they stay where they are."""


def label_of(function: Any) -> str:
    """What to call ``function`` in messages to people."""
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None)
    if isinstance(name, str):
        if name.isidentifier():
            return name
        return name.rpartition("<locals>.")[2].removeprefix("_VariableFunctionsClass.")  # where torch keeps torch.add
    return function if isinstance(function, str) else type(function).__name__


def name_of(function: Any, *, main_shared: bool = False) -> str | None:
    """The name under which the other worker finds ``function``, or None.

    Args:
        function: Any callable.
        main_shared: Whether the other worker runs the same program, so that ``__main__`` means the same there.
    """
    name = _search(function)
    return None if name is None or (not main_shared and name.startswith("__main__:")) else name


def _search(function: Any) -> str | None:
    kind = type(function)
    if kind is types.FunctionType:
        module, qualname = function.__module__, function.__qualname__
        if getattr(sys.modules.get(module), qualname, None) is function and qualname.isidentifier():
            return f"{module}:{qualname}"
    elif kind is types.BuiltinFunctionType:
        name = _builtins.get(function)
        if name is not None:
            return name
        name = _look_for(function)
        if name is not None and (function.__self__ is None or isinstance(function.__self__, types.ModuleType)):
            _builtins[function] = name
        return name
    return _look_for(function)


def _look_for(function: Any) -> str | None:
    if isinstance(function, torch.jit.ScriptFunction):
        return f"{SCRIPT}:{torch._jit_internal._qualified_name(function)}"
    if isinstance(function, torch._ops.OpOverload):
        return f"torch:ops.{function._schema.name.replace('::', '.')}.{function._overloadname}"
    if isinstance(function, torch._ops.OpOverloadPacket):
        return f"torch:ops.{function._qualified_op_name.replace('::', '.')}"
    qualname = getattr(function, "__qualname__", None)
    if not isinstance(qualname, str) or "<" in qualname:
        return None
    owner = getattr(function, "__objclass__", None)  # a method of a C type
    bound = getattr(function, "__self__", None)
    if owner is None and isinstance(bound, type):  # a class method
        owner = bound
    elif bound is None and isinstance(function, types.BuiltinFunctionType):  # a static method of a C type?
        reduced = function.__reduce__()
        if isinstance(reduced, tuple) and reduced[0] is getattr and isinstance(reduced[1][0], type):
            owner = reduced[1][0]
    if owner is not None:
        module, qualname = owner.__module__, f"{owner.__qualname__}.{function.__name__}"
    else:
        module = getattr(function, "__module__", None)
    if not isinstance(module, str):
        return None
    try:
        found: Any = sys.modules[module]
        for step in qualname.split("."):
            found = getattr(found, step)
    except (KeyError, AttributeError):
        return None
    return f"{module}:{qualname}" if found == function else None


def resolve(name: str) -> Callable[..., Any]:
    """Find what ``name_of`` named. Raises ``FunctionNotFoundError``."""
    module, _, qualname = name.partition(":")
    try:
        if module == SCRIPT:
            function = torch.jit._state._python_cu.find_function(qualname)
            if function is None:
                raise AttributeError("no function of that name has been scripted here")
        else:
            found: Any = sys.modules.get(module) or importlib.import_module(module)
            for step in qualname.split("."):
                found = getattr(found, step)
            function = found
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise FunctionNotFoundError(f"no function {name!r} here: {error}", function=name) from error
    if not callable(function):
        raise FunctionNotFoundError(f"{name!r} is a {type(function).__name__}, not callable", function=name)
    return function
