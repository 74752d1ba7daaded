"""A network in two stages on two workers, fed with micro-batches.

The driver passes each micro-batch as an RRef to the first stage (``remote``), and the RRef of its output to the second
(``rpc_async``). Each stage fetches its input. One backward pass goes through all micro-batches.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

import backhaul as bh
from programs.api import DistributedOptimizer, autograd, parameter_rrefs, rpc, seeded

WORKERS = ("driver", "stage1", "stage2")
INPUTS, WIDTH, CLASSES, BATCH, PARTS = 32, 64, 10, 32, 4


class Stage(nn.Module):
    """A part of the network. Its lock lets one micro-batch in at a time."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, outputs))
        seeded(self, inputs)
        self.lock = threading.Lock()

    def forward(self, x: Any) -> torch.Tensor:
        value = x.to_here()
        with self.lock:
            return self.layers(value)

    def parameter_rrefs(self) -> list[Any]:
        """For the optimizer."""
        return parameter_rrefs(self)


def make_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors, and which of their first numbers is the largest."""
    x = torch.randn(BATCH, INPUTS, generator=torch.Generator().manual_seed(step))
    return x, x[:, :CLASSES].argmax(1)


class Driver:
    """Feeds the stages."""

    def __init__(self) -> None:
        self.first = rpc.remote("stage1", Stage, args=(INPUTS, WIDTH))
        self.second = rpc.remote("stage2", Stage, args=(WIDTH, CLASSES))
        parameters = [
            rref for stage in (self.first, self.second) for rref in stage.remote().parameter_rrefs().to_here()
        ]
        self.optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Send all micro-batches through both stages."""
        outputs = []
        for part in x.split(BATCH // PARTS):
            middle = self.first.remote().forward(rpc.RRef(part))
            outputs.append(self.second.rpc_async().forward(middle))
        return torch.cat(torch.futures.wait_all(outputs))

    def run(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            x, targets = make_batch(self.steps)
            self.steps += 1
            with autograd.context() as context:
                loss = nn.functional.cross_entropy(self.forward(x), targets)
                autograd.backward(context, [loss])
                self.optimizer.step(context)
            losses.append(loss.item())
        return losses


class PlainDriver:
    """The same network as a program of Backhaul has it: remote modules, ``loss.backward()``, an optimizer of torch."""

    def __init__(self) -> None:
        self.first = bh.nn.RemoteModule("stage1", Stage, (INPUTS, WIDTH))
        self.second = bh.nn.RemoteModule("stage2", Stage, (WIDTH, CLASSES))
        self.optimizer = torch.optim.SGD([*self.first.parameters(), *self.second.parameters()], lr=0.1)
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Send all micro-batches through both stages."""
        outputs = []
        for part in x.split(BATCH // PARTS):
            middle = self.first.get_module_rref().remote().forward(bh.RRef(part))
            outputs.append(self.second.forward_async(middle))
        return torch.cat(bh.wait_all(outputs))

    def run(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            x, targets = make_batch(self.steps)
            self.steps += 1
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.forward(x), targets)
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses
