"""Tensors through shared memory and through the socket, by size: one run, the same two processes, alternating.

    .venv/bin/python benchmarks/slots.py

Shown are medians over all calls and their ratio (above 1: shared memory is faster). That is where
``transport.shm.THRESHOLD`` comes from.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from report import show
from rich.console import Console
from rich.table import Table

import backhaul as bh
from backhaul._transport.shm import host_memory

CALLEE = "worker1"
KIB = 1 << 10
SIZES = [size * KIB for size in (16, 32, 64, 128, 256, 1024, 4096, 16384, 65536)]
NEVER, ALWAYS = 1 << 60, 1


def echo(value: torch.Tensor) -> torch.Tensor:
    """There and back."""
    return value


def take(value: torch.Tensor) -> None:
    """There only."""


def set_threshold(size: int) -> None:
    """For what this worker sends."""
    host_memory.THRESHOLD = size


def measure(function: Callable[..., Any], size: int, rounds: int = 8) -> tuple[float, float]:
    """Medians through the socket and through slots, in seconds per call."""
    value, calls = torch.ones(size // 4), 60 if size <= 1024 * KIB else 6
    times: dict[int, list[float]] = {NEVER: [], ALWAYS: []}
    for round_ in range(-1, rounds):  # round -1 warms up and is thrown away
        for threshold, kept in times.items():
            set_threshold(threshold)
            bh.rpc_sync(CALLEE, set_threshold, args=(threshold,))
            for _ in range(calls):
                start = time.perf_counter()
                bh.rpc_sync(CALLEE, function, args=(value,))
                if round_ >= 0:
                    kept.append(time.perf_counter() - start)
    return statistics.median(times[NEVER]), statistics.median(times[ALWAYS])


def measure_all() -> dict[str, tuple[float, float]]:
    """Runs in every worker; worker 0 measures."""
    if bh.get_worker_info().id:
        return {}
    return {
        f"{name}, {size // KIB} KiB": measure(function, size)
        for name, function in (("echo", echo), ("one way", take))
        for size in SIZES
    }


def main() -> None:
    """Measure and print."""
    table = Table(title="Through the socket and through shared memory; medians")
    for column in ("", "socket", "slots", "ratio"):
        table.add_column(column, justify="right" if column else "left")
    for name, (socket, slots) in bh.launch(measure_all, 2)[0].items():
        table.add_row(name, show(socket), show(slots), f"{socket / slots:.2f}x")
    Console().print(table)


if __name__ == "__main__":
    main()
