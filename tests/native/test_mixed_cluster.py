"""Workers with and without the native core in one cluster, as processes: random programs give the right gradients."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from backhaul._native import build, core

ROOT = Path(__file__).parents[2]
PROGRAMS = 16
SECONDS = 90.0


@pytest.mark.skipif(core is None, reason="needs the native core")
def test_random_programs() -> None:
    with_core = [True, False, True]
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    workers: list[subprocess.Popen[str]] = []
    try:
        for rank, uses in enumerate(with_core):
            environment = dict(os.environ)
            if not uses:
                environment[build.SWITCH] = "0"
            arguments = map(str, (rank, len(with_core), store.port, PROGRAMS))
            command = [sys.executable, "-m", "tests.native.mixed_worker", *arguments]
            workers.append(subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True))
        said = [worker.communicate(timeout=SECONDS)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert [worker.returncode for worker in workers] == [0] * len(with_core)
    found = json.loads(said[0])
    assert found["cores"] == with_core
    assert found["differences"] == []
    assert found["reached"] > PROGRAMS // 2
