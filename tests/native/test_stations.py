"""The benchmark of the stations runs with both twins. What it measures is not looked at."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from backhaul._native import core

BENCHMARK = Path(__file__).parent.parent.parent / "benchmarks" / "stations.py"


def test_stations() -> None:
    run = subprocess.run([sys.executable, str(BENCHMARK), "--rounds", "1"], capture_output=True, text=True, check=True)
    title, *rows = run.stdout.splitlines()
    twins = ["Python"] if core is None else ["Python", "core"]
    assert title.split()[-len(twins) :] == twins
    assert len(rows) == 2 * 4 * 4
    for row in rows:
        assert all(float(number) > 0 for number in row.split()[-len(twins) :])
