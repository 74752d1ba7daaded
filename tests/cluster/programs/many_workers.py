"""Starts many workers, each of which calls a few others. Prints whom each one heard, as JSON.

many_workers.py COUNT
"""

from __future__ import annotations

import json
import sys

import backhaul as bh


def call_around(count: int) -> list[str]:
    rank = bh.get_worker_info().id
    futures = [bh.rpc_async((rank + step) % count, bh.get_worker_info) for step in (1, 2, 8, 32)]
    return [info.name for info in bh.wait_all(futures)]


if __name__ == "__main__":
    count = int(sys.argv[1])
    print(json.dumps(bh.launch(call_around, count, args=(count,), start_method="forkserver")))
