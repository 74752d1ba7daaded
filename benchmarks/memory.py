"""Memory of two workers that echo large tensors: it stays flat.

    make memory                          # 64 MiB echoes for 10 seconds
    make memory ARGS="--seconds 60"

Prints, at intervals, what each process has in memory (its own, and shared) and how much shared memory it has made.
Ends with an error if any of it has grown since the first interval.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import backhaul as bh

MIB = 1 << 20
CALLEE = "worker1"
SLACK = 96 * MIB  # what may come and go: one tensor, and what the allocator keeps
Sample = tuple[float, int, list[dict[str, int]]]


def echo(value: torch.Tensor) -> torch.Tensor:
    """Send a tensor back."""
    return value


def memory() -> dict[str, int]:
    """Of this process, in bytes."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    own, shared = (int(status[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))
    return {"own": own, "mapped": shared, "made": bh.get_debug_info()["shm_bytes"]}


def watch(size: int, seconds: float, intervals: int) -> list[Sample]:
    """Runs in every worker; worker 0 calls and takes samples."""
    if bh.get_worker_info().id:
        return []
    value = torch.ones(size // 4)
    for _ in range(8):  # until there are slots, and the memory is in use
        bh.rpc_sync(CALLEE, echo, args=(value,))
    samples: list[Sample] = []
    start, calls = time.monotonic(), 0
    while len(samples) < intervals:
        assert bh.rpc_sync(CALLEE, echo, args=(value,)).shape == value.shape
        calls += 1
        if time.monotonic() - start >= seconds * (len(samples) + 1) / intervals:
            samples.append((time.monotonic() - start, calls, [memory(), bh.rpc_sync(CALLEE, memory)]))
    return samples


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--mib", type=int, default=64, help="size of the tensor")
    parser.add_argument("--intervals", type=int, default=10)
    options = parser.parse_args()
    samples = bh.launch(watch, 2, args=(options.mib * MIB, options.seconds, options.intervals))[0]
    table = Table(title=f"{options.mib} MiB echoes; memory in MiB, caller / callee")
    for column in ("seconds", "echoes", "own", "shared, mapped", "shared, made"):
        table.add_column(column, justify="right")
    for seconds, calls, both in samples:
        shown = (" / ".join(f"{one[kind] / MIB:.0f}" for one in both) for kind in ("own", "mapped", "made"))
        table.add_row(f"{seconds:.0f}", str(calls), *shown)
    Console().print(table)
    first, last = samples[0][2], samples[-1][2]
    grown = [kind for kind in first[0] if any(last[n][kind] > first[n][kind] + SLACK for n in range(2))]
    if grown:
        sys.exit(f"memory has grown: {', '.join(grown)}")


if __name__ == "__main__":
    main()
