"""A worker in a network namespace: ``namespaced.py <folder> <rank> <bind>``. Rank 0 drives, and is told what to do by
files that appear in the folder; it answers by others.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

import backhaul as bh


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def step() -> str:
    x = torch.ones(3, requires_grad=True)
    begun = time.monotonic()
    try:
        with bh.context() as ctx:
            loss = bh.rpc_sync("worker1", double, args=(x,), timeout=2.0).sum()
            bh.backward(ctx, [loss])
            assert bh.get_gradients(ctx)[x].tolist() == [2, 2, 2]
        return f"right {time.monotonic() - begun:.2f}"
    except bh.BackhaulError as error:
        return f"{type(error).__name__} about {error.worker} {time.monotonic() - begun:.2f}"


def main() -> None:
    folder, rank, bind = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    options = bh.Options(
        transport="tcp",
        bind=bind,
        init_method=f"file://{folder}/store",
        backward_timeout=3.0,
        connect_timeout=2.0,
        rendezvous_timeout=60.0,
        security=bh.Security(secret="of the namespaces", allow_plain=True),
    )
    bh.init(f"worker{rank}", rank=rank, world_size=2, options=options)
    (folder / f"up{rank}").touch()
    done = 0
    while not (folder / "end").exists():
        if rank == 0 and (folder / f"go{done}").exists():
            (folder / f"answer{done}.part").write_text(step())
            (folder / f"answer{done}.part").rename(folder / f"answer{done}")
            done += 1
        time.sleep(0.02)
    bh.shutdown(graceful=False)


if __name__ == "__main__":
    main()
