"""What the owner of split parts does. Other workers call these functions on it."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn

from backhaul._remote_tensors.on_owner import Description, describe
from backhaul._rpc.calls.served_call import reply_as_it_is
from backhaul._rref.handle import RRef
from backhaul.nn import owner
from backhaul.nn.autocast import Casts, casting
from backhaul.nn.module_transfer import ModuleTransfer, pack, unpack

Found = Literal["data", "method", "missing"]


def take(transfer: ModuleTransfer, devices: Sequence[torch.device]) -> list[tuple[RRef[nn.Module], Description]]:
    """Become the owner of modules, each on its device. Returns references to them, and their tensors."""
    parts = [part.to(device) for part, device in zip(unpack(transfer), devices, strict=True)]
    return [(RRef(part), describe(part)) for part in parts]


def give(references: Sequence[RRef[nn.Module]], to_cpu: bool) -> ModuleTransfer:
    """Send modules of this worker to the caller.

    Args:
        references: References to the modules.
        to_cpu: Whether the caller has no place for tensors of the devices of this worker.
    """
    return pack([reference.local_value() for reference in references], to_cpu=to_cpu)


def read(module: nn.Module, path: str, name: str) -> tuple[Found, Any]:
    """Look up an attribute of the module at ``path`` in ``module``. Returns what it is and, for data, the value."""
    reply_as_it_is()
    try:
        value = getattr(module.get_submodule(path), name)
    except AttributeError as error:
        return "missing", str(error)
    return ("method", None) if isinstance(value, types.MethodType) else ("data", value)


def write(module: nn.Module, path: str, name: str, value: Any) -> None:
    """Set an attribute of the module at ``path``."""
    setattr(module.get_submodule(path), name, value)


def call(module: nn.Module, path: str, grad: bool, casts: Casts, method: str, /, *args: Any, **kwargs: Any) -> Any:
    """Call a method of the module at ``path``. ``grad``, ``casts``: grad mode and autocast of the caller."""
    with casting(casts):
        return owner.run(module.get_submodule(path), "cpu", grad, method, *args, **kwargs)


def train(module: nn.Module, path: str, mode: bool) -> None:
    """Set the mode of the module at ``path`` and of all that is inside it."""
    module.get_submodule(path).train(mode)


def apply(module: nn.Module, path: str, function: Callable[[nn.Module], None]) -> None:
    """Call a function with the module at ``path`` and all that is inside it."""
    module.get_submodule(path).apply(function)
