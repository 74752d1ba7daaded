"""Trainers synchronize their dense layers with DDP and share one embedding table on a separate worker.

During ``loss.backward()``, DDP (gloo) averages the gradients of the dense layers between the trainers. The gradients of
the table travel to the worker that holds it. The table makes a step when the gradients of all trainers have arrived.
The result equals that of one process that trains on the batches of all trainers; the example checks this.

    python examples/ddp_and_embeddings.py
    python examples/ddp_and_embeddings.py --trainers 3 --steps 20
"""

from __future__ import annotations

import argparse
import tempfile
import threading
from typing import Any

import torch
import torch.distributed
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import backhaul as bh

WORDS, WIDTH, BAG, BATCH, RATE = 200, 16, 8, 32, 0.5


def make_batch(step: int, trainer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make bags of words. The label says whether most words of a bag are in the first half of the vocabulary."""
    draw = torch.Generator().manual_seed(1000 * step + trainer)
    bags = torch.randint(WORDS, (BATCH, BAG), generator=draw)
    return bags, ((bags < WORDS // 2).sum(1) > BAG // 2).float()


def make_dense() -> nn.Module:
    """Make the layers that every trainer has."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0))


class Embeddings(nn.Module):
    """The table that all trainers use, and its optimizer steps."""

    def __init__(self, trainers: int) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table = nn.EmbeddingBag(WORDS, WIDTH)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=RATE)
        self.trainers = trainers
        self.lock = threading.Lock()  # guards all attributes below
        self.ready = 0
        self.stepped: bh.Future[None] = bh.Future()

    def forward(self, bags: torch.Tensor) -> torch.Tensor:
        return self.table(bags)

    @bh.async_execution
    def step(self) -> bh.Future[None]:
        """Say that the gradient of one trainer is in ``.grad``. The future is done when the table has made its step."""
        with self.lock:
            self.ready += 1
            stepped = self.stepped
            if self.ready < self.trainers:
                return stepped
            self.ready, self.stepped = 0, bh.Future()
        self.table.weight.grad /= self.trainers  # it is the sum of the gradients of all trainers
        self.optimizer.step()
        self.optimizer.zero_grad()
        stepped.set_result(None)
        return stepped


# On the trainers.


def train(embeddings: bh.nn.RemoteModule, steps: int, trainer: int, trainers: int, meet: str) -> dict[str, Any]:
    """Train together with the other trainers. Returns losses and dense weights."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{meet}", rank=trainer, world_size=trainers)
    try:
        dense = DistributedDataParallel(make_dense())
        optimizer = torch.optim.SGD(dense.parameters(), lr=RATE)
        losses = []
        for step in range(steps):
            bags, labels = make_batch(step, trainer)
            optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(dense(embeddings(bags)), labels)
            loss.backward()
            optimizer.step()
            embeddings.get_module_rref().rpc_sync().step()
            losses.append(loss.item())
        return {"losses": losses, "dense": [parameter.detach() for parameter in dense.parameters()]}
    finally:
        torch.distributed.destroy_process_group()


# On the worker that holds the table. It is the driver.


def train_alone(steps: int, trainers: int) -> list[torch.Tensor]:
    """Train in one process on the batches of all trainers. Returns all weights."""
    embeddings, dense = Embeddings(1), make_dense()
    optimizer = torch.optim.SGD([*embeddings.parameters(), *dense.parameters()], lr=RATE)
    for step in range(steps):
        batches = [make_batch(step, trainer) for trainer in range(trainers)]
        bags, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(dense(embeddings(bags)), labels).backward()
        optimizer.step()
    return [parameter.detach() for parameter in (*embeddings.parameters(), *dense.parameters())]


def drive(steps: int) -> dict[str, Any] | None:
    """Runs on every worker. The worker that holds the table starts the trainers."""
    torch.set_num_threads(1)
    if bh.get_worker_info().name != "table":
        return None
    trainers = [info for info in bh.get_worker_infos() if info.name != "table"]
    embeddings = bh.nn.RemoteModule("table", Embeddings, (len(trainers),))
    with tempfile.TemporaryDirectory() as folder:
        runs = bh.wait_all(
            [
                bh.rpc_async(info, train, (embeddings, steps, number, len(trainers), f"{folder}/meet"), timeout=0)
                for number, info in enumerate(trainers)
            ]
        )
    wanted = train_alone(steps, len(trainers))
    table = embeddings.state_dict()["table.weight"]
    difference = max(
        (found - wish).abs().max().item()
        for run in runs
        for found, wish in zip([table, *run["dense"]], wanted, strict=True)
    )
    return {"losses": [run["losses"] for run in runs], "difference": difference}


def main() -> None:
    """Start the workers, train, and print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trainers", type=int, default=2, help="number of trainers (default 2)")
    parser.add_argument("--steps", type=int, default=200, help="training steps (default 200)")
    options = parser.parse_args()
    if options.trainers < 1 or options.steps < 1:
        parser.error("at least 1 trainer and 1 step")
    names = ["table", *(f"trainer{number}" for number in range(options.trainers))]
    result = bh.launch(drive, names, args=(options.steps,))[0]
    table = Table(title=f"{options.trainers} trainers under DDP, one embedding table")
    for column in ("trainer", "first loss", "last loss"):
        table.add_column(column, justify="left" if column == "trainer" else "right")
    for number, losses in enumerate(result["losses"]):
        table.add_row(str(number), f"{losses[0]:.3f}", f"{losses[-1]:.3f}")
    Console().print(table)
    print(f"largest difference of a weight to one process: {result['difference']:.1e}")


if __name__ == "__main__":
    main()
