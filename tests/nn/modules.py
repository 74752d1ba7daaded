"""Modules that workers make, and functions that they run."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import backhaul as bh


def seeded(seed: int = 0, dropout: float = 0.0) -> nn.Module:
    """A module with weights that depend on the seed alone, on whatever worker it is made."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()


def batch(seed: int = 1) -> torch.Tensor:
    return torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Shapes(nn.Module):
    """A module that takes and returns more than tensors."""

    def forward(self, x: torch.Tensor, *, scale: float = 1.0, names: list[str] | None = None) -> dict[str, Any]:
        return {name: x * scale for name in names or ["x"]}

    def double_it(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


class Mode(nn.Module):
    """Returns whether grad mode is enabled; takes arguments of any name."""

    def forward(self, **kwargs: Any) -> tuple[bool, dict[str, Any]]:
        return torch.is_grad_enabled(), kwargs


class Doubles:
    """An interface."""

    def forward(self, x: torch.Tensor) -> torch.Tensor: ...

    def double_it(self, x: torch.Tensor) -> torch.Tensor: ...


class Fails(nn.Module):
    def __init__(self, when: str) -> None:
        super().__init__()
        if when == "made":
            raise KeyError("made")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyError("called")


class NoModule:
    pass


def no_module() -> int:
    return 1


class Extra(nn.Module):
    """A module with state that is not a tensor."""

    def __init__(self, said: str) -> None:
        super().__init__()
        self.said = said

    def get_extra_state(self) -> str:
        return self.said

    def set_extra_state(self, state: str) -> None:
        self.said = state


class Hybrid(nn.Module):
    """A module with one local part and one remote part."""

    def __init__(self, there: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.here = nn.Linear(4, 4).double()
        self.there = there

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.there(self.here(x))


# Run on other workers.


def grads_of(module: bh.RRef[nn.Module], context: int) -> list[torch.Tensor | None]:
    found = bh.get_gradients(context)
    return [found.get(parameter) for parameter in module.local_value().parameters()]


def descend(parameters: list[bh.RRef[nn.Parameter]], context: int, rate: float) -> None:
    """Plain SGD on the owner's parameters."""
    found = bh.get_gradients(context)
    with torch.no_grad():
        for parameter in parameters:
            value = parameter.local_value()
            value -= rate * found[value]


def use(module: bh.nn.RemoteModule, x: torch.Tensor) -> torch.Tensor:
    return module(x)


def attributes(module: bh.nn.RemoteModule) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if not name.startswith("_") and name != "module_rref"}


def pass_on(to: str, module: bh.nn.RemoteModule, x: torch.Tensor) -> torch.Tensor:
    return bh.rpc_sync(to, use, args=(module, x))


def mode_of(module: bh.RRef[nn.Module]) -> list[bool]:
    return [part.training for part in module.local_value().modules()]


def kept(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """A hook."""
    return output + 100


def shifted(module: nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
    """A pre-hook."""
    return inputs[0] + 1


def fill(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.ones_(module.weight)


def tied() -> nn.Module:
    """A module with one parameter in two places."""
    made = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    made[1].weight = made[0].weight
    return made


def nested() -> nn.Module:
    """A module with a part on another worker."""
    return nn.Sequential(bh.nn.RemoteModule("worker2", seeded, (1,)), nn.Tanh())
