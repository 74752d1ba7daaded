"""The table of ``backhaul top`` at different widths."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from backhaul._monitoring.table import FittingTable


def shown(width: int) -> list[list[str]]:
    table = FittingTable(["worker<", "memory", "graph"], ["graph", "memory"])
    table.add_row("embedding-0", "254 MB", "17")
    table.add_row("lost-worker")
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as captured:
        console.print(table)
    return [line.split() for line in captured.get().splitlines()]


@pytest.mark.parametrize(
    ("width", "columns"),
    [(80, ["worker", "memory", "graph"]), (25, ["worker", "memory", "graph"]), (24, ["worker", "memory"])],
)
def test_whole_columns_are_left_out(width: int, columns: list[str]) -> None:
    head, first, second = shown(width)
    assert head == columns
    assert first == ["embedding-0", "254", "MB", "17"][: len(columns) + 1]
    assert second == ["lost-worker"]


def test_the_most_important_column_stays() -> None:
    assert [line[0] for line in shown(12)] == ["worker", "embedding-0", "lost-worker"]
