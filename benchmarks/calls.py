"""Calls, side by side with ``torch.distributed.rpc``: one run, the same two processes, alternating.

    make bench                       # all rows
    make bench ARGS="--quick"        # fewer repetitions
    make bench ARGS="--transport tcp"

Each row is measured in rounds: some calls through Backhaul, the same calls through the reference, and so on in
turn. Shown are the medians over all calls and their ratio (above 1: Backhaul is faster).
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.rpc as reference
from rich.console import Console
from rich.table import Table

import backhaul as bh

CALLER, CALLEE = "worker0", "worker1"


def nothing() -> None:
    """The empty call."""


def echo(value: torch.Tensor) -> torch.Tensor:
    """Send a tensor back."""
    return value


@dataclass(frozen=True)
class Row:
    """One thing to measure, on both systems."""

    name: str
    ours: Callable[[], Any]
    theirs: Callable[[], Any]
    calls: int  # per round
    rounds: int
    per: int = 1  # how many calls one measurement contains


def rows(quick: bool) -> list[Row]:
    """All rows."""
    scale = 4 if quick else 1

    def sized(name: str, elements: int, calls: int, rounds: int) -> Row:
        value = torch.ones(elements)
        return Row(
            name,
            lambda: bh.rpc_sync(CALLEE, echo, args=(value,)),
            lambda: reference.rpc_sync(CALLEE, echo, args=(value,)),
            max(calls // scale, 2),
            rounds,
        )

    def many(count: int) -> Row:
        value = torch.ones(16)
        return Row(
            f"{count} async 16-float calls (per call)",
            lambda: bh.wait_all([bh.rpc_async(CALLEE, echo, args=(value,)) for _ in range(count)]),
            lambda: torch.futures.wait_all(
                [reference.rpc_async(CALLEE, echo, args=(value,)) for _ in range(count)]
            ),
            1,
            max(8 // scale, 3),
            count,
        )

    return [
        Row(
            "empty call",
            lambda: bh.rpc_sync(CALLEE, nothing),
            lambda: reference.rpc_sync(CALLEE, nothing),
            200 // scale,
            8,
        ),
        sized("16-float echo", 16, 200, 8),
        sized("1 MiB echo", 1 << 18, 40, 8),
        sized("64 MiB echo", 1 << 24, 4, 8),
        many(2000),
    ]


def measure(row: Row) -> tuple[float, float]:
    """Medians of ours and theirs, in seconds per call."""
    times: tuple[list[float], list[float]] = ([], [])
    for round_ in range(-1, row.rounds):  # round -1 warms up and is thrown away
        for system, call in enumerate((row.ours, row.theirs)):
            for _ in range(row.calls):
                start = time.perf_counter()
                call()
                if round_ >= 0:
                    times[system].append((time.perf_counter() - start) / row.per)
    return statistics.median(times[0]), statistics.median(times[1])


def run(port: int, quick: bool) -> dict[str, tuple[float, float]] | None:
    """Runs in both workers: join the reference's cluster too; the caller measures."""
    me = bh.get_worker_info()
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE")
    reference.init_rpc(
        me.name,
        rank=me.id,
        world_size=2,
        rpc_backend_options=reference.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}"),
    )
    result = None
    if me.name == CALLER:
        result = {row.name: measure(row) for row in rows(quick)}
    reference.shutdown()
    return result


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def show(seconds: float) -> str:
    """A duration for people."""
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def main() -> None:
    """Measure, print the table, keep the numbers in ``benchmarks/out``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--transport", choices=("auto", "unix", "tcp"), default="auto")
    options = parser.parse_args()
    results = bh.launch(
        run, 2, args=(free_port(), options.quick), options=bh.Options(transport=options.transport)
    )[0]
    table = Table(title=f"Backhaul ({options.transport}) and torch.distributed.rpc {torch.__version__}, medians")
    for column in ("", "Backhaul", "reference", "ratio"):
        table.add_column(column, justify="right" if column else "left")
    for name, (ours, theirs) in results.items():
        table.add_row(name, show(ours), show(theirs), f"{theirs / ours:.2f}x")
    Console().print(table)
    out = Path(__file__).parent / "out"
    out.mkdir(exist_ok=True)
    numbers = {name: {"backhaul_s": ours, "reference_s": theirs} for name, (ours, theirs) in results.items()}
    (out / f"calls-{options.transport}.json").write_text(json.dumps(numbers, indent=2) + "\n")


if __name__ == "__main__":
    main()
