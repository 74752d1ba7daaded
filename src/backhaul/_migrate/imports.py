"""Rewrites the imports of a program, once it is known which names it still uses."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from backhaul._migrate import names
from backhaul._migrate.bindings import Binding, Import
from backhaul._migrate.edits import Source, comments_of


class Imports:
    """The import statements of a module, and what the uses of their names ask of them."""

    def __init__(self, source: Source, tree: ast.Module) -> None:
        self.needs_dataclasses = False
        self._source = source
        self._kept: set[int] = set()  # ids of aliases whose names are still used as they are
        self._torch: set[str] = set()  # first names, such as "torch", that something else uses
        self._asking: set[int] = set()  # ids of import statements whose names were replaced by names of Backhaul
        self._blocks = list(_blocks(tree))
        bound = {alias.asname or alias.name for block in self._blocks for each in block for alias in each.names}
        taken = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - bound
        self._has = {
            (alias.name, alias.asname) for each in tree.body if isinstance(each, ast.Import) for alias in each.names
        }
        self.bh = "backhaul" if ("bh" in taken or "bh" in bound) and ("backhaul", "bh") not in self._has else "bh"

    def keep(self, bindings: list[Binding]) -> None:
        """A name is still used, so its import stays."""
        self._kept.update(id(binding.alias) for binding in bindings)
        self._torch.update(binding.imported for binding in bindings)

    def needs_backhaul(self, bindings: list[Binding]) -> None:
        """A use of a name was replaced by a name of Backhaul."""
        self._asking.update(id(binding.statement) for binding in bindings[:1])

    def uses_other(self, name: str, bindings: list[Binding]) -> None:
        """A name is used for something that is not migrated: ``torch`` of ``import torch.distributed.rpc``."""
        self._torch.update(binding.imported for binding in bindings)

    def rewrite(self) -> Iterator[tuple[int, str]]:
        """Edit all imports; yields lines that stay, and why."""
        for block in self._blocks:
            offered = block[0].col_offset == 0 and ("backhaul", "bh" if self.bh == "bh" else None) in self._has
            for statement in block:
                kept: list[ast.alias] = []
                lines: list[str] = []
                asks = id(statement) in self._asking
                for alias in statement.names:
                    asks |= self._sort(statement, alias, kept, lines)
                yield from self._left(statement, kept)
                if asks and self.needs_dataclasses and ("dataclasses", None) not in self._has:
                    lines.insert(0, "import dataclasses")
                    self.needs_dataclasses = False
                if asks and not offered:
                    lines.insert(0, f"import backhaul as {self.bh}" if self.bh == "bh" else "import backhaul")
                    offered = True
                self._write(statement, kept, lines)

    def _sort(self, statement: Import, alias: ast.alias, kept: list[ast.alias], lines: list[str]) -> bool:
        """Put what becomes of one name into ``kept`` or ``lines``; returns whether Backhaul has to be imported."""
        if isinstance(statement, ast.ImportFrom):
            name = names.canonical(f"{'.' * statement.level}{statement.module or ''}.{alias.name}")
        else:
            name = names.canonical(alias.name)
        if not (names.is_tracked(name) or name in names.SUBMODULES) or id(alias) in self._kept:
            kept.append(alias)
            return False
        module = name in names.MODULES or name in names.SUBMODULES
        if isinstance(statement, ast.Import) and alias.asname is None:  # binds the first part of the name
            first = name.partition(".")[0]
            if first in self._torch and (first, None) not in self._has:
                lines.append(f"import {first}")
            return True
        if module or name in names.RENAMED or name in names.EXPRESSIONS or name in names.QUERIES:
            return True
        if name not in names.REPLACED:
            kept.append(alias)
            return False
        package, _, new = names.REPLACED[name].rpartition(".")
        local = alias.asname or alias.name
        lines.append(f"from {'.'.join(['backhaul', *package.split()])} import {_named(new, local)}")
        return False

    def _left(self, statement: Import, kept: list[ast.alias]) -> Iterator[tuple[int, str]]:
        for alias in kept:
            if not isinstance(statement, ast.ImportFrom) or id(alias) in self._kept:
                continue
            name = names.canonical(f"{statement.module}.{alias.name}")
            if alias.name == "*" and statement.module in (*names.MODULES, *names.SUBMODULES):
                yield statement.lineno, f"`from {statement.module} import *` stays: import the names that are used"
            elif names.is_tracked(name) and alias.name != "*":
                yield statement.lineno, f"`{alias.name}` stays: {names.reason_for(name)}"

    def _write(self, statement: Import, kept: list[ast.alias], lines: list[str]) -> None:
        if len(kept) == len(statement.names):
            if lines:
                end = self._source.span(statement)[1]
                joint = f"{self._source.newline()}{self._source.indentation(statement)}"
                rest = self._source.data.find(b"\n", end)  # after a comment on the line
                at = end if rest < 0 else rest - (self._source.data[rest - 1 : rest] == b"\r")
                self._source.insert(at, "".join(joint + line for line in _merged(lines)))
            return
        if kept:
            part: Import = ast.Import(kept)
            if isinstance(statement, ast.ImportFrom):
                part = ast.ImportFrom(statement.module, kept, statement.level)
            lines.insert(0, ast.unparse(part))
        comments = comments_of(self._source.text_of(statement))
        joint = f"{self._source.newline()}{self._source.indentation(statement)}"
        first, last, alone = self._source.line_of(statement)
        if lines or not alone:
            self._source.replace(statement, joint.join([*comments, *_merged(lines)]) or "pass")
        else:
            self._source.cut(first, last)


def _named(new: str, local: str) -> str:
    return new if new == local else f"{new} as {local}"


def _merged(lines: list[str]) -> list[str]:
    """``from backhaul import a`` and ``from backhaul import b`` as one line."""
    merged: dict[str, list[str]] = {}
    for line in lines:
        head, _, imported = line.partition(" import ")
        merged.setdefault(head if imported else line, []).extend([imported] if imported else [])
    return [f"{head} import {', '.join(all_)}" if all_ else head for head, all_ in merged.items()]


def _blocks(tree: ast.Module) -> Iterator[list[Import]]:
    """The import statements of each list of statements."""
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            found = getattr(node, field, None)
            if isinstance(found, list):
                block = [each for each in found if isinstance(each, Import)]
                if block:
                    yield block
