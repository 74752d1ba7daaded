"""Several trainers train the one model of a parameter server at once.

No trainer waits for another. When the gradients of a trainer arrive, other trainers may have changed the weights since
its forward. So the server never changes weights in place: that would break the graphs of passes that still run
("modified by an inplace operation"). A step replaces the weights by new tensors. A pass that used the old tensors goes
back through the old tensors. Each forward has leaves of its own, so that gradients of different trainers stay apart.

    python examples/parameter_server.py
    python examples/parameter_server.py --trainers 2 --steps 50
"""

from __future__ import annotations

import argparse
import itertools
import threading
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import backhaul as bh

INPUTS, CLASSES, BATCH = 2, 3, 64
SIZES = [INPUTS, 64, 64, CLASSES]


# The model is a function of its weights. So many threads can run it at once, each on its own copy of the weights.


def make_weights() -> list[torch.Tensor]:
    """Make the weight and the bias of each layer."""
    draw = torch.Generator().manual_seed(0)
    made = []
    for before, after in itertools.pairwise(SIZES):
        made += [torch.randn(after, before, generator=draw) / before**0.5, torch.zeros(after)]
    return made


def apply_model(weights: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Run the layers one after the other."""
    for number in range(0, len(weights), 2):
        x = nn.functional.linear(x.tanh() if number else x, weights[number], weights[number + 1])
    return x


def make_batch(draw: torch.Generator, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make points on the arms of a spiral. The label of a point is its arm."""
    arm = torch.randint(CLASSES, (size,), generator=draw)
    radius = torch.rand(size, generator=draw)
    angle = 2 * torch.pi * (arm / CLASSES + 0.7 * radius) + 0.1 * torch.randn(size, generator=draw)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1) * 2, arm


class Server:
    """One set of weights. All trainers call its methods at the same time.

    Steps have no momentum: with gradients that are some steps old, momentum makes the weights oscillate.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.lock = threading.Lock()  # guards all attributes below
        self.steps = 0
        self.weights = make_weights()
        # By trainer: the steps made before its last forward, and the leaves that this forward used.
        self.used: dict[int, tuple[int, list[torch.Tensor]]] = {}

    def forward(self, trainer: int, x: torch.Tensor) -> torch.Tensor:
        """Run the model on the present weights."""
        with self.lock:
            weights = [weight.detach().requires_grad_() for weight in self.weights]
            self.used[trainer] = self.steps, weights
        return apply_model(weights, x)

    def step(self, trainer: int) -> int:
        """Apply the gradients of a trainer. Returns how many steps others have made since its forward."""
        with self.lock:
            before, weights = self.used.pop(trainer)
            self.weights = [now - self.rate * then.grad for now, then in zip(self.weights, weights, strict=True)]
            self.steps += 1
            return self.steps - before - 1

    def accuracy(self) -> float:
        """Return the share of new points that the model classifies correctly."""
        x, arm = make_batch(torch.Generator().manual_seed(10**6), 1000)
        return (apply_model(self.weights, x).argmax(1) == arm).float().mean().item()


def train(server: bh.RRef[Server], steps: int, trainer: int) -> dict[str, Any]:
    """Train: forward, backward and step."""
    draw = torch.Generator().manual_seed(trainer)
    losses, behind = [], []
    for _ in range(steps):
        x, arm = make_batch(draw, BATCH)
        loss = nn.functional.cross_entropy(server.rpc_sync().forward(trainer, x), arm)
        loss.backward()
        behind.append(server.rpc_sync().step(trainer))
        losses.append(loss.item())
    return {"first": losses[0], "last": sum(losses[-10:]) / len(losses[-10:]), "behind": sum(behind) / len(behind)}


def serve(steps: int) -> dict[str, Any] | None:
    """Runs on every worker. The server starts the trainers, which do nothing else."""
    torch.set_num_threads(1)
    if bh.get_worker_info().name != "server":
        return None
    server = bh.RRef(Server(rate=0.1))
    before = server.local_value().accuracy()
    trainers = [info for info in bh.get_worker_infos() if info.name != "server"]
    start = time.perf_counter()
    runs = bh.wait_all([bh.rpc_async(info, train, args=(server, steps, info.id), timeout=0) for info in trainers])
    return {
        "trainers": {info.name: run for info, run in zip(trainers, runs, strict=True)},
        "before": before,
        "after": server.local_value().accuracy(),
        "steps": server.local_value().steps,
        "seconds": time.perf_counter() - start,
    }


def main() -> None:
    """Start the server and the trainers, and print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trainers", type=int, default=4, help="number of trainers (default 4)")
    parser.add_argument("--steps", type=int, default=300, help="steps of each trainer (default 300)")
    options = parser.parse_args()
    if options.trainers < 1 or options.steps < 1:
        parser.error("at least 1 trainer and 1 step")
    names = ["server", *(f"trainer{number}" for number in range(1, options.trainers + 1))]
    result = bh.launch(serve, names, args=(options.steps,))[0]
    table = Table(title=f"{options.trainers} trainers, one set of weights")
    for column in ("trainer", "first loss", "last losses", "steps of others in between"):
        table.add_column(column, justify="left" if column == "trainer" else "right")
    for name, run in result["trainers"].items():
        table.add_row(name, f"{run['first']:.3f}", f"{run['last']:.3f}", f"{run['behind']:.1f}")
    Console().print(table)
    print(
        f"{result['steps']} steps, {result['steps'] / result['seconds']:.0f} a second; "
        f"accuracy {result['before']:.2f} before, {result['after']:.2f} after"
    )


if __name__ == "__main__":
    main()
