"""Three trainers and the one model of a parameter server.

In a step each trainer runs the model on the server through its RRef, makes a distributed backward pass, and calls
``update`` with the id of its context. The server steps its optimizer when all trainers have called, and answers them
all then (``async_execution``). It adds the gradients in the order of the trainers, so the losses do not depend on which
trainer is first.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from programs.api import autograd, rpc, seeded

WORKERS = ("server", "trainer1", "trainer2", "trainer3")
TRAINERS = len(WORKERS) - 1
INPUTS, WIDTH, CLASSES, BATCH = 16, 32, 4, 16


class Server:
    """The model. All trainers call its methods at the same time."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))
        seeded(self.model, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2, momentum=0.9)
        self.lock = threading.Lock()  # guards the attributes below
        self.gradients: dict[int, list[torch.Tensor]] = {}
        self.updated: torch.futures.Future[int] = torch.futures.Future()
        self.updates = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)

    @staticmethod
    @rpc.functions.async_execution
    def update(server: Any, trainer: int, context: int) -> torch.futures.Future[int]:
        """Add the gradients of a context. The future is done when those of all trainers are there."""
        self = server.local_value()
        found = autograd.get_gradients(context)
        with self.lock:
            self.gradients[trainer] = [found[parameter] for parameter in self.model.parameters()]
            updated = self.updated
            if len(self.gradients) < TRAINERS:
                return updated
            parts = [self.gradients[number] for number in sorted(self.gradients)]
            for parameter, *each in zip(self.model.parameters(), *parts, strict=True):
                parameter.grad = torch.stack(each).mean(0)
            self.optimizer.step()
            self.updates += 1
            self.gradients, self.updated = {}, torch.futures.Future()
        updated.set_result(self.updates)
        return updated


def train(server: Any, trainer: int, first: int, steps: int) -> list[float]:
    """Runs on a trainer."""
    losses = []
    for step in range(first, first + steps):
        draw = torch.Generator().manual_seed(step * TRAINERS + trainer)
        x = torch.randn(BATCH, INPUTS, generator=draw)
        targets = x[:, :CLASSES].argmax(1)
        with autograd.context() as context:
            scores = server.rpc_sync().forward(x)
            loss = nn.functional.cross_entropy(scores, targets)
            autograd.backward(context, [loss])
            rpc.rpc_sync(server.owner(), Server.update, args=(server, trainer, context))
        losses.append(loss.item())
    return losses


class Driver:
    """The server's worker."""

    def __init__(self) -> None:
        self.server = rpc.RRef(Server())
        self.steps = 0

    def run(self, steps: int) -> list[float]:
        training = [
            rpc.rpc_async(name, train, args=(self.server, number, self.steps, steps))
            for number, name in enumerate(WORKERS)
            if number
        ]
        self.steps += steps
        of_trainers = [each.wait() for each in training]
        return [sum(losses) for losses in zip(*of_trainers, strict=True)]
