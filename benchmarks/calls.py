"""Calls, side by side with ``torch.distributed.rpc``: one run, the same two processes, alternating.

    make bench                       # all rows
    make bench ARGS="--quick"        # fewer repetitions
    make bench ARGS="--transport tcp"

Each row is measured in rounds: some calls through Backhaul, the same calls through the reference, and so on in
turn. Shown are the medians over all calls and their ratio (above 1: Backhaul is faster).
"""

from __future__ import annotations

import argparse
import functools
import os
import socket
import statistics
import time

import torch
import torch.distributed.rpc as reference
from harness import Row, free_port, report, side_by_side

import backhaul as bh

CALLEE = "worker1"


def nothing() -> None:
    """The empty call."""


def echo(value: torch.Tensor) -> torch.Tensor:
    """Send a tensor back."""
    return value


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
            lambda: torch.futures.wait_all([reference.rpc_async(CALLEE, echo, args=(value,)) for _ in range(count)]),
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
        sized("64 KiB echo", 1 << 14, 100, 8),
        sized("1 MiB echo", 1 << 18, 40, 8),
        sized("16 MiB echo", 1 << 22, 10, 8),
        sized("64 MiB echo", 1 << 24, 4, 8),
        many(2000),
    ]


# What there is to win at most.


def raw_echo(count: int = 2000) -> float:
    """Seconds that a byte needs to another process and back, over a Unix socket, from Python."""
    here, there = socket.socketpair()
    child = os.fork()
    if child == 0:
        while data := there.recv(1):
            there.send(data)
            if data == b"e":
                os._exit(0)
    times = []
    for _ in range(count):
        start = time.perf_counter()
        here.send(b"x")
        here.recv(1)
        times.append(time.perf_counter() - start)
    here.send(b"e")
    os.waitpid(child, 0)
    return statistics.median(times)


def copy_speed(count: int = 20) -> float:
    """Bytes per second that this machine copies, 64 MiB at a time."""
    source, target = torch.ones(1 << 24), torch.ones(1 << 24)
    times = []
    for _ in range(count):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return source.nbytes / statistics.median(times)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--transport", choices=("auto", "unix", "tcp"), default="auto")
    options = parser.parse_args()
    numbers = bh.launch(
        side_by_side,
        2,
        args=(functools.partial(rows, options.quick), free_port()),
        options=bh.Options(transport=options.transport),
    )[0]
    report(f"Calls ({options.transport})", f"calls-{options.transport}", numbers)
    speed, large = copy_speed(), 2 * (64 << 20) / numbers["64 MiB echo"][0]
    print(f"A byte over a bare Unix socket and back: {raw_echo() * 1e6:.1f} us")
    print(f"memcpy: {speed / 2**30:.1f} GiB/s; the 64 MiB echo: {large / 2**30:.1f} GiB/s, {large / speed:.0%} of that")


if __name__ == "__main__":
    main()
