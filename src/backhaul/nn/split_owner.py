"""What the owner of split parts does. Other workers call these functions on it."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

from backhaul._remote_tensors.on_owner import Description, describe
from backhaul._rref.handle import RRef
from backhaul.nn.module_transfer import ModuleTransfer, pack, unpack

Found = Literal["data", "method", "missing", "module", "parameter"]


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


def read(module: nn.Module, name: str) -> tuple[Found, Any]:
    """Look up an attribute of a module. Returns what it is and, for data, the value."""
    try:
        value = getattr(module, name)
    except AttributeError as error:
        return "missing", str(error)
    if isinstance(value, nn.Module):
        return "module", type(value).__name__
    if isinstance(value, nn.Parameter):
        return "parameter", None
    if isinstance(value, types.MethodType):
        return "method", None
    return "data", value


def write(module: nn.Module, name: str, value: Any) -> None:
    """Set an attribute of a module."""
    setattr(module, name, value)
