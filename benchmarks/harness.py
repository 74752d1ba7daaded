"""Two systems side by side: rows that are measured on both in one run, alternating, and the table of their ratios."""

from __future__ import annotations

import json
import os
import socket
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import torch
import torch.distributed.rpc as reference
from rich.console import Console
from rich.table import Table

import backhaul as bh

OUT = Path(__file__).parent / "out"
Numbers = dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Row:
    """One thing to measure, on both systems."""

    name: str
    ours: Callable[[], Any]
    theirs: Callable[[], Any]
    calls: int  # per round
    rounds: int
    per: int = 1  # how many calls one measurement contains


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


def side_by_side(rows: Callable[[], list[Row]], port: int, threads: int = 16) -> Numbers | None:
    """Runs in every worker: join the reference's cluster too (with so many threads); worker 0 measures."""
    me = bh.get_worker_info()
    join_reference(me.name, me.id, len(bh.get_worker_infos()), port, threads)
    result = {row.name: measure(row) for row in rows()} if me.id == 0 else None
    reference.shutdown()
    return result


def join_reference(name: str, rank: int, count: int, port: int, threads: int = 16) -> None:
    """Become a worker of the reference's cluster."""
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    warnings.filterwarnings("ignore", message="You are using a Backend")  # its own business
    reference.init_rpc(
        name,
        rank=rank,
        world_size=count,
        rpc_backend_options=reference.TensorPipeRpcBackendOptions(
            num_worker_threads=threads, init_method=f"tcp://127.0.0.1:{port}"
        ),
    )


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def show(seconds: float) -> str:
    """A duration for people."""
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def report(title: str, name: str, numbers: Numbers) -> None:
    """Print the table, keep the numbers in ``benchmarks/out``."""
    table = Table(title=f"{title}; reference: torch {torch.__version__}; medians")
    for column in ("", "Backhaul", "reference", "ratio"):
        table.add_column(column, justify="right" if column else "left")
    for row, (ours, theirs) in numbers.items():
        table.add_row(row, show(ours), show(theirs), f"{theirs / ours:.2f}x")
    Console().print(table)
    OUT.mkdir(exist_ok=True)
    kept = {row: {"backhaul_s": ours, "reference_s": theirs} for row, (ours, theirs) in numbers.items()}
    (OUT / f"{name}.json").write_text(json.dumps(kept, indent=2) + "\n")
    (OUT / f"{name}.svg").write_text(_plot(title, {row: theirs / ours for row, (ours, theirs) in numbers.items()}))
    print(f"Kept in benchmarks/out/{name}.json and {name}.svg")


def _plot(title: str, ratios: dict[str, float]) -> str:
    """How many times faster each row is, as a picture."""
    left, wide, high, most = 330, 360, 26, max(*ratios.values(), 1.0)
    height = high * len(ratios) + 70
    one = left + wide / most
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + wide + 80}" height="{height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="100%" height="100%" fill="white"/><text x="16" y="26" font-size="15">{escape(title)}: '
        f"times faster than torch {escape(torch.__version__)}</text>",
    ]
    for place, (row, ratio) in enumerate(ratios.items()):
        y, width = 44 + place * high, wide * ratio / most
        colour = "#44aa99" if ratio >= 1 else "#cc6677"
        parts.append(
            f'<text x="{left - 10}" y="{y + 15}" text-anchor="end">{escape(row)}</text>'
            f'<rect x="{left}" y="{y}" width="{width:.1f}" height="{high - 6}" fill="{colour}"/>'
            f'<text x="{left + width + 6:.1f}" y="{y + 15}">{ratio:.2f}</text>'
        )
    parts.append(
        f'<line x1="{one:.1f}" x2="{one:.1f}" y1="38" y2="{height - 24}" stroke="#333" stroke-dasharray="4 3"/>'
        f'<text x="{one:.1f}" y="{height - 8}" text-anchor="middle">as fast as the reference</text></svg>'
    )
    return "\n".join(parts) + "\n"
