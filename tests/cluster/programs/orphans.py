"""Starts workers that never end by themselves; each says its process id once it is busy.

orphans.py START_METHOD
"""

from __future__ import annotations

import os
import sys
import threading

import backhaul as bh


def hang() -> None:
    """Block in every way a worker can: in a call, in a handler, in user code, and in shutdown."""
    me = bh.get_worker_info().id
    if me == 0:
        bh.rpc_sync("worker1", say_and_wait, timeout=0)
    elif me == 2:
        say_and_wait()
    elif me == 3:
        bh.rpc_async("worker1", say_and_wait, timeout=0)
        bh.shutdown(timeout=10_000)


def say_and_wait() -> None:
    os.write(1, f"{os.getpid()}\n".encode())
    threading.Event().wait()


if __name__ == "__main__":
    bh.launch(hang, 4, start_method=sys.argv[1])
