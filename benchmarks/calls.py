"""Calls, side by side with ``torch.distributed.rpc``: one run, two processes each, alternating.

    make bench                       # all rows
    make bench ARGS="--quick"        # fewer repetitions
    make bench ARGS="--transport tcp"

Each row is measured in rounds: some calls through Backhaul, the same calls through the reference, and so on in
turn. Shown are the medians over all calls and their ratio (above 1: Backhaul is faster).
"""

from __future__ import annotations

import functools
import os
import socket
import statistics
import time

import torch
from harness import SYSTEMS, Row, conduct, options_of, play, report

CALLEE = "worker1"


def nothing() -> None:
    """The empty call."""


def echo(value: torch.Tensor) -> torch.Tensor:
    """Send a tensor back."""
    return value


def rows(quick: bool, name: str) -> list[Row]:
    """All rows."""
    scale, system = 4 if quick else 1, SYSTEMS[name]

    def sized(name: str, elements: int, calls: int) -> Row:
        value = torch.ones(elements)
        return Row(name, lambda: system.call(CALLEE, echo, args=(value,)), max(calls // scale, 2), 8)

    def many(count: int) -> Row:
        value = torch.ones(16)
        return Row(
            f"{count} async 16-float calls (per call)",
            lambda: system.wait([system.start(CALLEE, echo, args=(value,)) for _ in range(count)]),
            1,
            max(8 // scale, 3),
            count,
        )

    return [
        Row("empty call", lambda: system.call(CALLEE, nothing), 200 // scale, 8),
        sized("16-float echo", 16, 200),
        sized("64 KiB echo", 1 << 14, 100),
        sized("1 MiB echo", 1 << 18, 40),
        sized("16 MiB echo", 1 << 22, 10),
        sized("64 MiB echo", 1 << 24, 4),
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
    options = options_of(__doc__)
    if play(functools.partial(rows, options.quick), 2, options):
        return
    numbers = conduct()
    report(f"Calls ({options.transport})", f"calls-{options.transport}", numbers)
    speed, large = copy_speed(), 2 * (64 << 20) / numbers["64 MiB echo"][0]
    print(f"A byte over a bare Unix socket and back: {raw_echo() * 1e6:.1f} us")
    print(f"memcpy: {speed / 2**30:.1f} GiB/s; the 64 MiB echo: {large / 2**30:.1f} GiB/s, {large / speed:.0%} of that")


if __name__ == "__main__":
    main()
