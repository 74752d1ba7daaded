"""The leak checker notices what it should."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from multiprocessing import shared_memory

import pytest

from backhaul.testing.snapshots import take_snapshot

HOLDER = """
from multiprocessing import shared_memory

segment = shared_memory.SharedMemory(create=True, size=16)
print(segment.name, flush=True)
input()
segment.close()
segment.unlink()
"""


def test_notices_a_thread_a_descriptor_a_process_and_a_segment() -> None:
    before = take_snapshot()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="leaky")
    thread.start()
    reading, writing = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    segment = shared_memory.SharedMemory(create=True, size=16)
    found = "; ".join(take_snapshot().beyond(before))
    stop.set()
    thread.join()
    process.communicate()
    segment.close()
    segment.unlink()
    for fd in (reading, writing):
        os.close(fd)
    assert "leaky" in found
    assert f"{reading} ->" in found
    assert f"{writing} ->" in found
    assert str(process.pid) in found
    assert segment.name in found
    assert take_snapshot().beyond(before) == []


@pytest.mark.parametrize(("worker", "noticed"), [("this", True), ("another", False)])
def test_segments_of_tests_that_run_beside_these_are_theirs(
    worker: str, noticed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "this")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        env={**os.environ, "PYTEST_XDIST_WORKER": worker},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        name = holder.stdout.readline().strip()
        found = {each for each, _ in take_snapshot().segments}
    finally:
        holder.communicate("\n")
    assert (name in found) == noticed


WITHOUT_PYTEST = """
import sys

sys.modules["pytest"] = None  # every import of it raises

import backhaul.testing
from backhaul.testing import faults, oracle, programs, proxy, snapshots

print(sorted(name for name in sys.modules if name.startswith("_pytest")))
"""


def test_the_package_does_not_need_pytest() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_PYTEST], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
