"""What graphs of other losses cost a step: CPU time of a step while many graphs outside contexts are alive.

    .venv/bin/python benchmarks/live_graphs.py

Both workers run in this process, on one thread of torch. Each number is the best of several rounds.
"""

from __future__ import annotations

import time

import torch

import backhaul as bh

NODES, ROUNDS, STEPS = 10, 8, 20
LIVE = (0, 10, 100, 1000)
weight = torch.nn.Parameter(torch.ones(8))


def layers(x: torch.Tensor) -> torch.Tensor:
    """Twenty nodes of a graph."""
    for _ in range(NODES):
        x = torch.tanh(x * weight)
    return x


def step(x: torch.Tensor) -> None:
    """A forward and a backward over both workers."""
    bh.rpc_sync("worker1", layers, args=(x,)).sum().backward()


def best(x: torch.Tensor) -> float:
    """CPU seconds of a step, of both workers together."""
    found = []
    for _ in range(ROUNDS):
        start = time.process_time()
        for _ in range(STEPS):
            step(x)
        found.append((time.process_time() - start) / STEPS)
    return min(found)


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    x, held, first = torch.ones(8, requires_grad=True), [], 0.0
    with bh.cluster(2):
        for live in LIVE:
            while len(held) < live:
                held.append(bh.rpc_sync("worker1", layers, args=(x,)))
            best(x)
            seconds = best(x)
            first = first or seconds
            print(f"{live:5} other graphs alive: {seconds * 1e6:.0f} us a step, {seconds / first:.2f} of the first row")


if __name__ == "__main__":
    main()
