"""Parameters of a model that have been replaced by others. An optimizer that still has them would train nothing, so its
step raises. Knows no modules.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from backhaul._autograd.torch_engine.hooks import count_own_handle

_lock = threading.Lock()  # guards _why
_why: Any = WeakTensorKeyDictionary()  # parameter -> what became of it


def leave_behind(parameters: Iterable[torch.Tensor], why: str) -> None:
    """Note that no model uses these parameters any more.

    Args:
        parameters: The parameters.
        why: What became of them, for the error text: ``"moved to worker 'w1' by bh.nn.split"``.
    """
    _watch_optimizers()
    with _lock:
        for parameter in parameters:
            _why[parameter] = why


@functools.cache
def _watch_optimizers() -> None:
    count_own_handle()
    register_optimizer_step_pre_hook(_check_step)


def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not _why:  # usual: nobody holds such parameters
        return
    with _lock:
        found = {_why[each] for group in optimizer.param_groups for each in group["params"] if each in _why}
    if found:
        raise RuntimeError(
            f"{type(optimizer).__name__} has parameters that the model does not use any more; they were "
            f"{', '.join(sorted(found))}; make the optimizer from model.parameters() after split or gather"
        )
