"""A worker of any launcher: rank 0 works, the others serve. Where it dies depends on the arguments.

Arguments: a folder, and a scenario: ``meet``, ``restarts`` or ``elastic``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

import backhaul as bh


def whoami() -> str:
    return bh.get_worker_info().name


def main(folder: Path, scenario: str) -> None:
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if scenario == "restarts" and attempt == 0 and os.environ["RANK"] == "1":
        os._exit(3)  # before init, while rank 0 waits in it
    lost = threading.Event()
    me = bh.init().info
    if me.id != 0:
        bh.serve()
        return
    bh.on_membership(lambda event: lost.set())
    names = [bh.rpc_sync(info, whoami) for info in bh.get_worker_infos()]
    if scenario == "restarts" and attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with open(folder / "met", "a") as file:
        file.write(json.dumps(names) + "\n")
    if scenario == "elastic" and not (len(names) == 2 and (folder / "finish").exists()):
        lost.wait(100)  # until another node comes, or one of the three goes
        raise RuntimeError("the cluster has changed")
    bh.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
