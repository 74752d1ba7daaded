"""``backhaul bench`` measures both systems, and says so if one of them fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .processes import run_command

pytestmark = pytest.mark.timeout(240)

ROWS = ["small", "large", "together", "gradient"]


def test_both_systems_are_measured() -> None:
    done = run_command("bench", "--rounds", "1", "--seconds", "0.02", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)["rows"]
    assert [each["row"] for each in found] == ROWS
    for each in found:
        assert each["backhaul"] > 0
        assert each["ratio"] == each["reference"] / each["backhaul"]


def test_a_system_that_fails_is_named(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so is missing')\n")
    done = run_command("bench", "--alone", environ={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1
    assert "'backhaul'" in done.stderr
    assert "libtorch.so is missing" in done.stderr
