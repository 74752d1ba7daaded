"""Edits of a source text by position. What no edit touches stays as it is, byte for byte."""

from __future__ import annotations

import ast
import io
import tokenize
from typing import NamedTuple

Position = tuple[int, int]
"""Line, counted from 1, and column in bytes, as ``ast`` counts them."""


class Edit(NamedTuple):
    """Replace the bytes from ``start`` to ``end``."""

    start: int
    end: int
    text: str


class Source:
    """A source text, where its nodes are, and the edits that are to be made."""

    def __init__(self, text: str) -> None:
        self.data = text.encode()
        self.edits: list[Edit] = []
        self._lines = [0]  # the offset of each line
        for line in self.data.split(b"\n"):
            self._lines.append(self._lines[-1] + len(line) + 1)

    def offset(self, position: Position) -> int:
        """The offset of a position in bytes."""
        return self._lines[position[0] - 1] + position[1]

    def span(self, node: ast.expr | ast.stmt | ast.keyword) -> tuple[int, int]:
        """Where a node begins and ends, as offsets."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.offset((node.lineno, node.col_offset)), self.offset((node.end_lineno, node.end_col_offset))

    def text_of(self, node: ast.expr | ast.stmt) -> str:
        """The text of a node."""
        start, end = self.span(node)
        return self.data[start:end].decode()

    def replace(self, node: ast.expr | ast.stmt, text: str) -> None:
        """Replace a node."""
        self.edits.append(Edit(*self.span(node), text))

    def insert(self, offset: int, text: str) -> None:
        """Insert a text."""
        self.edits.append(Edit(offset, offset, text))

    def cut(self, start: int, end: int, text: str = "") -> None:
        """Remove what is between two offsets, or put a text in its place."""
        self.edits.append(Edit(start, end, text))

    def line_of(self, node: ast.stmt) -> tuple[int, int, bool]:
        """The offsets of the lines of a statement, and whether nothing but a comment shares them."""
        start, end = self.span(node)
        first = self.data.rfind(b"\n", 0, start) + 1
        last = self.data.find(b"\n", end)
        last = len(self.data) if last < 0 else last + 1
        before, after = self.data[first:start].strip(), self.data[end:last].strip()
        return first, last, not before and (not after or after.startswith(b"#"))

    def indentation(self, node: ast.stmt) -> str:
        """The white space before a statement."""
        first = self.data.rfind(b"\n", 0, self.span(node)[0]) + 1
        return self.data[first : self.span(node)[0]].decode()

    def newline(self) -> str:
        """How the lines of the text end."""
        return "\r\n" if b"\r\n" in self.data else "\n"

    def result(self) -> str:
        """The text with all edits. Edits do not overlap; insertions at one place keep the order in which they came."""
        parts: list[bytes] = []
        done = 0
        for start, end, text in sorted(self.edits, key=lambda edit: (edit.start, edit.end > edit.start, -edit.end)):
            if start < done:
                continue  # an enclosing node was replaced as a whole
            parts += [self.data[done:start], text.encode()]
            done = end
        return b"".join([*parts, self.data[done:]]).decode()


def comments_of(text: str) -> list[str]:
    """The comments inside a piece of source text."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [token.string for token in tokens if token.type == tokenize.COMMENT]
