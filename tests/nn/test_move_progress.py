"""Long moves are shown on a terminal, which is a pty here. A move is long until the test lets it end."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

SECONDS = 90.0

# The model waits wherever it arrives, and its state waits where it is read, until the test makes a file.
PROGRAM = """
import os, time
import torch
import backhaul as bh

is_trainer = False

def wait_for(name):
    deadline = time.monotonic() + 60
    while not os.path.exists(name) and time.monotonic() < deadline:
        time.sleep(0.01)

class Slow(torch.nn.Linear):
    def __setstate__(self, state):
        super().__setstate__(state)
        wait_for("back" if is_trainer else "moved")

    def state_dict(self, *args, **kwargs):
        wait_for("saved")
        return super().state_dict(*args, **kwargs)

def main():
    if bh.get_worker_info().name != "trainer":
        return
    global is_trainer
    is_trainer = True
    model = torch.nn.Sequential(Slow(500, 500), torch.nn.Linear(500, 500))
    model = bh.nn.split(model, {"0": "w1", "1": "w1"})
    print("split", flush=True)
    model.state_dict()
    print("saved", flush=True)
    model = bh.nn.gather(model)
    print("gathered", flush=True)

if __name__ == "__main__":
    bh.launch(main, ["trainer", "w1"])
"""


def run(folder: Path, stderr: int, environ: dict[str, str]) -> subprocess.Popen[str]:
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, "program.py"]
    env = {**os.environ, "TERM": "xterm", **environ}
    return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=stderr, text=True)


def test_long_moves_are_shown_on_a_terminal(tmp_path: Path) -> None:
    near, far = os.openpty()
    process = run(tmp_path, far, {})
    os.close(far)
    seen = ""

    def until(wanted: Callable[[str], bool]) -> str:
        """What the terminal got since the last call."""
        nonlocal seen
        deadline = time.monotonic() + SECONDS
        while not wanted(seen):
            assert select.select([near], [], [], max(deadline - time.monotonic(), 0.0))[0], seen
            seen += os.read(near, 4096).decode()
        found, seen = seen, ""
        return found

    try:
        assert process.stdout is not None
        until(lambda text: "\r\033[Kbackhaul: moving 2 modules to w1: 2.0 MB of 2.0 MB, 2 s" in text)
        (tmp_path / "moved").touch()
        assert process.stdout.readline() == "split\n"
        assert until(lambda text: "copying state from w1: " in text).count("\r\033[K") > 1  # the other line is gone
        (tmp_path / "saved").touch()
        assert process.stdout.readline() == "saved\n"
        until(lambda text: "moving 2 modules from w1: " in text)
        (tmp_path / "back").touch()
        assert process.stdout.readline() == "gathered\n"
        assert until(lambda text: text.endswith("\r\033[K"))
        assert process.wait(SECONDS) == 0
    finally:
        process.kill()
        process.communicate()
        os.close(near)
