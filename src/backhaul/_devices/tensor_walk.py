"""Finds the tensors in a value of a user, and the tensors that have the memory of one. Knows no device."""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any

import torch

_MAX_DEPTH = 8  # of containers and objects around a tensor


def tensors_in(value: Any) -> Iterable[torch.Tensor]:
    """The tensors in lists, tuples, sets, dicts, and objects that have them as attributes, up to a fixed depth."""
    stack, seen = [(value, 0)], set()
    while stack:
        item, depth = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            yield item
        elif depth < _MAX_DEPTH:
            stack += [(inner, depth + 1) for inner in reversed(list(_inside(item)))]


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if isinstance(value, (type, types.ModuleType, types.FunctionType)):
        return ()
    return getattr(value, "__dict__", {}).values()


def strided_parts(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    """The strided tensors that have the memory of a tensor: itself, or the parts of a sparse one."""
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()
