"""Two trainers under DDP that share an embedding table on a third worker.

The master makes the table as a ``RemoteModule`` and starts the trainers with it. In each step a trainer looks its words
up, DDP (gloo) averages the gradients of the dense layer, and a ``DistributedOptimizer`` steps both. The trainers use
different rows of the table and its gradients are sparse, so the losses do not depend on which trainer is first.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from programs.api import DistributedOptimizer, RemoteModule, autograd, parameter_rrefs, rpc, seeded

WORKERS = ("master", "trainer0", "trainer1", "table")
TRAINERS = 2
ROWS, WIDTH, CLASSES, BAGS, BAG = 100, 16, 8, 8, 5


class Table(nn.EmbeddingBag):
    """The embeddings."""

    def __init__(self) -> None:
        super().__init__(ROWS, WIDTH, mode="sum", sparse=True)
        seeded(self, 2)


class Trainer:
    """What a trainer keeps between the calls of the master."""

    def __init__(self, table: Any, number: int, meet: str) -> None:
        torch.distributed.init_process_group("gloo", init_method=meet, rank=number, world_size=TRAINERS)
        self.table = table
        dense = nn.Linear(WIDTH, CLASSES)
        seeded(dense, 1)
        self.dense = DistributedDataParallel(dense)
        self.optimizer = DistributedOptimizer(
            torch.optim.SGD, [*table.remote_parameters(), *parameter_rrefs(self.dense)], lr=0.05
        )
        self.number = number
        self.steps = 0

    def run(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            draw = torch.Generator().manual_seed(self.steps * TRAINERS + self.number)
            self.steps += 1
            words = torch.randint(ROWS // TRAINERS, (BAGS * BAG,), generator=draw) * TRAINERS + self.number
            targets = torch.randint(CLASSES, (BAGS,), generator=draw)
            with autograd.context() as context:
                vectors = self.table.forward(words, torch.arange(0, BAGS * BAG, BAG))
                loss = nn.functional.cross_entropy(self.dense(vectors), targets)
                autograd.backward(context, [loss])
                self.optimizer.step(context)
            losses.append(loss.item())
        return losses


trainer: Trainer


def begin(table: Any, number: int, meet: str) -> None:
    """Runs on a trainer: join the other one."""
    global trainer
    trainer = Trainer(table, number, meet)


def train(steps: int) -> list[float]:
    """Runs on a trainer."""
    return trainer.run(steps)


def end() -> None:
    """Runs on a trainer, last of all."""
    global trainer
    del trainer
    torch.distributed.destroy_process_group()


class Driver:
    """The master."""

    def __init__(self) -> None:
        self.table = RemoteModule("table", Table)
        self.folder = tempfile.TemporaryDirectory()
        meet = f"file://{self.folder.name}/trainers"
        self._on_trainers(begin, [(self.table, number, meet) for number in range(TRAINERS)])

    def _on_trainers(self, function: Any, args: list[tuple[Any, ...]]) -> list[Any]:
        started = [rpc.rpc_async(f"trainer{number}", function, args=each) for number, each in enumerate(args)]
        return [each.wait() for each in started]

    def run(self, steps: int) -> list[float]:
        of_trainers = self._on_trainers(train, [(steps,)] * TRAINERS)
        return [sum(losses) for losses in zip(*of_trainers, strict=True)]

    def close(self) -> None:
        self._on_trainers(end, [()] * TRAINERS)
        self.folder.cleanup()
