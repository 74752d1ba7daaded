"""A user's script for torchrun: everything about the cluster comes from the environment. Writes what it saw as JSON.

torchrun --nproc-per-node N under_torchrun.py FOLDER
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
from typing import Any

import torch

import backhaul as bh

served: list[str] = []


def serve(caller: str) -> list[str]:
    served.append(caller)
    return sorted(served)


def outcome_of(function: Any, *args: Any) -> list[Any]:
    try:
        return ["result", function(*args)]
    except bh.BackhaulError as error:
        return [type(error).__name__, error.worker]


def main(folder: pathlib.Path) -> None:
    rank = int(os.environ["RANK"])
    found: dict[str, Any] = {"before": outcome_of(bh.rpc_sync, "worker0", torch.ones, (1,))}
    found["nothing to shut down"] = bh.shutdown()
    bh.init()
    found["names"] = [info.name for info in bh.get_worker_infos()]
    found["me"] = bh.get_worker_info().name
    for info in bh.get_worker_infos():
        bh.rpc_sync(info, serve, args=(found["me"],))
    found["sum"] = bh.rpc_sync("worker0", torch.add, args=(torch.ones(2), rank)).tolist()
    bh.shutdown()
    found["served"] = sorted(served)
    found["after"] = outcome_of(bh.rpc_sync, "worker0", torch.ones, (1,))
    bh.init(f"again{rank}")
    found["again"] = bh.rpc_sync("again0", bh.get_worker_info).name
    bh.shutdown()
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
