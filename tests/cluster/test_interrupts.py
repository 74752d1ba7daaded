"""However a launch is ended, all of its processes end within seconds, and what is said is the first cause, once."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from .remote_functions import PATIENCE

PROGRAM = pathlib.Path(__file__).parent / "programs" / "interrupted.py"
SOON = 20.0  # seconds; much more than it takes, and much less than any timeout of the workers


def run(start_method: str, what: str, when: str, pause: float, how: str) -> tuple[int, str]:
    """Exit code and what was said. The pipe of the output is at its end only when every process has gone."""
    command = [sys.executable, PROGRAM, start_method, what]
    parent = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert parent.stdout is not None
    try:
        while when and when not in parent.stdout.readline():
            pass
        time.sleep(pause)
        begun = time.monotonic()
        if how == "ctrl-c":
            os.killpg(parent.pid, signal.SIGINT)
        elif how == "twice":
            os.killpg(parent.pid, signal.SIGINT)
            time.sleep(0.05)
            os.killpg(parent.pid, signal.SIGINT)
        elif how == "terminate":
            parent.terminate()
        _, said = parent.communicate(timeout=PATIENCE)
        assert time.monotonic() - begun < SOON or not how
        return parent.returncode, said
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()
        parent.stdout.close()
        assert parent.stderr is not None
        parent.stderr.close()


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
@pytest.mark.parametrize(
    ("when", "pause", "how"), [("starting", 0.1, "ctrl-c"), ("starting", 0.6, "twice"), ("busy", 0.0, "ctrl-c")]
)
def test_ctrl_c(start_method: str, when: str, pause: float, how: str) -> None:
    code, said = run(start_method, "hang", when, pause, how)
    assert code == -signal.SIGINT, said
    assert said.count("Traceback") == 1, said
    assert said.rstrip().endswith("KeyboardInterrupt"), said


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
@pytest.mark.parametrize(("when", "pause"), [("starting", 0.6), ("busy", 0.0)])
def test_the_parent_is_terminated(start_method: str, when: str, pause: float) -> None:
    code, said = run(start_method, "hang", when, pause, "terminate")
    assert code == -signal.SIGTERM
    assert "Traceback" not in said, said


@pytest.mark.parametrize(
    ("what", "cause"),
    [
        ("raise", "ValueError: the first cause"),
        ("terminate", "WorkerFailedError: worker 'worker1' was killed by SIGTERM before it had a result"),
    ],
)
def test_one_worker_fails(what: str, cause: str) -> None:
    code, said = run("spawn", what, "", 0.0, "")
    assert code == 1
    lines = said.splitlines()
    causes = [line for line in lines if line.endswith(cause) and not line.startswith(" ")]
    assert len(causes) in (1, 2), said  # once more in the worker's own traceback
    assert "PeerLostError" not in said, said
    assert said.count("Traceback (most") <= 2, said
