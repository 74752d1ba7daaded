"""What each worker of ``backhaul doctor --hosts`` runs: it calls every other worker, and prints how long that took."""

from __future__ import annotations

import socket
import statistics
import time

import torch

_CALLS = 20


def main() -> None:
    """Meet, call, and end."""
    import backhaul as bh

    me = bh.init()
    for other in bh.get_worker_infos():
        if other != me.info:
            host = bh.rpc_sync(other.name, socket.gethostname)
            took = statistics.median(_time(other.name) for _ in range(_CALLS))
            print(f"{me.name} on {socket.gethostname()} calls {other.name} on {host}: {took * 1e6:.0f} us")
    bh.shutdown()


def _time(name: str) -> float:
    import backhaul as bh

    began = time.perf_counter()
    bh.rpc_sync(name, torch.neg, args=(torch.ones(4),))
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
