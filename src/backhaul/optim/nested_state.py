"""The state of a parameter: nested dicts, lists and tuples of tensors and numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def map_leaves(function: Callable[[tuple[Any, ...], Any], Any], value: Any, path: tuple[Any, ...] = ()) -> Any:
    """Call ``function(path, leaf)`` for each leaf of nested dicts, lists and tuples; return the results so nested."""
    if isinstance(value, dict):
        return {key: map_leaves(function, item, (*path, key)) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map_leaves(function, item, (*path, index)) for index, item in enumerate(value))
    return function(path, value)


def snapshot(state: Any) -> Any:
    """The same leaves in containers of their own."""
    return map_leaves(lambda _, value: value, state)


def is_same(one: Any, other: Any) -> bool:
    """Whether numbers are equal and tensors are the same objects."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, torch.Tensor):
        return one is other
    return bool(one == other)
