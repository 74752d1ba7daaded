"""Starts workers that never end by themselves, or of which one fails.

interrupted.py START_METHOD WHAT
"""

from __future__ import annotations

import os
import signal
import sys
import threading

import backhaul as bh


def work(what: str) -> None:
    me = bh.get_worker_info().id
    bh.rpc_sync((me + 1) % 3, os.getpid)
    if me == 1 and what == "raise":
        raise ValueError("the first cause")
    if me == 1 and what == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)
    os.write(1, b"busy\n")
    if me == 0:
        bh.rpc_sync("worker1", wait, timeout=0)
    wait()


def wait() -> None:
    threading.Event().wait()


if __name__ == "__main__":
    os.write(1, b"starting\n")
    bh.launch(work, 3, args=(sys.argv[2],), start_method=sys.argv[1])
