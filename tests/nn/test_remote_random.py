"""Random programs of what training loops do with parameters: the same numbers as in one process.

Gradients may be summed in another order where a parameter is used twice, so the last bits may differ.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import backhaul as bh
from backhaul.nn import RemoteModule

from .modules import batch

ACTIONS = 25
SEEDS = 10


def layer(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()


class Run:
    """One of the two models, with its optimizers."""

    def __init__(self, model: nn.Sequential) -> None:
        self.model = model
        self.optimizers: list[optim.Optimizer] = [
            optim.SGD(list(model.parameters())[::2], lr=0.1, momentum=0.9),
            optim.AdamW(list(model.parameters())[1::2], lr=0.01),
        ]
        self.saved = copy.deepcopy([each.state_dict() for each in self.optimizers])
        self.kept: Any = None

    def parameters(self) -> list[Any]:
        return list(self.model.parameters())

    def act(self, action: str, draw: random.Random) -> None:
        parameters = self.parameters()
        some = draw.choice(parameters)
        optimizer = draw.choice(self.optimizers)
        match action:
            case "pass":
                loss = self.model(batch(draw.randrange(5))).pow(2).mean()
                if draw.random() < 0.3:
                    loss = loss + some.pow(2).sum()
                if loss.requires_grad:
                    loss.backward()
            case "keep a graph":
                self.kept = self.model(batch(draw.randrange(5))).sum()
            case "use the graph":
                if self.kept is not None and self.kept.requires_grad:
                    self.kept.backward()
                self.kept = None
            case "step":
                self.kept = None  # its backward would need the old values
                optimizer.step()
            case "zero":
                optimizer.zero_grad(set_to_none=draw.random() < 0.5)
            case "zero the model":
                self.model[draw.randrange(len(self.model))].zero_grad(set_to_none=draw.random() < 0.5)
            case "drop one":
                some.grad = None
            case "assign":
                some.grad = torch.full_like(some, draw.random())
            case "copy one to another":
                if parameters[0].grad is not None:
                    parameters[2].grad = parameters[0].grad * 2
            case "scale":
                if some.grad is not None:
                    some.grad *= 0.5
            case "clip":
                clip_grad_norm_(parameters, draw.random())
            case "clip values":
                if any(each.grad is not None for each in parameters):  # else torch fails
                    clip_grad_value_(parameters, draw.random())
            case "freeze":
                if self.kept is None:
                    some.requires_grad_(draw.random() < 0.5)
            case "thaw":
                if self.kept is None:
                    self.model.requires_grad_(True)
            case "write":
                if self.kept is None:
                    with torch.no_grad():
                        some.mul_(0.9).add_(torch.ones_like(some), alpha=0.01)
            case "write all":
                if self.kept is None:
                    with torch.no_grad():
                        torch._foreach_mul_(parameters, 0.99)
            case "save":
                self.saved = copy.deepcopy([each.state_dict() for each in self.optimizers])
            case "load":
                for each, state in zip(self.optimizers, self.saved, strict=True):
                    each.load_state_dict(copy.deepcopy(state))
            case "rate":
                optimizer.param_groups[0]["lr"] = draw.random() / 10
            case "state":
                for state in optimizer.state.values():
                    for tensor in state.values():
                        if isinstance(tensor, torch.Tensor) and tensor.dim():
                            tensor.mul_(0.5)

    def numbers(self) -> list[Any]:
        return [
            [plain(each.detach()), None if each.grad is None else plain(each.grad), each.requires_grad]
            for each in self.parameters()
        ]


def plain(tensor: Any) -> torch.Tensor:
    return tensor.to_here() if hasattr(tensor, "to_here") else tensor.detach()


NAMES = [
    *("pass", "pass", "pass", "keep a graph", "use the graph", "step", "step", "zero", "zero the model", "drop one"),
    *("assign", "copy one to another", "scale", "clip", "clip values", "freeze", "thaw", "write", "write all", "save"),
    *("load", "rate", "state"),
]


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("look", [True, False])
def test_random_programs(seed: int, look: bool, workers: list[bh.Worker]) -> None:
    """``look``: whether the numbers are compared after each action, which sends all changes, or at the end only."""
    here = nn.Sequential(*(layer(number) for number in range(4)))
    there = nn.Sequential(layer(0), *(RemoteModule(f"worker{1 + n % 2}", layer, (n,)) for n in range(1, 4)))
    runs = [Run(there), Run(here)]
    draw, done = random.Random(seed), []
    for _ in range(ACTIONS):
        action, choices = draw.choice(NAMES), draw.random()
        done.append(action)
        for run in runs:
            run.act(action, random.Random(choices))
        if look:
            assert_same(*(run.numbers() for run in runs), done)
    assert_same(*(run.numbers() for run in runs), done)
    assert_same(*([each.state_dict()["state"] for each in run.optimizers] for run in runs), done)


def assert_same(found: Any, wanted: Any, done: list[str]) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11, msg=lambda text: f"{text}\nafter {done}")
