"""A program computes the same before its migration, with torch.distributed.rpc, and after it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from tests.command.processes import run_command

# Not a .py file, since pytest would import it for its doctests, and torch warns of its own module.
PROGRAM = Path(__file__).parent / "embedding_server.txt"


def losses(program: Path) -> list[list[float]]:
    store = program.with_suffix(".store")
    command = [sys.executable, str(program), str(store)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return [[float(number) for number in line.split()] for line in done.stdout.splitlines()]


def test_a_program_computes_the_same(tmp_path: Path) -> None:
    before, after = tmp_path / "before.py", tmp_path / "after.py"
    shutil.copy(PROGRAM, before)
    shutil.copy(PROGRAM, after)
    done = run_command("migrate", "--write", str(after))
    assert (done.returncode, done.stderr) == (0, "")
    assert "torch.distributed" not in after.read_text().partition('"""\n')[2]
    expected = losses(before)
    assert len(expected) == 2
    assert expected[0][0] > expected[0][2] > 0, "it trains"
    assert losses(after) == expected


def test_nothing_is_written_unless_asked_for(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import torch.distributed.rpc as rpc\nrpc.shutdown()\n")
    done = run_command("migrate", str(tmp_path))
    assert (done.returncode, program.read_text().count("torch")) == (0, 1)
    assert "-rpc.shutdown()\n+import backhaul as bh\n+bh.serve()\n" in done.stdout


def test_the_exit_status_says_whether_something_is_left(tmp_path: Path) -> None:
    left, broken = tmp_path / "left.py", tmp_path / "broken.py"
    left.write_text("import torch.distributed.rpc as rpc\nrpc.init_rpc(**x)\n")
    broken.write_text("def\n")
    done = run_command("migrate", "--write", "--json", str(tmp_path))
    assert done.returncode == 1
    reports = {Path(report["path"]).name: report for report in json.loads(done.stdout)}
    assert [remark["line"] for remark in reports["left.py"]["remarks"]] == [2]
    assert reports["broken.py"]["error"]
    assert run_command("migrate", str(tmp_path / "nothing")).returncode == 2
