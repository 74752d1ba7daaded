"""Refuses functions that are sent by value and keep state in globals.

Such a function takes a copy of its globals with each message. What it changes there is lost, and a tensor or a module
is a different one in each call. The following counts as state of a function and of the functions defined inside it:

- A global that it assigns or deletes: ``global count; count += 1``.
- A container, an object, or a class or function that is sent by value too, if the code changes its content, as in
  ``seen.append(x)``, ``table[key] = x``, ``config.rate = x``, ``Total.sum += x``; also through a local name.
- An object of a class that is sent by value too, if the code calls a method that changes an attribute of the object.
- An optimizer, an iterator, or a random number generator that it reads.
- A tensor or a module that it reads, also inside a container or an object, if the function is defined at the top level
  of its module or in a class there. In a script such a function is sent by name and uses the callee's own tensor. A
  lambda or a local function takes copies in a script too, and gradients come back to what was copied.

Functions, classes and modules, numbers and strings, and containers that are only read are not state. Functions of
``__main__`` that a function calls are sent with it, and are checked then.

This module looks at values of globals. ``bytecode`` says what the code does with them.
"""

from __future__ import annotations

import collections.abc
import functools
import inspect
import io
import itertools
import logging
import random
import sys
import types
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from backhaul._wire.bytecode import CHANGING_METHODS, ITEM, AccessPath, uses_of, uses_of_self
from backhaul._wire.callables import label_of
from backhaul.errors import SerializationError

_MAX_PARTS = 1000  # parts of a value that are searched for state
_MAX_CALL_DEPTH = 3  # methods that call each other
_PICKLE_METHODS = ("__reduce__", "__reduce_ex__", "__getstate__")  # a class that overrides one decides what is sent
_MUTABLE = (collections.abc.MutableSequence, collections.abc.MutableMapping, collections.abc.MutableSet)


def refuse_state(function: types.FunctionType, *, by_value: Callable[[Any], bool], references: Container[type]) -> None:
    """Raise ``SerializationError`` if ``function``, which is sent by value, keeps state in globals.

    Args:
        function: The function.
        by_value: Whether a class or function is sent by value too.
        references: Types whose values are sent as references, not as copies.
    """
    space = function.__globals__
    if function.__module__ != space.get("__name__"):
        return  # a decorator's wrapper, whose globals are those of the decorator's module
    uses, local = uses_of(function), "<" in function.__qualname__
    for name in sorted(uses.assigns):
        raise _refusal(function, f"assigns the global '{name}'", _CHANGED, name)
    for name in sorted(uses.reads & space.keys()):
        value = space[name]
        if type(value) in references:
            continue
        changed = name in uses.changes or any(
            path[0] == name and _changes(value, path[1:], method, by_value) for path, method in uses.calls
        )
        if changed and _is_copied(value, by_value):
            raise _refusal(function, f"changes the global '{name}'", _CHANGED, name)
        found = _state_in(value, by_value, references)
        if found is not None and not (local and found.recoverable):
            raise _refusal(function, f"uses the global '{name}', {found.what}", _USED, name)


_CHANGED = "and change only the copy", " and return the changed value"
_USED = "whose gradients and changes would be lost", ""


def _refusal(function: types.FunctionType, what: str, effect: tuple[str, str], name: str) -> SerializationError:
    label, (lost, returned) = label_of(function), effect
    if "<" in function.__qualname__:
        why = "because it is a lambda or a local function"
    elif function.__module__ == "__main__":
        why = "because the other worker has another __main__"
    else:
        why = "because the other worker cannot import it"
    return SerializationError(
        f"{label} {what}. {label} is sent by value, {why}. Each call would send a copy of '{name}', {lost}. "
        f"Put {label} and '{name}' into a module that both workers can import, "
        f"or pass '{name}' as an argument{returned}"
    )


@dataclass(frozen=True, slots=True)
class _Found:
    """State that a value is or holds.

    Attributes:
        what: A description for the error text.
        recoverable: Whether gradients come back from a copy of it.
    """

    what: str
    recoverable: bool


def _is_copied(value: Any, by_value: Callable[[Any], bool]) -> bool:
    """Whether a function takes a copy of ``value`` with it, and not only its name."""
    if isinstance(value, (type, types.FunctionType)):
        return by_value(value)
    return not isinstance(value, (types.ModuleType, logging.Logger))


def _changes(value: Any, path: AccessPath, method: str, by_value: Callable[[Any], bool], depth: int = 0) -> bool:
    """Whether a call of ``method`` on what ``path`` leads to, starting at ``value``, changes it."""
    for step in path:
        if step == ITEM:
            return method in CHANGING_METHODS  # the item itself is unknown
        value = inspect.getattr_static(value, step, None)
    if isinstance(value, torch.Tensor):
        return method.endswith("_")
    if method in CHANGING_METHODS and isinstance(value, _MUTABLE):
        return True
    function = inspect.getattr_static(type(value), method, None)
    if depth > _MAX_CALL_DEPTH or not (isinstance(function, types.FunctionType) and by_value(type(value))):
        return False
    changed, calls = uses_of_self(function.__code__)
    return changed or any(_changes(value, inner, name, by_value, depth + 1) for inner, name in calls)


def _state_in(value: Any, by_value: Callable[[Any], bool], references: Container[type]) -> _Found | None:
    """Find state that the code uses as it would use a constant, so that bytecode does not show it."""
    kind = type(value)
    if isinstance(value, (random.Random, torch.Generator, *_numpy_generators())):
        return _Found("a random number generator", recoverable=False)
    if isinstance(value, collections.abc.Iterator) and not isinstance(value, io.IOBase):
        return _Found(f"an iterator ({kind.__name__})", recoverable=False)
    seen, waiting = {id(value)}, collections.deque((value,))
    while waiting:
        part = waiting.popleft()
        found = _state_of(part, references)
        if found is not None:
            return found if part is value else _Found(f"a {kind.__name__} that holds {found.what}", found.recoverable)
        if type(part) not in references and _is_copied(part, by_value):
            for item in itertools.islice(_parts(part), _MAX_PARTS - len(seen)):
                if id(item) not in seen:
                    seen.add(id(item))
                    waiting.append(item)
    return None


def _state_of(value: Any, references: Container[type]) -> _Found | None:
    kind = type(value)
    if kind in references:
        return None
    if isinstance(value, torch.Tensor):
        return _Found("a tensor", recoverable=True)
    if isinstance(value, torch.nn.Module) and _has_tensors(value):
        return _Found(f"a module ({kind.__name__})", recoverable=True)
    if isinstance(value, torch.optim.Optimizer):
        return _Found(f"an optimizer ({kind.__name__})", recoverable=False)
    return None


def _has_tensors(module: torch.nn.Module) -> bool:
    """Whether a module has parameters or buffers. An activation or a loss function usually has none."""
    return next(itertools.chain(module.parameters(), module.buffers()), None) is not None


def _parts(value: Any) -> Iterator[Any]:
    """What a container, an object or a class holds, if a copy of it includes a copy of that."""
    if isinstance(value, dict):
        yield from list(value.values())
    elif isinstance(value, type):
        yield from list(vars(value).values())
    elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        yield from list(value)
    elif isinstance(value, types.MethodType):
        yield value.__self__
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.SimpleNamespace) or all(
        getattr(type(value), name) is getattr(object, name) for name in _PICKLE_METHODS
    ):
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            yield from list(attributes.values())


def _numpy_generators() -> tuple[type, ...]:
    module = sys.modules.get("numpy.random")
    return () if module is None else (module.Generator, module.RandomState)
