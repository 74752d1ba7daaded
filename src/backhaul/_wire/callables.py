"""Functions by name: how a message refers to a callable that both workers can import.

``name_of`` returns ``"module:qualname"`` if the callable can be found under that name, else None. A callable without a
name is sent by value, see ``codec``. ``resolve`` finds the callable. A name limits what a peer can do: it can only run
what the worker already has.
"""

from __future__ import annotations

import importlib
import operator
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from backhaul.errors import FunctionNotFoundError

SCRIPT = "torchscript"
"""The module part of the name of a scripted function. Such a function is in a compilation unit, not in a module."""

_CACHED_TYPES = frozenset(
    (types.FunctionType, types.BuiltinFunctionType, type)
)  # others define their own hash and equality
_MAX_CACHED_NAMES = 4096


class Named:
    """A name under which a function was found. It does not keep the function, which a reload of its module may replace.

    Attributes:
        name: ``"module:qualname"``.
        module: The module part.
        label: What to call the function in error texts.
        in_main: Whether the function is in ``__main__``.
        find: Returns the function, given its module.
    """

    __slots__ = ("find", "in_main", "label", "module", "name")

    def __init__(self, name: str, label: str) -> None:
        module, _, qualname = name.partition(":")
        self.name = name
        self.module = module
        self.label = label
        self.in_main = module == "__main__"
        self.find: Callable[[Any], Any] = operator.attrgetter(qualname)


_of_function: dict[weakref.ref[Any], Named] = {}
_of_name: dict[str, Named] = {}


def named(function: Any) -> Named | None:
    """The name of a function that can be found under it, else None."""
    if type(function) not in _CACHED_TYPES:
        name = _search(function)
        return None if name is None else Named(name, label_of(function))
    try:
        known = _of_function[weakref.ref(function)]
        if known.find(sys.modules[known.module]) == function:
            return known
    except (KeyError, AttributeError):
        pass
    name = _search(function)
    if name is None:
        return None
    known = Named(name, label_of(function))
    _of_function[weakref.ref(function, _forget)] = known
    return known


def _forget(gone: weakref.ref[Any]) -> None:
    _of_function.pop(gone, None)


def label_of(function: Any) -> str:
    """What to call ``function`` in error texts and logs."""
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None)
    if isinstance(name, str):
        if name.isidentifier():
            return name
        return name.rpartition("<locals>.")[2].removeprefix("_VariableFunctionsClass.")  # the class of torch.add
    return function if isinstance(function, str) else type(function).__name__


def name_of(function: Any, *, main_shared: bool = False) -> str | None:
    """The name under which the other worker finds ``function``, or None.

    Args:
        function: Any callable.
        main_shared: Whether the other worker runs the same program, so that its ``__main__`` is the same.
    """
    known = named(function)
    return None if known is None or (known.in_main and not main_shared) else known.name


def _search(function: Any) -> str | None:
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
    """Find the function of a name that ``name_of`` returned. Raises ``FunctionNotFoundError``."""
    try:
        known = _of_name[name]
        function: Callable[..., Any] = known.find(sys.modules[known.module])
        if callable(function):
            return function
    except (KeyError, AttributeError):
        pass  # the name is not in the cache, or the function is gone
    function = _resolve(name)
    if len(_of_name) < _MAX_CACHED_NAMES and not name.startswith(f"{SCRIPT}:"):
        _of_name[name] = Named(name, "")
    return function


def _resolve(name: str) -> Callable[..., Any]:
    module, _, qualname = name.partition(":")
    try:
        if module == SCRIPT:
            function = torch.jit._state._python_cu.find_function(qualname)
            if function is None:
                raise AttributeError("this worker has not scripted a function of that name")
        else:
            found: Any = sys.modules.get(module) or importlib.import_module(module)
            for step in qualname.split("."):
                found = getattr(found, step)
            function = found
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise FunctionNotFoundError(
            f"this worker has no function {name!r} ({error}); import or define it here too", function=name
        ) from error
    if not callable(function):
        raise FunctionNotFoundError(
            f"{name!r} is a {type(function).__name__} on this worker and is not callable", function=name
        )
    return function
