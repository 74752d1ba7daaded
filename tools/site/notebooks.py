"""Makes notebooks of the tutorials. The pages are the source: their text and their blocks of Python become cells."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

from tools.site.assemble import DOCS

TUTORIALS = DOCS / "tutorials"

_BLOCK = re.compile(r"^```python\n(.*?)^```$\n?", re.DOTALL | re.MULTILINE)
_RELATIVE_LINK = re.compile(r"\[([^\]]*)\]\((?!https?:)[^)]*\)")


class Cell(NamedTuple):
    """One cell of a notebook."""

    text: str
    is_code: bool


def is_program(code: str) -> bool:
    """Whether a block is a script of its own, which processes run, and not a cell."""
    return "__main__" in code or "torchrun" in code


def cells_of(page: str) -> list[Cell]:
    """The cells of a page. Scripts and blocks that do not run stay text."""
    cells: list[Cell] = []
    text, done = "", 0
    for match in _BLOCK.finditer(page):
        text += page[done : match.start()]
        done = match.end()
        if is_program(match[1]):
            text += match[0]
            continue
        cells += [Cell(text.strip(), False)] if text.strip() else []
        cells.append(Cell(match[1].rstrip("\n"), True))
        text = ""
    text += page[done:]
    return [*cells, Cell(text.strip(), False)] if text.strip() else cells


def notebook(page: str) -> dict[str, object]:
    """A page as a notebook of format 4.5. Links to other pages become plain text."""
    cells: list[dict[str, object]] = []
    for number, (text, is_code) in enumerate(cells_of(page)):
        shown = text if is_code else _RELATIVE_LINK.sub(r"\1", text)
        cell: dict[str, object] = {"id": f"cell-{number}", "metadata": {}, "source": shown.splitlines(keepends=True)}
        cell["cell_type"] = "code" if is_code else "markdown"
        if is_code:
            cell.update(execution_count=None, outputs=[])
        cells.append(cell)
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel}, "cells": cells}


def pages() -> list[Path]:
    """The tutorials that are notebooks: those with cells."""
    found = sorted(TUTORIALS.glob("*.md"))
    return [page for page in found if any(cell.is_code for cell in cells_of(page.read_text(encoding="utf-8")))]


def write(target: Path) -> None:
    """Write all notebooks into a folder."""
    target.mkdir(parents=True, exist_ok=True)
    for page in pages():
        made = notebook(page.read_text(encoding="utf-8"))
        (target / f"{page.stem}.ipynb").write_text(json.dumps(made, indent=1), encoding="utf-8")
