"""What a profile costs while it is open: the same calls without one, with one that records no operations, and with one
that does, alternating.

    .venv/bin/python benchmarks/profiling.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

import backhaul as bh

ROUNDS, CALLS, STEPS = 7, 300, 100


def nothing() -> None:
    """An empty call."""


def double(x: torch.Tensor) -> torch.Tensor:
    """A small one."""
    return x * 2


def step() -> None:
    """The smallest forward, backward and release."""
    x = torch.ones(16, requires_grad=True)
    with bh.context() as ctx:
        bh.backward(ctx, [bh.rpc_sync("worker1", double, args=(x,)).sum()])


def measure(function: Callable[[], None], count: int) -> float:
    """The median of some, in microseconds."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def work() -> dict[str, list[tuple[float, float]]] | None:
    """Runs in both workers; the first measures."""
    if bh.get_worker_info().id:
        return None
    found: dict[str, list[tuple[float, float]]] = {"no profile": [], "without operations": [], "profile": []}

    def both() -> tuple[float, float]:
        return measure(lambda: bh.rpc_sync("worker1", nothing), CALLS), measure(step, STEPS)

    both()
    for _ in range(ROUNDS):
        found["no profile"].append(both())
        with bh.profile(ops=False):
            found["without operations"].append(both())
        with bh.profile():
            found["profile"].append(both())
    return found


def main() -> None:
    """Print medians, and ratios to no profile."""
    found = bh.launch(work, 2)[0]
    plain = [statistics.median(column) for column in zip(*found["no profile"], strict=True)]
    print(f"{'':20} {'empty call':>18} {'1 hop, forward and backward':>30}")
    for name, rows in found.items():
        call, whole = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"{name:20} {call:8.0f} us ({call / plain[0]:4.2f}) {whole:20.0f} us ({whole / plain[1]:4.2f})")


if __name__ == "__main__":
    main()
