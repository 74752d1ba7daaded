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


def receiving(x: Tensor) -> Tensor:
    """Changes what it has received."""
    scale = bh.rpc_sync("worker2", torch.ones, args=(3, 4)).add_(1).mul_(2)
    return x * scale


normalize = torch.nn.BatchNorm1d(4, dtype=torch.float64)
calls = torch.zeros(1, dtype=torch.int64)
averages = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)


def normalized(x: Tensor) -> Tensor:
    return normalize(x)


def counting(x: Tensor) -> Tensor:
    calls[0] += 1
    return x.sin()


def averaging(x: Tensor) -> Tensor:
    return torch.nn.functional.batch_norm(x, *averages, training=True)


def busy(x: Tensor) -> Tensor:
    """Changes what it has made, in every way."""
    made = torch.tensor([1.0, 2.0], dtype=torch.float64).mul_(2)
    other = torch.empty(2, dtype=torch.float64)
    torch.sin(made, out=other)
    torch._foreach_add_([made, other], 1)
    made[1:] = other[0]
    made.data.add_(1)
    torch.from_numpy(made.detach().numpy()).sub_(1).sub_(1)
    hidden = torch.nn.BatchNorm1d(4, affine=False, dtype=torch.float64)(x)
    hidden = hidden + 1
    hidden[0] = 0
    return hidden.relu_() * made.sum() * other[1]


def scaled_by_sum(x: Tensor) -> Tensor:
    return x * x.sum().item()


def by_sign(x: Tensor) -> Tensor:
    return x.sin() if x.sum() > 0 else x.cos()


def squared(x: Tensor) -> Tensor:
    return x @ x


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
