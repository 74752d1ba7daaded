"""The documentation site: it builds without a warning, its notebooks run, and its reference has every public name."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import inspect
import io
import json
import re
import subprocess
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tools.site import charts, checks, navigation, notebooks, reference

from .cluster.processes import run_processes
from .profiler.conftest import browser  # noqa: F401 (a fixture)
from .test_documentation import TORCHS_OWN

ROOT = Path(__file__).parent.parent
TUTORIALS = notebooks.pages()
NEEDS = {"trainers": "lightning"}
BUILD_SECONDS = 220  # on a machine that is busy with other tests

pytestmark = pytest.mark.timeout(240)


# The site as a whole.


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built pages. The build fails on every warning, and on every link to nowhere."""
    target = tmp_path_factory.mktemp("site")
    program = f"import sys, pathlib, tools.site.__main__ as s; sys.exit(s.main(pathlib.Path({str(target)!r})))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    return target / "html"


def test_all_pages_are_there(site: Path) -> None:
    for names in navigation.SECTIONS.values():
        for name in names:
            assert (site / f"{name}.html").exists(), name
    for page in TUTORIALS:
        assert f"{page.stem}.ipynb" in (site / "tutorials" / f"{page.stem}.html").read_text()
    text = "".join(path.read_text() for path in (site / "api").glob("*.html"))
    missing = [
        f"{page.package}.{name}"
        for page in reference.pages()
        for name in page.names
        if f'id="{page.package}.{name}"' not in text
    ]
    assert missing == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_pages_are_readable(site: Path, browser: Any, width: int, scheme: str) -> None:  # noqa: F811
    """On a desktop and on a phone: no page is too wide, texts have contrast, nothing comes from outside."""
    problems: list[str] = []
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
    try:
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(f"error: {error}"))
        page.on("request", lambda request: request.url.startswith("file:") or problems.append(request.url))
        for name in ("index", "tutorials/pipeline", "api/calls", "migration", "benchmarks"):
            page.goto((site / f"{name}.html").as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name
            problems += [f"{name}: {text}" for text in page.evaluate(FAINT)]
        assert problems == []
        page.add_style_tag(content=".content p { color: #888; background: #999 }")
        assert page.evaluate(FAINT), "the check finds faint text"
    finally:
        context.close()


FAINT = """() => {
    const shine = color => color.map(part => part / 255)
        .map(part => part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
        .reduce((sum, part, index) => sum + part * [0.2126, 0.7152, 0.0722][index], 0)
    const numbers = text => text.match(/[0-9.]+/g).map(Number)
    const behind = element => {
        for (; element; element = element.parentElement) {
            const color = numbers(getComputedStyle(element).backgroundColor)
            if (color.length < 4 || color[3] === 1) return color.slice(0, 3)
        }
        return [255, 255, 255]
    }
    const found = []
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT)
    while (texts.nextNode()) {
        const text = texts.currentNode.textContent.trim(), element = texts.currentNode.parentElement
        const style = getComputedStyle(element), box = element.getBoundingClientRect(), svg = element.closest("svg")
        if (!text || !box.width || !box.height || style.visibility === "hidden") continue
        const front = shine(numbers(svg ? style.fill : style.color).slice(0, 3))
        const back = shine(behind(svg ? svg.parentElement : element))
        if ((Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05) < 4.5) found.push(text)
    }
    return found
}"""
"""The texts of a page whose contrast is below 4.5, as the guidelines for accessible pages ask."""


def test_the_checks_find_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "one.html").write_text(
        '<p id="here"><a href="two.html#there"></a><img src="x.png"><a href="#here"></a>'
    )
    (tmp_path / "two.html").write_text(
        '<script src="https://example.org/x.js"></script><a href="https://example.org"></a>'
    )
    (tmp_path / "x.png").write_bytes(b"")
    (tmp_path / "site.css").write_text("@import url('https://example.org/font.css');")
    found = checks.problems(tmp_path)
    assert len(found) == 4
    assert sum("two.html#there" in problem for problem in found) == 1
    assert sum("has no text" in problem for problem in found) == 1
    assert sum("example.org" in problem for problem in found) == 2


def test_the_first_page_runs() -> None:
    """Its block is the one a newcomer copies."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "tools" / "site" / "start.md").read_text(), re.DOTALL)
    assert run_processes(run_notebooks, 1, {"start": [code]}) == [["start"]]


def test_the_pictures_are_those_of_the_kept_results() -> None:
    results = json.loads(charts.KEPT.read_text())
    for chart in charts.CHARTS:
        assert (charts.IMAGES / chart.file).read_text() == charts.draw(chart, results), "python -m tools.site.charts"


# Tutorials.


def test_the_notebooks_run() -> None:
    """All in one process, since most of the time goes into imports of torch. An error names the page and the cell."""
    pages = {
        page.stem: page.read_text() for page in TUTORIALS if importlib.util.find_spec(NEEDS.get(page.stem, "torch"))
    }
    assert len(pages) >= len(TUTORIALS) - len(NEEDS)
    for page in pages.values():
        made = notebooks.notebook(page)
        assert made == json.loads(json.dumps(made))
    cells = {name: [cell.text for cell in notebooks.cells_of(page) if cell.is_code] for name, page in pages.items()}
    assert run_processes(run_notebooks, 1, cells) == [sorted(cells)]


def run_notebooks(rank: int, notebooks: dict[str, list[str]]) -> list[str]:
    """As a kernel does: ``__main__`` has no file, and a later cell sees what an earlier one has defined."""
    torch.set_num_threads(1)  # as in all tests; threads that share a busy machine wait for each other
    warnings.simplefilter("error")
    for message in TORCHS_OWN:
        warnings.filterwarnings("ignore", message)
    for name, cells in notebooks.items():
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        with contextlib.redirect_stdout(io.StringIO()):
            for number, cell in enumerate(cells):
                exec(compile(cell, f"<{name}, cell {number}>", "exec"), vars(main))
    return sorted(notebooks)


def test_every_text_of_a_page_is_in_its_notebook() -> None:
    for page in TUTORIALS:
        text = page.read_text()
        shown = "\n".join(cell.text for cell in notebooks.cells_of(text))
        without_fences = [line for line in text.splitlines() if line and not line.startswith("```")]
        assert [line for line in without_fences if line not in shown] == []


# The reference.


def test_every_public_name_has_an_example() -> None:
    """The examples are doctests, so they run."""
    named = [(page.package, name) for page in reference.pages() for name in page.names]
    assert {name for package, name in named if package == "backhaul"} | set(reference.error_names()) >= {
        name for name in reference.public_names("backhaul") if name not in ("profile",)
    }
    without = {name for package, name in named if ">>>" not in (inspect.getdoc(thing(package, name)) or "")}
    assert without == set()


def thing(package: str, name: str) -> object:
    return getattr(importlib.import_module(package), name)


# Troubleshooting.

TROUBLE = (ROOT / "docs" / "troubleshooting.md").read_text()


def test_every_error_is_in_troubleshooting() -> None:
    kinds = set(reference.error_names())
    assert {name for name in kinds if f"`{name}`" not in TROUBLE} == set()
    named = set(re.findall(r"^\| .* \| `(\w+)` \| .* \|$", TROUBLE, re.MULTILINE))
    assert named <= kinds


def test_the_texts_are_those_of_the_sources() -> None:
    """The parts of a text between ``…`` are in one text that the sources raise or pass on."""
    texts = [text for path in sorted((ROOT / "src").rglob("*.py")) for text in texts_of(path)]
    rows = re.findall(r"^\| (.*?) \| `\w+` \| .* \|$", TROUBLE, re.MULTILINE)
    assert len(rows) > 60
    for row in rows:
        pattern = re.compile(".*".join(re.escape(part.strip()) for part in row.split("…")))
        assert any(pattern.search(text) for text in texts), f"no error says: {row}"


def texts_of(path: Path) -> list[str]:
    """The string literals of a file; what is computed is a space."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(part.value if isinstance(part, ast.Constant) else " " for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found
