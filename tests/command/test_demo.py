"""``backhaul demo``: all of its steps run and check themselves, and no process is left."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest

from .processes import run_command

pytestmark = pytest.mark.timeout(240)


def test_the_tour(tmp_path: Path) -> None:
    done = run_command("demo", "--report", "report.html", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.findall(r"^(\d)\. ", done.stdout, re.MULTILINE) == list("12345")
    assert len(re.findall("as in one process|of that of one process", done.stdout)) == 4
    assert "PeerLostError: lost worker 'right'" in done.stdout
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert max(map(len, done.stdout.splitlines())) <= 100
    left = [int(pid) for pid in re.findall(r"process (\d+)", done.stdout)]
    assert len(left) >= 3
    assert not any(psutil.pid_exists(pid) for pid in left)


def test_a_failure_points_to_the_doctor(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so is missing')\n")
    done = run_command("demo", environ={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1
    assert done.stderr.startswith("backhaul demo: the demo failed: ImportError: libtorch.so is missing")
    assert "backhaul doctor" in done.stderr


def test_a_report_that_cannot_be_written_is_refused_before_the_tour(tmp_path: Path) -> None:
    done = run_command("demo", "--report", "nonsense/report.html", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--report" in done.stderr
