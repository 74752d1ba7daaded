"""Three local workers call each other with tensors, and the driver prints what traveled.

python examples/hello_workers.py
python examples/hello_workers.py --workers 5 --size 2048
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import backhaul as bh

weights: dict[str, torch.Tensor] = {}


def hold(name: str, value: torch.Tensor) -> str:
    """Keep a tensor on the worker that runs this function."""
    weights[name] = value
    return f"{bh.get_worker_info().name} holds {name} {tuple(value.shape)}"


def apply(name: str, x: torch.Tensor, *, then: str | None = None) -> torch.Tensor:
    """Multiply by a held tensor. Pass the result on to the worker ``then``, if given."""
    y = x @ weights[name]
    return y if then is None else bh.rpc_sync(then, apply, args=(name, y))


def fail() -> None:
    """Raise an error, to show what a remote error looks like."""
    raise ValueError("this went wrong on purpose")


def run(size: int) -> list[tuple[str, ...]] | None:
    """Runs on every worker. The first worker makes the calls, the others serve."""
    me = bh.get_worker_info()
    if me.id != 0:
        return None
    others = [info.name for info in bh.get_worker_infos() if info.id != 0]
    lines: list[tuple[str, ...]] = []

    def note(what: str, start: float, sent: Any, result: Any) -> None:
        lines.append((what, describe(sent), describe(result), f"{(time.perf_counter() - start) * 1e3:.2f} ms"))

    torch.manual_seed(0)
    x, w = torch.randn(size, size), torch.randn(size, size) / size**0.5
    for name in others:
        start = time.perf_counter()
        note(f"{me.name} -> {name}: hold", start, w, bh.rpc_sync(name, hold, args=("w", w)))
    start = time.perf_counter()
    y = bh.rpc_sync(others[0], apply, args=("w", x))
    note(f"{me.name} -> {others[0]}: apply", start, x, y)
    assert torch.allclose(y, x @ w, atol=1e-4)
    if len(others) > 1:
        start = time.perf_counter()
        z = bh.rpc_sync(others[0], apply, args=("w", x), kwargs={"then": others[1]})
        note(f"{me.name} -> {others[0]} -> {others[1]}: apply twice", start, x, z)
        assert torch.allclose(z, x @ w @ w, atol=1e-3)
    start = time.perf_counter()
    rows = bh.wait_all([bh.rpc_async(others[n % len(others)], apply, args=("w", x[n])) for n in range(100)])
    note(f"{me.name} -> all: 100 rows at once", start, x[:100], torch.stack(rows))
    assert torch.allclose(torch.stack(rows), (x @ w)[:100], atol=1e-4)
    start = time.perf_counter()
    note(f"{me.name} -> {others[-1]}: a lambda", start, 20, bh.rpc_sync(others[-1], lambda n: n + 1, args=(20,)))
    start = time.perf_counter()
    try:
        bh.rpc_sync(others[0], fail)
    except ValueError as error:
        note(f"{me.name} -> {others[0]}: fail", start, None, error)
    return lines


def describe(value: Any) -> str:
    """Format a value for the table."""
    if isinstance(value, torch.Tensor):
        return f"{'x'.join(map(str, value.shape))} {value.dtype}, {value.nbytes / 1024:.0f} KiB".replace("torch.", "")
    return "nothing" if value is None else repr(value) if isinstance(value, Exception) else str(value)


def main() -> None:
    """Start the workers, and print what traveled."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=3, help="number of workers, at least 2 (default 3)")
    parser.add_argument("--size", type=int, default=512, help="side of the matrices, at least 100 (default 512)")
    options = parser.parse_args()
    if options.workers < 2 or options.size < 100:
        parser.error("at least 2 workers, and a size of at least 100")
    console = Console()
    start = time.perf_counter()
    with console.status(f"starting {options.workers} workers"):
        lines = bh.launch(run, options.workers, args=(options.size,))[0]
    table = Table(title=f"What traveled between {options.workers} local workers")
    for column in ("call", "sent", "came back", "time"):
        table.add_column(column, justify="right" if column == "time" else "left")
    for line in lines:
        table.add_row(*line)
    console.print(table)
    console.print(f"All results equal the local ones. {time.perf_counter() - start:.1f} s with start and stop.")


if __name__ == "__main__":
    main()
