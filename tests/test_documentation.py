"""Every block of code in the documentation runs as it stands, or says why it does not."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import os
import re
import runpy
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from backhaul import errors
from backhaul._autograd.messages import AutogradKind
from backhaul._monitoring.status import MonitoringKind
from backhaul._rref.notices import RRefKind
from backhaul._wire.messages import Kind
from backhaul.errors import BackhaulError
from tools.site.notebooks import is_program
from tools.tree import read_folders, read_table

from .cluster.processes import run_processes

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("**/*.md"))]
MAX_COLUMNS = 100
FENCE = re.compile(r"^ *```(?P<info>[^\n]*)\n(?P<code>.*?)^ *```$", re.DOTALL | re.MULTILINE)
INFO = re.compile(r"(?P<language>python|sh)(?: no-run: (?P<reason>\S.*))?|text")
"""``python`` and ``sh`` are run, unless ``no-run:`` and a reason follow; ``text`` is no code."""


TORCHS_OWN = (
    "The .grad attribute of a Tensor",  # the compiler looks at it after any graph break
    "torch.distributed is disabled",  # torch.distributed.checkpoint.save, where there is no process group
)
"""Warnings of torch that programs get with or without Backhaul."""


class Block(NamedTuple):
    name: str
    info: str
    code: str


def blocks_of(page: Path) -> list[Block]:
    name, text = str(page.relative_to(ROOT)), page.read_text()
    return [Block(f"{name}-{n}", match["info"], match["code"]) for n, match in enumerate(FENCE.finditer(text))]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def is_cell(block: Block) -> bool:
    """The blocks of a tutorial are the cells of one notebook, which ``tests/test_site.py`` runs."""
    return block.name.startswith("docs/tutorials/") and block.info == "python" and not is_program(block.code)


def of_language(language: str) -> list[Any]:
    blocks = [block for block in BLOCKS if block.info == language and not is_cell(block)]
    return [pytest.param(block.code, id=block.name) for block in blocks]


@pytest.mark.parametrize("code", of_language("python"))
def test_python_runs(code: str, tmp_path: Path) -> None:
    """What is started as a program is started as a program. No warning comes of any of it."""
    script = tmp_path / "script.py"
    script.write_text(code)
    if "__main__" in code or "torchrun" in code:
        command = [sys.executable, "-W", "error", str(script)]
        if "torchrun" in code:
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
    else:
        assert run_processes(run_script, 1, str(script), patience=110.0) == [None]


def run_script(rank: int, script: str) -> None:
    """As Python would, in a process that has torch already."""
    os.chdir(Path(script).parent)
    warnings.simplefilter("error")
    for message in TORCHS_OWN:
        warnings.filterwarnings("ignore", message)
    with contextlib.redirect_stdout(io.StringIO()):
        runpy.run_path(script, run_name="__main__")


@pytest.mark.parametrize("code", of_language("sh"))
def test_commands_run(code: str, tmp_path: Path) -> None:
    """``backhaul`` is that of this environment."""
    environ = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    command = ["bash", "-euo", "pipefail", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_block_is_left_out_without_a_reason(page: Path) -> None:
    blocks = blocks_of(page)
    assert [block for block in blocks if INFO.fullmatch(block.info) is None] == [], f"say what it is: {INFO.pattern}"
    text = FENCE.sub("", page.read_text())
    assert "```" not in text, "a block does not end"
    assert re.findall(r"\n\n {4,}\S.*", text) == [], "make indented code a block with a language"


def anchors_of(page: Path) -> set[str]:
    """Of all headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]+))?\)", page.read_text()):
            if not target.startswith("http"):
                there = page.parent / target if target else page
                assert there.exists(), f"{page.name} links to {target}"
                assert not anchor or anchor in anchors_of(there), f"{page.name} links to {target}#{anchor}"


def test_every_make_command_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    sources = [*ROOT.glob("src/**/*.py"), *ROOT.glob("examples/*.py"), *ROOT.glob("tools/*.py")]
    for page in [*PAGES, *sources]:
        for target in re.findall(r"(?:^ *|`)make ([a-z-]+)", page.read_text(), re.MULTILINE):
            assert target in targets, f"{page.relative_to(ROOT)} names `make {target}`"


def test_examples_say_how_they_are_started() -> None:
    (main,) = re.findall(r"^\t@.* examples/(\w+\.py)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for example in sorted((ROOT / "examples").glob("*.py")):
        usage = ast.get_docstring(ast.parse(example.read_text()), clean=False) or ""
        command = "make run" if example.name == main else f"python examples/{example.name}"
        found = re.findall(r"^ *(make run|python \S+)", usage, re.MULTILINE)
        assert found, example.name
        assert set(found) == {command}, example.name


def test_every_error_is_explained() -> None:
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, BackhaulError)}
    page = (ROOT / "docs" / "errors.md").read_text()
    assert sorted(name for name in kinds if f"`{name}`" not in page) == []


def test_the_protocol_lists_every_kind_of_message() -> None:
    page = (ROOT / "docs" / "protocol.md").read_text()
    rows = page.partition("## Messages")[2].partition("\n\n**")[0]  # the first table
    listed = {int(number): name for number, name in re.findall(r"^\| (\d+) \| (\w+) \|", rows, re.MULTILINE)}
    kinds = {kind.value: kind.name.lower() for kind in (*Kind, *AutogradKind, *RRefKind, *MonitoringKind)}
    assert listed == kinds | {AutogradKind.GRADIENT: "gradients"}  # there may be several in one


def test_layers_are_those_of_the_contract() -> None:
    """The linter checks the contract. Further contracts are about the rooms of one layer."""
    contract, *rooms = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [re.findall(r"\w+", layer) for layer in contract["layers"]]
    block = next(block for block in blocks_of(ROOT / "CONTRIBUTING.md") if "autograd" in block.code)
    assert [re.split(r" {4,}", line)[0].split() for line in block.code.splitlines()] == layers
    for layer in (name for names in layers for name in names):
        assert importlib.util.find_spec(f"backhaul.{layer}") is not None, f"there is no layer {layer}"
    for other in (room for room in rooms if room["type"] == "layers"):
        (container,) = other["containers"]
        for room in (name for layer in other["layers"] for name in re.findall(r"[\w.]+", layer)):
            assert importlib.util.find_spec(f"{container}.{room}") is not None, f"there is no room {room}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=name_of)
def test_every_file_that_is_named_exists(page: Path) -> None:
    places = [ROOT, ROOT / "src", ROOT / "src" / "backhaul", page.parent]
    text = page.read_text()
    files = re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|md|txt|sh))(?::\w+)?`", text)
    folders = re.findall(r"`((?:_|src/|tests/|tools/)[\w/]*/)`", text)
    for named in [*files, *folders]:
        assert any((place / named).exists() for place in places), f"{page.name} names `{named}`"


def test_the_newcomers_questions_have_answers() -> None:
    """``test_every_file_that_is_named_exists`` checks the files."""
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where to find what")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| .*\? \| (.*) \|$", section, re.MULTILINE)
    assert len(rows) >= 20
    assert [row for row in rows if re.search(r"`[\w./-]+`", row) is None] == []


def test_the_table_of_folders_is_that_of_the_sources() -> None:
    """``python -m tools.tree`` rewrites the table. The numbers of lines may be old."""
    expected = {folder.path: folder.purpose for folder in read_folders()}
    assert "" not in expected.values(), "each folder says its purpose in the docstring of its __init__.py"
    assert {folder.path: folder.purpose for folder in read_table()} == expected, "run `python -m tools.tree`"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_lines_are_short(page: Path) -> None:
    """Tables, links and commands cannot be broken into lines; everything else can."""
    text = re.sub(r"^ *```(?:sh|python)\b.*?^ *```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    lines = [line for line in text.splitlines() if not line.startswith("|") and "](http" not in line]
    assert [line for line in lines if len(line) > MAX_COLUMNS] == []
