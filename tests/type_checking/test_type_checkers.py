"""mypy and pyright infer what the programs assert, and report an error on just the lines that end in ``# error``.

``# error: pyright`` and ``# error: mypy`` name the one checker that reports the line.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")
pytest.importorskip("pyright")

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted((Path(__file__).parent / "programs").glob("[!_]*.py"))
MARK = re.compile(r"  # error(?:: (mypy|pyright)\b.*)?$")
SECONDS = 110

Lines = set[tuple[str, int]]


def expected(checker: str) -> Lines:
    lines: Lines = set()
    for path in PROGRAMS:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            mark = MARK.search(line)
            if mark and mark[1] in {None, checker}:
                lines.add((path.name, number))
    return lines


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def test_mypy() -> None:
    """With the settings of the project, so that its cache is that of ``make types``."""
    output = run("mypy", "--no-error-summary", "--no-pretty", *map(str, PROGRAMS))
    errors = re.findall(r"^(\S+?)([^/]+\.py):(\d+): error: (.*)$", output, re.MULTILINE)
    found = {(name, int(line)) for _, name, line, _ in errors}
    assert {folder for folder, *_ in errors} == {"tests/type_checking/programs/"}, output
    assert found == expected("mypy"), output


def test_pyright() -> None:
    output = json.loads(
        run("pyright", "--outputjson", "--pythonpath", sys.executable, "--project", str(Path(__file__).parent))
    )
    errors = [each for each in output["generalDiagnostics"] if each["severity"] == "error"]
    found = {(Path(each["file"]).name, each["range"]["start"]["line"] + 1) for each in errors}
    assert found == expected("pyright"), json.dumps(errors, indent=1)
