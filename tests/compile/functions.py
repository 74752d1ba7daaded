"""What tests call on other workers."""

from __future__ import annotations

import torch
from torch import Tensor

import backhaul as bh

layer = torch.nn.Linear(4, 4, dtype=torch.float64)
"""Lives on whichever worker uses it."""


def head(x: Tensor, w: Tensor, power: int = 2) -> Tensor:
    return (torch.sin(x) * w).pow(power)


def scaled(x: Tensor, *, by: float = 1.0, name: str = "", shift: Tensor | None = None, flip: bool = False) -> Tensor:
    y = torch.tanh(x) * by + len(name)
    y = y if shift is None else y * shift
    return -y if flip else y


def several(xs: list[Tensor], sizes: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """One result is a view, one has no gradient, none is contiguous."""
    product = (xs[0] * xs[1]).expand(2, *xs[0].shape)
    return product, product[0].t(), (product > 0).long() * sum(sizes)


def as_list(x: Tensor, count: int) -> list[Tensor]:
    return [x * n for n in range(count)]


def unchanged(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x


def constant(x: Tensor, y: Tensor) -> Tensor:
    """Depends on one argument only, and that not by gradients."""
    return torch.ones_like(x) + y.detach()


def dropout(x: Tensor) -> Tensor:
    return torch.nn.functional.dropout(x, 0.5) * x


def in_place(x: Tensor) -> Tensor:
    x.add_(1)
    return x * 2


def with_layer(x: Tensor) -> Tensor:
    return torch.tanh(layer(x))


def calling(x: Tensor) -> Tensor:
    return bh.rpc_sync("worker2", with_layer, args=(x.sin(),)).cos()


def like(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def chosen(x: Tensor) -> Tensor:
    """How many there are depends on what is in them."""
    return x[x > 0]


def failing(x: Tensor) -> Tensor:
    raise KeyError("no such thing")


def gradients_of_layer(ctx: int) -> list[Tensor | None]:
    held = bh.get_gradients(ctx)
    return [held.get(parameter) for parameter in layer.parameters()]
