"""What ``retry_step`` costs: time of a training step with and without it, over two worker processes of this host.

    .venv/bin/python benchmarks/retried_steps.py

All but the last layer is on the workers, and AdamW has two more tensors for each parameter. Each number is the best of
several rounds of ten steps.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch
from torch import nn

import backhaul as bh

WIDTHS = (64, 512, 1024, 2048)
LAYERS, ROWS, STEPS, ROUNDS = 6, 32, 10, 5
EVERY = (1, 10)


def seconds_of(step: Callable[[], object]) -> float:
    """Seconds of a step, on the average."""
    step()  # the first one may find that another way has changed the state
    begun = time.perf_counter()
    for _ in range(STEPS):
        step()
    return (time.perf_counter() - begun) / STEPS


def measure(width: int) -> str:
    """The row of one size."""
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(width, 1))
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()) / 2**20
    model = bh.nn.split(model, {str(n): f"w{1 + n * 2 // len(layers)}" for n in range(0, len(layers), 2)})
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(ROWS, width)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    ways: list[Callable[[], object]] = [step]
    ways += [functools.partial(bh.retry_step, step, (model, optimizer), snapshot_every=every) for every in EVERY]
    for way in ways:
        seconds_of(way)
    best = [min(each) for each in zip(*([seconds_of(way) for way in ways] for _ in range(ROUNDS)), strict=True)]
    return f"{size:8.1f} MiB " + " ".join(f"{seconds * 1e3:9.1f} ms" for seconds in best)


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    if bh.get_worker_info().name == "trainer":
        print(f"{'weights':>12} {'plain':>12} " + " ".join(f"{f'every {each}':>12}" for each in EVERY), flush=True)
        for width in WIDTHS:
            print(measure(width), flush=True)


if __name__ == "__main__":
    bh.launch(main, ["trainer", "w1", "w2"])
