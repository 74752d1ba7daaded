"""What takes the course of a step apart by wrapping methods still finds them. What it measures is not looked at."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.mark.parametrize(
    ("case", "stages"), [("echo", ["CallClient.call >"]), ("chain", ["Engine.backward >", "Leaves.compute <"])]
)
def test_stages(case: str, stages: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "stages.py", case, "--repeat", "3", "--one"],
        cwd=BENCHMARKS,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for stage in ["START", *stages, "END"]:
        assert f"worker0/1: {stage}" in done.stdout, done.stdout
    assert "worker1/" in done.stdout


def test_hostile() -> None:
    done = subprocess.run(
        [sys.executable, "hostile.py", "--settle", "0.1"],
        cwd=BENCHMARKS,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("800,000 empty lists") == 1, done.stdout
