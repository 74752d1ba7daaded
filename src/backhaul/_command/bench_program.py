"""One process that ``backhaul bench`` measures: a worker of Backhaul or of the reference. Reads the names of rows
with how long to measure, and writes for each the time of one operation in seconds.
"""

from __future__ import annotations

import logging
import sys

import torch

from backhaul._command.bench_calls import CALLEE, BenchedSystem, measure, scale


def start_own(name: str, rank: int, size: int, store: str) -> BenchedSystem:
    """Become a worker of Backhaul."""
    import backhaul as bh

    logging.getLogger("backhaul").setLevel(logging.ERROR)
    bh.init(name, rank=rank, world_size=size, options=bh.Options(init_method=store))

    def gradient(x: torch.Tensor) -> torch.Tensor:
        x.grad = None
        bh.rpc_sync(CALLEE, scale, args=(x,)).sum().backward()
        assert x.grad is not None
        return x.grad

    return BenchedSystem(bh.rpc_sync, bh.rpc_async, bh.wait_all, gradient, bh.shutdown)


def main() -> None:
    """Its system, rank and store are its arguments. The callee ends with the caller, which ends with its input."""
    system, rank, store = sys.argv[1:]
    torch.set_num_threads(1)
    if system == "backhaul":
        start = start_own
    else:
        from backhaul._command.bench_reference import start
    name = "caller" if rank == "0" else CALLEE
    made = start(name, int(rank), 2, store)
    if rank == "0":
        print("ready", flush=True)
        for line in sys.stdin:
            row, seconds = line.split()
            print(measure(made, row, float(seconds)), flush=True)
    made.stop()


if __name__ == "__main__":
    main()
