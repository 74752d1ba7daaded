"""Whether values keep the graph behind them, and values without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from backhaul._worker.worker import Worker


def keeps_history(worker: Worker) -> bool:
    """Whether a value that is made or fetched now keeps the graph behind it, as the result of an operation does."""
    return torch.is_grad_enabled() or worker.options.follows_reference


def without_history(value: Any) -> Any:
    """A value that was made under ``no_grad``: its tensors, alone or in containers, are leaves or have no graph."""
    return _replaced(value, lambda tensor: tensor if tensor.is_leaf else tensor.detach())


def detached(value: Any) -> Any:
    """A value of this worker as other workers get it under ``no_grad``, but in the same memory."""
    return _replaced(value, _detach)


def _replaced(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A value with its tensors changed; the value itself if none of its tensors changes."""
    parts, form = tree_flatten(value)
    changed = [change(part) if isinstance(part, torch.Tensor) else part for part in parts]
    same = all(old is new for old, new in zip(parts, changed, strict=True))
    return value if same else tree_unflatten(changed, form)


def _detach(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.requires_grad:
        return tensor
    return torch.nn.Parameter(tensor.detach()) if type(tensor) is torch.nn.Parameter else tensor.detach()
