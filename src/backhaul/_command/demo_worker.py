"""A worker process of ``backhaul demo``: serves until the command is gone."""

from __future__ import annotations

import logging
import os
import sys
import threading


def main() -> None:
    """Its name, rank, number of workers and store are its arguments. The secret is in the environment."""
    name, rank, size, store = sys.argv[1:]
    threading.Thread(target=_follow, daemon=True).start()
    logging.getLogger("backhaul").setLevel(logging.CRITICAL)  # the command tells of the loss
    import backhaul as bh

    bh.init(name, rank=int(rank), world_size=int(size), options=bh.Options(init_method=store))
    try:
        bh.serve()
    except bh.errors.WorkersLostError:  # as the last step of the demo wants it
        pass


def _follow() -> None:
    """The input ends with the command, however that ends."""
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
