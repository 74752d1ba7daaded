"""``make matrix`` reports every pair of torch and Python, also those that it cannot build, and docs say the same."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from backhaul._torch_support import NEWEST, OLDEST

ROOT = Path(__file__).parent.parent
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("matrix", ROOT / "tools" / "matrix.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


matrix = load()
Pair, Row = matrix.Pair, matrix.Row


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page of the tool's own, with one row."""
    made = tmp_path / "docs" / "versions.md"
    made.parent.mkdir()
    (tmp_path / ".matrix").mkdir()
    row = Row("2.13.0+cpu", "3.11.7", 10, 0, 2, "2026-01-01")
    made.write_text(f"Before.\n\n{matrix.MARKS[0]}\n{matrix.table([row])}\n{matrix.MARKS[1]}\n\nBehind.\n")
    monkeypatch.setattr(matrix, "ROOT", tmp_path)
    monkeypatch.setattr(matrix, "PAGE", made)
    monkeypatch.setattr(matrix, "FOLDER", tmp_path / ".matrix")
    return made


def test_a_pair_without_its_python_is_reported(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert matrix.main(["2.15/9.9"]) == 1
    assert "2.15/9.9: 0 passed, 0 failed" in capsys.readouterr().out
    old, new = matrix.read(page.read_text())
    assert (old.torch, old.passed) == ("2.13.0+cpu", 10)
    assert new.pair == Pair("2.15", "9.9")
    assert "there is no python9.9 here" in new.note
    assert not new.good


def test_a_pair_that_cannot_be_built_is_reported(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here pip finds nothing at all. What there is of the environment is removed."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr(matrix, "BUILD_SECONDS", 100)
    assert matrix.main([f"2.99/{HERE}", "--python", sys.executable]) == 1
    (row,) = (row for row in matrix.read(page.read_text()) if row.torch == "2.99")
    assert "not built: No matching distribution found for" in row.note
    assert not (tmp_path / ".matrix" / f"torch2.99-python{HERE}").exists()


@pytest.mark.parametrize(("ending", "status"), [("2 passed, 1 failed, 3 errors, 1 skipped", 1), ("6 passed", 0)])
def test_the_table_has_what_the_tests_gave(
    ending: str, status: int, page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an environment whose interpreter plays the part of torch and of pytest."""
    folder = tmp_path / ".matrix" / f"torch2.15-python{HERE}"
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        f'#!/bin/sh\ncase "$1" in -c) echo 2.15.0 {HERE}.1;; *) echo "{ending} in 3.21s"; exit {status};; esac\n'
    )
    python.chmod(0o755)
    monkeypatch.setattr(matrix, "compile_core", lambda python: "")
    monkeypatch.setattr(matrix, "build", lambda pair, interpreter: str(python))
    assert matrix.main([f"2.15/{HERE}", "--python", sys.executable, "--keep"]) == status
    (row,) = (row for row in matrix.read(page.read_text()) if row.torch == "2.15.0")
    assert (row.passed, row.failed, row.skipped) == ((2, 4, 1) if status else (6, 0, 0))
    assert folder.exists()
    before = page.read_text()
    assert before.startswith("Before.\n")
    assert before.endswith("Behind.\n")
    matrix.main([f"2.15/{HERE}", "--python", sys.executable, "--tests", "tests/jit"])
    assert page.read_text() == before  # some tests say nothing about all
    assert not folder.exists()


def test_a_pair_without_the_native_core_has_a_row_of_its_own(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    passed = 'echo "$((5 + ${BACKHAUL_NATIVE:-4})) passed in 1s"'
    python.write_text(f'#!/bin/sh\ncase "$1" in -c) echo 2.15.0 {HERE}.1;; *) {passed};; esac\n')
    python.chmod(0o755)
    monkeypatch.setenv("BACKHAUL_NATIVE", "0")  # is not for the environments
    monkeypatch.setattr(matrix, "compile_core", lambda python: "")
    monkeypatch.setattr(matrix, "build", lambda pair, interpreter: str(python))
    assert matrix.main([f"2.15/{HERE}/0", f"2.15/{HERE}", "--python", sys.executable]) == 0
    rows = [row for row in matrix.read(page.read_text()) if row.torch == "2.15.0"]
    assert [(row.pair.native, row.passed, row.note) for row in rows] == [(True, 9, ""), (False, 5, matrix.WITHOUT_CORE)]
    assert [row.passed for row in matrix.read(matrix.merged(page.read_text(), rows))] == [10, 9, 5]
    assert Pair("2.15", HERE).folder == Pair("2.15", HERE, native=False).folder


def test_a_core_that_does_not_compile_is_reported(tmp_path: Path) -> None:
    python = tmp_path / "python"
    for said, note in (("There is no C++ compiler, so ...", "no C++ compiler"), ("It was compiled to /x.", "")):
        python.write_text(f'#!/bin/sh\necho "Compiling."\necho "{said}"\n')
        python.chmod(0o755)
        assert matrix.compile_core(str(python)) == note
    python.write_text('#!/bin/sh\necho "The native core does not compile: error"\n')
    with pytest.raises(matrix.BuildError):
        matrix.compile_core(str(python))


def test_pins_of_what_torch_needs_are_for_one_torch_only() -> None:
    text = matrix.CONSTRAINTS.read_text()
    assert matrix.constraints(text, Pair("2.13", matrix.PINNED_PYTHON)) == text
    other = matrix.constraints(text, Pair("2.12", "3.12")).splitlines()
    assert "torch==2.12.*" in other
    assert any(line.startswith("pytest==") for line in other)
    assert not any(line.startswith(("torch==2.13", "setuptools==", "sympy==")) for line in other)


def test_the_suites_of_the_reference_are_run_with_the_torch_they_are_known_for() -> None:
    for native in (True, False):
        chosen = matrix.selection(Pair("2.13", "3.11", native), None)
        assert not any("ignore" in argument for argument in chosen)
    assert "--ignore=tests/cluster" in matrix.selection(Pair("2.13", "3.13"), None)
    assert "--ignore=tests/reference" in matrix.selection(Pair("2.15", "3.13"), None, everything=True)
    assert "--ignore=tests/sim" not in matrix.selection(Pair("2.15", "3.13"), None, everything=True)
    assert {"--ignore=tests/reference", "--ignore=tests/sim"} <= {*matrix.selection(Pair("2.15", "3.13"), None)}
    assert all((matrix.ROOT / path).exists() for path in matrix.ONCE)
    assert matrix.selection(Pair("2.15", "3.13"), "tests/jit -k 'a or b'") == ["tests/jit", "-k", "a or b"]


def test_an_interpreter_of_another_version_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a shim of pyenv's, which is there for all versions and runs one."""
    shim = tmp_path / "python9.9"
    shim.symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(matrix.BuildError):
        matrix.find_python("9.9", [str(shim), str(tmp_path / "nonesuch")])


def test_a_bad_pair_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "matrix.py", "2.15"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "not a pair such as 2.15/3.12" in done.stderr


def test_all_places_name_the_same_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pythons = {pair.python for pair in matrix.PAIRS}
    classified = {name for one in project["classifiers"] for name in re.findall(r"Python :: (3\.\d+)$", one)}
    assert classified == pythons
    assert project["requires-python"] == f">={min(pythons, key=lambda text: int(text[2:]))}"
    minors = {tuple(map(int, pair.torch.split("."))) for pair in matrix.PAIRS}
    assert minors == {(OLDEST[0], minor) for minor in range(OLDEST[1], NEWEST[1] + 1)}
    page = (ROOT / "docs" / "versions.md").read_text()
    assert f"torch {OLDEST[0]}.{OLDEST[1]} or newer" in page
    rows = list(matrix.read(page))
    found = [row.pair for row in rows]
    assert found == [pair for pair in matrix.PAIRS if pair in found]
    assert all(row.good for row in rows)
