"""What a check has found: good, or wrong and how to fix it. One form for every subcommand that checks something."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from backhaul._command.output import FAILED, FINE, Output

if TYPE_CHECKING:
    from rich.console import RenderableType

Level = Literal["good", "note", "wrong"]

_STYLES: dict[Level, str] = {"good": "green", "note": "yellow", "wrong": "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was checked.

    Attributes:
        topic: What it is about, in one or two words.
        level: ``note``: it works, but not as well as it could, or only in some cases. ``wrong``: something would fail.
        text: What was found.
        fix: What to do, unless it is good.
    """

    topic: str
    level: Level
    text: str
    fix: str = ""


def report_findings(findings: Sequence[Finding], output: Output) -> int:
    """Print all findings. Returns the exit status: 1 if one is wrong."""
    wrong = sum(each.level == "wrong" for each in findings)
    data: dict[str, Any] = {"good": not wrong, "findings": [asdict(each) for each in findings]}
    output.report(data, lambda: _table(findings))
    notes = sum(each.level == "note" for each in findings)
    if wrong:
        output.text(f"\n[bold red]{wrong} of {len(findings)} checks found something wrong[/]: → says how to fix it")
    elif notes:
        output.text(f"\n[green]nothing is wrong[/]; {notes} of {len(findings)} could be better: → says how")
    else:
        output.text("\n[green]all is well[/]")
    return FAILED if wrong else FINE


def _table(findings: Iterable[Finding]) -> RenderableType:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    topic = ""
    for each in findings:
        shown = "" if each.topic == topic else each.topic
        topic = each.topic
        for place, line in enumerate(_lines(each)):
            table.add_row(f"[{_STYLES[each.level]}]{each.level}[/]" if place == 0 else "", shown, line)
            shown = ""
    return table


def _lines(finding: Finding) -> Iterator[str]:
    from rich.markup import escape

    yield escape(finding.text)
    if finding.fix:
        yield f"[bold]→[/] {escape(finding.fix)}"
