"""PyTorch's own engine, and all of its private interfaces that we use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge
from torch.autograd.variable import Variable

Node = Any  # torch.autograd.graph.Node, as far as Python sees it

LeafNode: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
"""The class of accumulation nodes; a node's ``variable`` is its leaf."""

_engine: Any = Variable._execution_engine


def run_engine(
    edges: Sequence[GradientEdge],
    seeds: Sequence[torch.Tensor],
    wanted: Sequence[torch.Tensor | GradientEdge],
    *,
    retain: bool,
    create: bool,
    accumulate: bool = False,
) -> Sequence[torch.Tensor | None]:
    """Run the engine from ``edges`` as far as ``wanted``; return their gradients, or add them to their ``.grad``.

    What ``torch.autograd.grad`` and ``backward`` do, at half the cost: they check at length what is known here.
    """
    found: Sequence[torch.Tensor | None] = _engine.run_backward(
        tuple(edges),
        tuple(seeds),
        retain,
        create,
        tuple(wanted),
        allow_unreachable=True,
        accumulate_grad=accumulate,
    )
    return found


def hooks_of(register: Callable[..., Any]) -> int:
    """How many hooks a node has, of those that ``register`` registers; there is no other way to ask."""
    handle = register(_nothing)
    hooks = handle.hooks_dict_ref()
    handle.remove()
    return len(hooks) if hooks is not None else 0


def _nothing(*_: object) -> None:
    """A hook that is never called."""


def is_own(grad: torch.Tensor) -> bool:
    """Whether nobody else sees the memory of ``grad``, so that it can be kept and changed in place."""
    if grad.layout is not torch.strided:
        return True
    if not grad.is_contiguous() and 0 in grad.stride():
        return False  # expanded: elements share memory
    # One for the tensor, one for the storage that is looked at here.
    return torch._C._storage_Use_Count(grad.untyped_storage()._cdata) <= 2


class ThreadState:
    """A value of the thread-local state of ATen: it follows into the threads of the engine."""

    __slots__ = ("_key",)

    def __init__(self, key: str) -> None:
        self._key = key

    def get(self) -> Any:
        """The value here, or None."""
        return torch._C._get_obj_in_tls(self._key) if torch._C._is_key_in_tls(self._key) else None

    def set(self, value: Any) -> None:
        """Set the value here."""
        torch._C._stash_obj_in_tls(self._key, value)
