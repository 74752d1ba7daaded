"""``torch.autocast`` of the caller holds for modules of other workers, as in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import backhaul as bh

pytestmark = pytest.mark.usefixtures("workers")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 8), nn.GELU())
        self.second = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def whole(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(x)


def switched_off_inside(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = model.first(x)
        with torch.autocast("cpu", enabled=False):
            return model.second(h.float())


def half(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.float16), torch.autocast("cuda", enabled=False):
        return model(x)


def replaced(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    values = {name: value.detach() * 2 for name, value in model.named_parameters()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.func.functional_call(model, values, x) + model(x)


@pytest.mark.parametrize("forward", [whole, switched_off_inside, half, replaced])
def test_training(forward: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
    torch.manual_seed(0)
    wanted = Model()
    model = bh.nn.split(copy.deepcopy(wanted), {"first": "worker1", "second": "worker2"})
    found: list[list[torch.Tensor]] = []
    for each in (model, wanted):
        optimizer, outputs = torch.optim.SGD(each.parameters(), lr=0.1), []
        for number in range(2):
            output = forward(each, torch.full((3, 4), number + 0.3))
            outputs.append(output)
            optimizer.zero_grad()  # travels with the next forward
            output.float().pow(2).sum().backward()
            optimizer.step()
        found.append(outputs)
    assert [each.dtype for each in found[0]] == [each.dtype for each in found[1]]
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    torch.testing.assert_close(dict(model.state_dict()), dict(wanted.state_dict()), rtol=0, atol=0)


class Coder(nn.Linear):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)


def test_futures_and_methods() -> None:
    part: Any = bh.nn.split(nn.Sequential(nn.Sequential(Coder(4, 4))), {"0": "worker1"})[0]
    inner: Any = part.get_submodule("0")
    x = torch.ones(2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert part.forward_async(x).wait().dtype == torch.bfloat16
        assert inner.encode(x).dtype == torch.bfloat16
    assert part(x).dtype == inner.encode(x).dtype == torch.float32  # it ends with the call
