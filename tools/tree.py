"""The table of folders in ``docs/design/index.md``: each folder, its lines of Python, and its purpose.

A folder's purpose is the first paragraph of its ``__init__.py`` docstring. This command rewrites the table:

    .venv/bin/python -m tools.tree

A test compares folders and purposes with the table. It ignores the numbers of lines, which change with every commit.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "design" / "index.md"
SOURCES = (ROOT / "src" / "backhaul", ROOT / "tools")

_BEGIN, _END = "<!-- tree: begin -->\n", "<!-- tree: end -->\n"
_ROW = re.compile(r"^\| `(?P<folder>[\w/]+)/` \| (?P<lines>[\d,]+) \| (?P<purpose>.*) \|$", re.MULTILINE)


class Folder(NamedTuple):
    """One row of the table."""

    path: str
    """Relative to the folder that holds the package or the tools."""
    lines: int
    """Lines of the Python files in this folder itself, without its subfolders."""
    purpose: str


def read_folders() -> list[Folder]:
    """All packages in ``src/backhaul`` and ``tools``, each before its subfolders."""
    found = []
    for source in SOURCES:
        for file in sorted(source.glob("**/__init__.py"), key=lambda file: file.parent.parts):
            folder = file.parent
            lines = sum(len(python.read_text().splitlines()) for python in folder.glob("*.py"))
            found.append(Folder(str(folder.relative_to(source.parent)), lines, _purpose_of(file)))
    return found


def read_table() -> list[Folder]:
    """The rows that the page has now."""
    table = PAGE.read_text().partition(_BEGIN)[2].partition(_END)[0]
    rows = _ROW.finditer(table)
    return [Folder(row["folder"], int(row["lines"].replace(",", "")), row["purpose"]) for row in rows]


def write_table() -> None:
    """Replace the table in the page."""
    rows = [f"| `{folder.path}/` | {folder.lines:,} | {folder.purpose} |\n" for folder in read_folders()]
    table = "".join(["| folder | lines | purpose |\n", "|---|---|---|\n", *rows])
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    PAGE.write_text(before + _BEGIN + table + _END + rest.partition(_END)[2])


def _purpose_of(file: Path) -> str:
    docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
    return " ".join(docstring.partition("\n\n")[0].split()).replace("``", "`").replace("|", r"\|")


if __name__ == "__main__":
    write_table()
