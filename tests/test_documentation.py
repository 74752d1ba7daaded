"""Every Python block in the documentation runs as it stands."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from .cluster.processes import run_processes

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)  # a block marked `python no-run` is not one of them


def blocks() -> list[tuple[str, str]]:
    found = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for number, match in enumerate(BLOCK.finditer(page.read_text())):
            found.append((f"{page.name}-{number}", match.group(1)))
    return found


@pytest.mark.parametrize(("name", "code"), blocks(), ids=[name for name, _ in blocks()])
def test_block_runs(name: str, code: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(code)
    if "launch(" in code or "torchrun" in code:  # it has to do with how programs are started
        command = [sys.executable, str(script)]
        if "torchrun" in code:
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
    else:
        assert run_processes(run_script, 1, str(script)) == [None]


def run_script(rank: int, script: str) -> None:
    """As Python would, in a process that has torch already."""
    os.chdir(Path(script).parent)
    with contextlib.redirect_stdout(io.StringIO()):
        runpy.run_path(script, run_name="__main__")


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
