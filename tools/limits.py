"""Checks the limits of CONTRIBUTING.md on the sizes of files and classes, and that one class name means one thing.

``python -m tools.limits`` prints the files and classes over the limits with the written reason of each, and exits with
status 1 if a reason is missing. ``--table`` prints them as a table for ``docs/design/sizes.md``. A reason is a comment
above the class, or at the top of the file, that begins with ``# Over the limit because``.
"""

from __future__ import annotations

import ast
import collections
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
MAX_LINES = 400
MAX_METHODS = 20
MAX_ATTRIBUTES = 12
FOLDERS = ("src/backhaul", "tools")
REFERENCE = "src/backhaul/compat/"  # these classes carry the names of the reference

_REASON = re.compile(r"# Over the limit because (.*(?:\n *#.*)*)")


class Excess(NamedTuple):
    """A file or a class over a limit."""

    path: str
    name: str  # of the class; empty for a file
    size: str
    reason: str


def sources() -> Iterator[tuple[str, str]]:
    """All Python files under the limits: the path relative to the repository, and the text."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def excesses() -> Iterator[Excess]:
    """Every file and class over a limit."""
    for path, text in sources():
        lines, tree = text.splitlines(), ast.parse(text)
        count = len(lines) - lines_of_overloads(tree)
        if count > MAX_LINES:
            yield Excess(path, "", f"{count} lines", _reason("\n".join(lines[:30])))
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef):
                continue
            methods, attributes = count_methods(node), len(attributes_of(node))
            if methods > MAX_METHODS or attributes > MAX_ATTRIBUTES:
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                size = f"{methods} methods, {attributes} attributes"
                yield Excess(path, node.name, size, _reason(_comment_above(lines, first)))


def count_methods(node: ast.ClassDef) -> int:
    """How many methods a class defines itself. The overloads of a method are types of one method."""
    methods = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
    return sum(not _is_overload(each) for each in methods)


def lines_of_overloads(tree: ast.Module) -> int:
    """How many lines overloads take: they say again, for type checkers, what the function itself says."""
    overloads = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef) and _is_overload(each)]
    return sum((each.end_lineno or each.lineno) - each.lineno + 2 for each in overloads)  # and the decorator's line


def _is_overload(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return "overload" in map(ast.unparse, function.decorator_list)


def attributes_of(node: ast.ClassDef) -> set[str]:
    """The attributes that a class declares in its body or sets on ``self``."""
    found = {
        each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    stored = (each for each in ast.walk(node) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store))
    found |= {each.attr for each in stored if isinstance(each.value, ast.Name) and each.value.id == "self"}
    return found


def _comment_above(lines: list[str], number: int) -> str:
    """The comment that ends on the line before line ``number``."""
    above: list[str] = []
    for line in reversed(lines[: number - 1]):
        if not line.lstrip().startswith("#"):
            break
        above.insert(0, line.strip())
    return "\n".join(above)


def _reason(text: str) -> str:
    found = _REASON.search(text)
    return re.sub(r"\n *# ?", " ", found[1]).strip() if found else ""


def repeated_names() -> dict[str, list[str]]:
    """Class names that stand for more than one thing, and the files that define them."""
    places: dict[str, list[str]] = collections.defaultdict(list)
    for path, text in sources():
        if not path.startswith(REFERENCE):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(path)
    return {name: paths for name, paths in places.items() if len(paths) > 1}


def table(found: Iterable[Excess]) -> str:
    """The table of ``docs/design/sizes.md``."""
    rows = [f"| `{each.name or each.path}` | `{each.path}` | {each.size} | {each.reason} |" for each in found]
    return "\n".join(["| class or file | in | size | over the limit because |", "|---|---|---|---|", *rows])


def main() -> int:
    """Print what is over the limits; 1 if something lacks a reason or a class name is repeated."""
    found = list(excesses())
    if "--table" in sys.argv:
        print(table(found))
        return 0
    for each in found:
        print(f"{each.path}{':' if each.name else ''}{each.name}: {each.size}: {each.reason or 'NO REASON'}")
    repeated = repeated_names()
    for name, paths in repeated.items():
        print(f"class {name} is defined in {', '.join(paths)}")
    return int(bool(repeated) or any(not each.reason for each in found))


if __name__ == "__main__":
    sys.exit(main())
