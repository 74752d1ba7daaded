"""Nested values <-> arrays of scalars, for peers that trust each other: most calls of programs need no pickle.

The form is that of ``plain``, with tags of its own for functions, methods, dataclasses, and types of higher layers such
as references. Anything else is left to pickle, and so is a message in which one object comes twice: pickle keeps it one
object. ``take_apart`` and ``put_together`` serve the native core too.
"""

from __future__ import annotations

import copyreg
import enum
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle.cloudpickle
import torch

from backhaul._wire.callables import name_of, resolve
from backhaul._wire.pickling import builders, reducers
from backhaul._wire.plain import SCALARS, Tag
from backhaul.errors import ProtocolError

MAX_VALUES = 512
"""A message with more values is left to pickle, which is written in C. The native core has the same limit."""

MAX_DEPTH = 32


class NestedTag(enum.IntEnum):
    """What an array means, besides ``Tag``."""

    FUNCTION = 13  # a function or class: its name
    METHOD = 14  # a bound method: its object and its name
    MADE = 15  # what a function makes: the function's name and arguments
    DATA = 16  # a dataclass: its name, then names and values of its fields in turn


class NotNestedError(Exception):
    """The values do not have this form. They are pickled instead."""


_TENSOR, _LIST, _TUPLE, _DICT = int(Tag.TENSOR), int(Tag.LIST), int(Tag.TUPLE), int(Tag.DICT)
_FUNCTION, _METHOD, _MADE, _DATA = map(int, NestedTag)
_FUNCTION_TYPES = frozenset((types.FunctionType, types.BuiltinFunctionType, type))
_by_value: set[Any] = cloudpickle.cloudpickle._PICKLE_BY_VALUE_MODULES  # modules that users send by value


def take_apart(value: Any, main_shared: bool, parcels: list[Any]) -> tuple[Any, ...] | None:
    """The tag and the parts of a value that is no scalar, tensor, list, tuple or dict; None if it is pickled."""
    kind = type(value)
    if (reducer := reducers.get(kind)) is not None:
        reduced = reducer(value, parcels)
        if type(reduced) is not tuple or len(reduced) != 2:
            return None
        make, parts = reduced
        return (_MADE, f"{make.__module__}:{make.__qualname__}", *parts)
    if kind in _FUNCTION_TYPES:
        name = None if _by_value else name_of(value, main_shared=main_shared)
        return None if name is None else (_FUNCTION, name)
    if kind is types.MethodType:
        owner, name = value.__self__, value.__name__
        return (_METHOD, owner, name) if getattr(owner, name, None) == value else None
    if (take := _simple.get(kind)) is not None:
        return take(value)
    cls: Any = kind
    if not _by_value and (name := _data_class(cls)) is not None and (main_shared or not name.startswith("__main__:")):
        return (_DATA, name, *(part for field in value.__dict__.items() for part in field))
    return None


def _take_set(value: set[Any] | frozenset[Any]) -> tuple[Any, ...]:
    return (int(Tag.SET if type(value) is set else Tag.FROZENSET), *value)


_simple: dict[Any, Callable[[Any], tuple[Any, ...]]] = {
    set: _take_set,
    frozenset: _take_set,
    complex: lambda value: (int(Tag.COMPLEX), value.real, value.imag),
    torch.Size: lambda value: (int(Tag.SIZE), *value),
    torch.dtype: lambda value: (int(Tag.DTYPE), str(value).removeprefix("torch.")),
    torch.device: lambda value: (int(Tag.DEVICE), value.type, value.index),
}


_OF_EVERY_OBJECT = (
    "__reduce_ex__",
    "__reduce__",
    "__getstate__",
    "__setstate__",
    "__getnewargs__",
    "__getnewargs_ex__",
    "__new__",
)


@functools.lru_cache(1024)
def _data_class(kind: Any) -> str | None:
    """The name of a dataclass whose objects are nothing but their ``__dict__``; else None."""
    plain = (
        "__dataclass_fields__" in vars(kind)
        and type(kind) is type
        and all(getattr(kind, name, None) is getattr(object, name, None) for name in _OF_EVERY_OBJECT)
        and kind.__dictoffset__ != 0
        and not any("__slots__" in vars(each) for each in kind.__mro__)
        and kind not in copyreg.dispatch_table
    )
    return name_of(kind, main_shared=True) if plain else None


class NestedWriter:
    """Flattens the values of one message.

    Attributes:
        tensors: The tensors of the message.
        parcels: What reducers of higher layers have collected.
    """

    __slots__ = ("_count", "_kept", "_main_shared", "_seen", "parcels", "tensors")

    def __init__(self, main_shared: bool) -> None:
        self.tensors: list[torch.Tensor] = []
        self.parcels: list[Any] = []
        self._main_shared = main_shared
        self._count = 0
        self._seen: set[int] = set()
        self._kept: list[Any] = []  # parts that exist only here: no other object may get their id

    def flatten(self, value: Any, depth: int = 0) -> Any:
        """Encode a value. Raises ``NotNestedError``."""
        self._count += 1
        if self._count > MAX_VALUES or depth > MAX_DEPTH:
            raise NotNestedError
        kind = type(value)
        if kind in SCALARS:
            if kind is int and not -(1 << 63) <= value < 1 << 64:
                raise NotNestedError
            if kind is str and not value.isascii():
                raise NotNestedError
            return value
        if kind is torch.Tensor:
            return [_TENSOR, self._index_of(value)]
        if kind is tuple:
            return [_TUPLE, *(self.flatten(item, depth + 1) for item in value)]
        if kind is list:
            self._check_first(value)
            return [_LIST, *(self.flatten(item, depth + 1) for item in value)]
        if kind is dict:
            self._check_first(value)
            return [_DICT, *(self.flatten(part, depth + 1) for item in value.items() for part in item)]
        parts = take_apart(value, self._main_shared, self.parcels)
        if parts is None:
            raise NotNestedError
        self._check_first(value)
        self._kept.append(parts)
        self._count += 1
        return [parts[0], *(self.flatten(part, depth + 1) for part in parts[1:])]

    def _check_first(self, value: Any) -> None:
        if id(value) in self._seen:
            raise NotNestedError
        self._seen.add(id(value))

    def _index_of(self, tensor: torch.Tensor) -> int:
        if tensor.__dict__:
            raise NotNestedError
        for index, each in enumerate(self.tensors):
            if each is tensor:
                return index
        self.tensors.append(tensor)
        return len(self.tensors) - 1


def restore(flat: Any, tensors: Sequence[torch.Tensor], worker: object) -> Any:
    """Decode one value for the worker ``worker``. Raises ``ProtocolError`` if it is not in this form."""
    kind = type(flat)
    if kind is not list:
        return flat
    if not flat or type(flat[0]) is not int:
        raise ProtocolError("malformed nested values: an array without a tag")
    tag = flat[0]
    if tag == _TENSOR:
        if len(flat) != 2 or type(flat[1]) is not int or not 0 <= flat[1] < len(tensors):
            raise ProtocolError("malformed nested values: there is no such tensor")
        return tensors[flat[1]]
    items = [restore(item, tensors, worker) for item in flat[1:]]
    if tag == _LIST:
        return items
    if tag == _TUPLE:
        return tuple(items)
    if tag == _DICT:
        return dict(zip(items[::2], items[1::2], strict=True))
    return put_together(tag, items, worker)


def put_together(tag: int, items: list[Any], worker: object) -> Any:
    """Undo ``take_apart`` for the worker ``worker``."""
    if tag == _MADE:
        module, _, name = items[0].partition(":")
        builder = builders.get((module, name))
        return resolve(items[0])(*items[1:]) if builder is None else builder(worker, *items[1:])
    if tag == _FUNCTION:
        return resolve(*items)
    if tag == _METHOD:
        owner, name = items
        return getattr(owner, name)
    if tag == _DATA:
        kind: Any = resolve(items[0])
        made = object.__new__(kind)
        made.__dict__.update(zip(items[1::2], items[2::2], strict=True))
        return made
    build = _BUILD.get(tag)
    if build is None:
        raise ProtocolError(f"malformed nested values: unknown tag {tag}")
    return build(items)


_BUILD: dict[int, Callable[[list[Any]], Any]] = {
    int(Tag.SET): set,
    int(Tag.FROZENSET): frozenset,
    int(Tag.COMPLEX): lambda items: complex(*items),
    int(Tag.SIZE): torch.Size,
    int(Tag.DTYPE): lambda items: getattr(torch, *items),
    int(Tag.DEVICE): lambda items: torch.device(*[item for item in items if item is not None]),
}
