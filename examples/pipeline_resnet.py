"""A small residual network in two stages on two workers. Micro-batches keep both stages busy.

The driver starts all micro-batches at once. The output of the first stage stays on its worker. The driver passes a
reference to the second stage, which fetches the output straight from the first stage. One backward pass then runs
through all micro-batches.

    python examples/pipeline_resnet.py
    python examples/pipeline_resnet.py --steps 20 --splits 1 2 4 8
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import backhaul as bh

CHANNELS, CLASSES, SIDE, BATCH = 16, 4, 16, 32


# The data: noisy images of stripes in four directions.


def make_batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make images. The label of an image is the direction of its stripes."""
    draw = torch.Generator().manual_seed(seed)
    way = torch.randint(CLASSES, (BATCH,), generator=draw)
    angle = way * torch.pi / CLASSES
    grid = torch.arange(SIDE) - SIDE / 2
    along = angle.cos()[:, None, None] * grid[:, None] + angle.sin()[:, None, None] * grid
    images = (along + 6 * torch.rand(BATCH, 1, 1, generator=draw)).sin()
    return (images + 0.5 * torch.randn(BATCH, SIDE, SIDE, generator=draw))[:, None], way


# The model. GroupNorm normalizes each image alone, so micro-batches do not change the result.


class Block(nn.Module):
    """Two convolutions and a skip connection."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.GroupNorm(4, outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.GroupNorm(4, outputs),
        )
        self.around = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.around(x))


def make_layers(stage: int) -> nn.Sequential:
    """Make the layers of a stage. They have the same weights on every worker."""
    torch.manual_seed(stage)
    if stage == 1:
        return nn.Sequential(nn.Conv2d(1, CHANNELS, 3, 1, 1), Block(CHANNELS, CHANNELS, 1))
    layers = [Block(CHANNELS, 2 * CHANNELS, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(2 * CHANNELS, CLASSES))


class Stage(nn.Module):
    """One stage of the network. It fetches its input if that is on another worker."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.layers = make_layers(stage)

    def forward(self, x: torch.Tensor | bh.RRef[torch.Tensor]) -> torch.Tensor:
        return self.layers(x.to_here() if isinstance(x, bh.RRef) else x)


class Pipeline(nn.Module):
    """Both stages, as one module."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.first = bh.nn.RemoteModule(first, Stage, (1,))
        self.second = bh.nn.RemoteModule(second, Stage, (2,))

    def forward(self, x: torch.Tensor, splits: int) -> torch.Tensor:
        made = []
        for part in x.chunk(splits):
            middle = self.first.get_module_rref().remote().forward(part)  # stays on the first stage's worker
            made.append(self.second.forward_async(middle))
        return torch.cat(bh.wait_all(made))


# On the driver.


def train_step(model: Pipeline, optimizer: torch.optim.Optimizer, seed: int, splits: int) -> float:
    """Make forward, backward and step. Returns the loss."""
    images, way = make_batch(seed)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images, splits), way)
    loss.backward()
    optimizer.step()
    return loss.item()


def check(model: Pipeline, splits: int) -> float:
    """Return the largest difference between a gradient of the pipeline and the same gradient in this process."""
    images, way = make_batch(10**6)
    alone = nn.Sequential(make_layers(1), make_layers(2))
    nn.functional.cross_entropy(alone(images), way).backward()
    nn.functional.cross_entropy(model(images, splits), way).backward()
    found = [parameter.grad.to_here() for parameter in model.parameters()]  # they are on the stages' workers
    wanted = [parameter.grad for parameter in alone.parameters()]
    return max((a - b).abs().max().item() for a, b in zip(found, wanted, strict=True))


def run(steps: int, splits: list[int]) -> dict[str, Any] | None:
    """Runs on every worker. The driver makes the calls, the stages serve."""
    torch.set_num_threads(1)
    if bh.get_worker_info().name != "driver":
        return None
    model = Pipeline("stage1", "stage2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    difference = check(model, max(splits))
    losses = [train_step(model, optimizer, 0, 1)]  # not measured: in the first step, each worker makes its optimizer
    speeds = {}
    for count in splits:
        start = time.perf_counter()
        losses += [train_step(model, optimizer, len(losses) + number, count) for number in range(steps)]
        speeds[count] = steps * BATCH / (time.perf_counter() - start)
    return {"difference": difference, "losses": losses, "speeds": speeds}


def main() -> None:
    """Start the workers, train, and print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=30, help="training steps for each number of splits (default 30)")
    parser.add_argument("--splits", type=int, nargs="+", default=[1, 2, 4], help="micro-batches (default 1 2 4)")
    options = parser.parse_args()
    if options.steps < 1 or not all(1 <= count <= BATCH for count in options.splits):
        parser.error(f"at least 1 step, and 1 to {BATCH} micro-batches")
    result = bh.launch(run, ["driver", "stage1", "stage2"], args=(options.steps, options.splits))[0]
    table = Table(title="A residual network in two stages")
    table.add_column("micro-batches", justify="right")
    table.add_column("images a second", justify="right")
    for count, speed in result["speeds"].items():
        table.add_row(str(count), f"{speed:.0f}")
    Console().print(table)
    print(f"loss {result['losses'][0]:.3f} at first, {result['losses'][-1]:.3f} at last")
    print(f"largest difference of a gradient to one process: {result['difference']:.1e}")


if __name__ == "__main__":
    main()
