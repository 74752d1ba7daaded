"""Stand for submodules of a module on another worker, where code of torch looks for them in a model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

Call = Callable[..., Any]


class RemotePart:
    """A submodule. It has its parameters, buffers and submodules as attributes.

    Args:
        tensors: All tensors of the module by name.
        prefix: The submodule's name, with a dot.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], prefix: str) -> None:
        self._tensors = tensors
        self._prefix = prefix

    def __getattr__(self, name: str) -> Any:
        found = find_attribute(self._tensors, self._prefix + name) if not name.startswith("_") else None
        if found is None:
            raise AttributeError(f"the submodule {self._prefix[:-1]!r} has no tensor and no submodule {name!r}")
        return found


def find_attribute(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor | RemotePart | None:
    """The tensor of that name, or the submodule that has tensors below that name."""
    if name in tensors:
        return tensors[name]
    prefix = f"{name}."
    return RemotePart(tensors, prefix) if any(each.startswith(prefix) for each in tensors) else None


def find_registry(name: str) -> dict[str, None] | None:
    """What ``fully_shard`` reads of each module before it shards the parameters. It leaves alone modules with DDP."""
    contract = sys.modules.get("torch.distributed._composable.contract")
    return {"replicate": None} if contract is not None and name == contract.REGISTRY_KEY else None


class RemoteBatchNorm(_BatchNorm):
    """A batch normalization layer. ``torch.optim.swa_utils.update_bn`` resets its statistics and sets its momentum.

    Args:
        name: Its name in the module.
        momentum: Its momentum.
        call: Calls a function of ``owner`` with the module.
    """

    def __init__(self, name: str, momentum: float | None, call: Call) -> None:
        nn.Module.__init__(self)
        self._name = name
        self._momentum = momentum
        self._call = call

    @property
    def momentum(self) -> float | None:
        return self._momentum

    @momentum.setter
    def momentum(self, value: float | None) -> None:
        self._call(set_momentum, self._name, value)
        self._momentum = value

    def reset_running_stats(self) -> None:
        self._call(reset_running_stats, self._name)

    def reset_parameters(self) -> None:
        self._call(reset_parameters, self._name)

    def extra_repr(self) -> str:
        return f"{self._name!r}, momentum={self._momentum}"


# What the owner runs.


def set_momentum(module: nn.Module, name: str, momentum: float | None) -> None:
    """Set the momentum of a layer."""
    layer: Any = module.get_submodule(name)
    layer.momentum = momentum


def reset_running_stats(module: nn.Module, name: str) -> None:
    """Reset the statistics of a layer."""
    layer: Any = module.get_submodule(name)
    layer.reset_running_stats()


def reset_parameters(module: nn.Module, name: str) -> None:
    """Reset the statistics and parameters of a layer."""
    layer: Any = module.get_submodule(name)
    layer.reset_parameters()
