"""Which steps of optimizers the owners of remote parameters can make as a whole: those that are torch's own code.

torch's steps treat each parameter by itself, and call a closure once, before anything else. A ``step`` of other code
may use a number of all gradients, call its closure in the middle, or count in an attribute.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import Optimizer


def is_whole(optimizer: Optimizer) -> bool:
    """Whether owners make the steps of an optimizer as a whole. If not, its operations run on owners one by one."""
    found = torch_class(type(optimizer))
    return found is not None and _private_methods(found).isdisjoint(optimizer.__dict__)  # type: ignore[arg-type]


@functools.cache
def _private_methods(kind: type[Optimizer]) -> frozenset[str]:
    return frozenset(name for name in dir(kind) if name.startswith("_") and callable(getattr(kind, name, None)))


def torch_class(kind: type[Optimizer]) -> type[Optimizer] | None:
    """The class of torch whose ``step`` an optimizer of class ``kind`` makes; None if the step is not only torch's."""
    return _find_torch_class(kind, kind.step)  # type: ignore[arg-type]


@functools.lru_cache(256)
def _find_torch_class(kind: type[Optimizer], step: Callable[..., Any]) -> type[Optimizer] | None:
    if not _is_torchs(step) or _needs_closure(step):
        return None
    found = next(each for each in kind.__mro__ if each.__module__.startswith("torch.optim."))
    if found is Optimizer:
        return None
    for base in found.__mro__[: found.__mro__.index(Optimizer)]:
        for name in vars(base):
            if name != "step" and not name.startswith("__") and getattr(kind, name) is not getattr(found, name):
                return None
    return found


def _is_torchs(function: Any) -> bool:
    """Whether a function is code of ``torch.optim``, with no decorators but torch's."""
    while True:
        module = getattr(function, "__globals__", {}).get("__name__", "")
        if not module.startswith("torch."):
            return False
        if not hasattr(function, "__wrapped__"):
            return bool(module.startswith("torch.optim."))
        function = function.__wrapped__


@functools.cache
def _needs_closure(step: Callable[..., Any]) -> bool:
    closure = inspect.signature(step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
