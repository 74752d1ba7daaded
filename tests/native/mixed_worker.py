"""One worker of a cluster whose workers run with and without the native core; see ``test_mixed_cluster``.

Worker 0 runs random programs and compares them with plain autograd. It prints what differs, and how many programs put
gradients on several workers.
"""

from __future__ import annotations

import json
import random
import sys
import warnings

import torch
from torch.distributed import TCPStore

import backhaul as bh
from backhaul import _native
from backhaul.testing.oracle import compare, run_distributed, run_locally, run_plain
from backhaul.testing.programs import make_program

SECONDS = 60.0


def has_core() -> bool:
    return _native.core is not None


def run_programs(workers: int, programs: int) -> dict[str, object]:
    differences, reached = [], 0
    warnings.filterwarnings("ignore", message="Using backward")  # plain autograd, with create_graph
    for seed in range(programs):
        program = make_program(random.Random(seed).randrange, workers=workers, length=12, thorough=True)
        order = 1 + seed % 2
        expected = run_locally(program, order=order)
        reached += len({worker for (worker, _), grad in expected.grads.items() if grad is not None}) > 1
        for run in (run_distributed, run_plain):
            differences += compare(expected, run(program, order=order))
    cores = [bh.rpc_sync(number, has_core) for number in range(workers)]
    return {"cores": cores, "differences": differences, "reached": reached}


def main() -> None:
    rank, workers, port, programs = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    bh.init(f"worker{rank}", rank=rank, world_size=workers, store=store, options=bh.Options(timeout=SECONDS))
    try:
        if rank == 0:
            print(json.dumps(run_programs(workers, programs)))
    finally:
        bh.shutdown(timeout=SECONDS)


if __name__ == "__main__":
    main()
