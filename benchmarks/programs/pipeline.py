"""A network in two stages on two workers, fed with micro-batches.

The driver passes each micro-batch as an RRef to the first stage (``remote``), and the RRef of its output to the second
(``rpc_async``). Each stage fetches its input. One backward pass goes through all micro-batches.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

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
            draw = torch.Generator().manual_seed(self.steps)
            self.steps += 1
            x = torch.randn(BATCH, INPUTS, generator=draw)
            targets = x[:, :CLASSES].argmax(1)
            with autograd.context() as context:
                loss = nn.functional.cross_entropy(self.forward(x), targets)
                autograd.backward(context, [loss])
                self.optimizer.step(context)
            losses.append(loss.item())
        return losses
