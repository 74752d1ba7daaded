"""Measures what a relay costs: calls to a worker that listens, and to one that another member relays.

    .venv/bin/python benchmarks/relayed.py

Four processes of this machine over TLS on loopback: one relays, one listens, and two do not listen. One of these two
calls the worker that listens, and the other one through the relay. Each time is the median.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import statistics
import tempfile
import time

import torch

import backhaul as bh

SIZES = {"16 floats": (16, 300), "1 MiB": (1 << 18, 50), "64 MiB": (1 << 24, 5)}
WAIT_SECONDS = 300.0
NAMES = "relay", "listens", "caller", "hidden"


def echo(x: torch.Tensor) -> torch.Tensor:
    """What the other worker does."""
    return x


def median_ms(to: str, elements: int, repeat: int) -> float:
    """The median of some calls, in milliseconds."""
    x, times = torch.ones(elements), []
    for _ in range(2 + repeat):
        begun = time.perf_counter()
        bh.rpc_sync(to, echo, args=(x,))
        times.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(times[2:])


def work(rank: int, folder: str) -> None:
    """One of the workers. The caller prints the table."""
    torch.set_num_threads(1)
    limits = bh.Limits(relayed=256 if NAMES[rank] == "relay" else 0)
    options = bh.Options(
        transport="tcp",
        listen=rank < 2,
        init_method=f"file://{folder}/store",
        security=bh.Security(secret="the secret of this benchmark", tls="auto"),
        limits=limits,
    )
    bh.init(NAMES[rank], rank=rank, world_size=len(NAMES), options=options)
    if NAMES[rank] == "caller":
        print("| echo of | worker that listens | through a relay |\n|---|---|---|")
        for size, (elements, repeat) in SIZES.items():
            direct, relayed = (median_ms(to, elements, repeat) for to in ("listens", "hidden"))
            print(f"| {size} | {direct:.2f} ms | {relayed:.2f} ms |", flush=True)
    bh.shutdown(timeout=WAIT_SECONDS)


def main() -> None:
    """Start the workers."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=work, args=(rank, folder)) for rank in range(len(NAMES))]
        for process in processes:
            process.start()
        for process in processes:
            process.join(WAIT_SECONDS)
            process.kill()


if __name__ == "__main__":
    main()
