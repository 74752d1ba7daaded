"""What becomes of the numbers: a table, a plot, a file, and a comparison with the result that was kept last."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import torch
from harness import OURS, PLAIN, THEIRS, Cost, Numbers
from rich.console import Console
from rich.table import Table

KEPT = Path(__file__).parent / "kept"
NOISE = 0.15  # a ratio that is lower by this share may be chance
LARGE_RATIO = 10.0  # ratios above are not told apart: there, the reference waits for something that takes very long

Ratios = dict[str, dict[str, float]]
"""By row: reference time / ours, by the name of what is compared."""


def show(seconds: float) -> str:
    """A duration for people."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.2f} ms" if seconds < 0.1 else f"{seconds * 1e3:,.0f} ms"


def ratios_of(numbers: Numbers) -> Ratios:
    """How many times cheaper ours is, by row: wall time, processor time, and both with ``loss.backward()``."""
    return {row: _ratios(costs) for row, costs in numbers.items() if THEIRS in costs}


def _ratios(costs: Mapping[str, Cost]) -> dict[str, float]:
    theirs, found = costs[THEIRS], {}
    for system, prefix in ((OURS, ""), (PLAIN, "plain ")):
        if system in costs:
            found[f"{prefix}wall"] = round(theirs.wall / costs[system].wall, 3)
            found[f"{prefix}processor"] = round(theirs.processor / max(costs[system].processor, 1e-9), 3)
    return found


def machine() -> str:
    """What decides about ratios: how many processors there are."""
    return f"{len(os.sched_getaffinity(0))}-processors"


def table_of(numbers: Numbers, title: str) -> Table:
    """All rows, with both costs and their ratios."""
    versions = f"torch {torch.__version__}, Python {platform.python_version()}, {machine()}"
    table = Table(title=f"{title}; {versions}; medians", caption="x: reference / Backhaul", title_justify="left")
    table.add_column("")
    names = ("Backhaul", "reference", "x", "Backhaul CPU", "reference CPU", "x", "loss.backward()", "x", "CPU", "x")
    for column in names:
        table.add_column(column, justify="right")
    for row, costs in numbers.items():
        cells = [row]
        for what in ("wall", "processor"):
            ours, theirs = (getattr(costs[system], what) for system in (OURS, THEIRS))
            cells += [show(ours), show(theirs), f"{theirs / max(ours, 1e-9):.2f}"]
        if PLAIN in costs:
            for what in ("wall", "processor"):
                plain, theirs = (getattr(costs[system], what) for system in (PLAIN, THEIRS))
                cells += [show(plain), f"{theirs / max(plain, 1e-9):.2f}"]
        table.add_row(*cells)
    return table


def markdown(numbers: Numbers) -> str:
    """The same for the documentation; the last column is the row with ``loss.backward()``, if there is one."""
    lines = [
        "| | Backhaul | reference | times faster | Backhaul, processor time | reference, processor time | times less "
        "| with `loss.backward()`, times faster |",
        "|" + "---|" * 8,
    ]
    for row, costs in numbers.items():
        cells = [row]
        for what in ("wall", "processor"):
            ours, theirs = (getattr(costs[system], what) for system in (OURS, THEIRS))
            cells += [show(ours), show(theirs), _times(theirs / max(ours, 1e-9))]
        cells.append(_times(costs[THEIRS].wall / costs[PLAIN].wall) if PLAIN in costs else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _times(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio >= 2 else f"{ratio:.2f}"


def write(folder: Path, name: str, title: str, numbers: Numbers, sentences: list[str]) -> None:
    """Print everything, and write it to a folder as text, JSON and a picture."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.txt").open("w") as text:
        for console in (Console(width=170), Console(file=text, width=170)):
            console.print(table_of(numbers, title))
            for sentence in sentences:
                console.print(sentence, soft_wrap=True, highlight=False)
    (folder / f"{name}.md").write_text(markdown(numbers))
    (folder / f"{name}.json").write_text(json.dumps(_record(numbers, sentences), indent=1) + "\n")
    ratios = {row: found["wall"] for row, found in ratios_of(numbers).items()}
    (folder / f"{name}.svg").write_text(_plot(title, ratios))
    print(f"Written: {folder}/{name}.txt, .md, .json and .svg")


def _record(numbers: Numbers, sentences: list[str]) -> dict[str, Any]:
    ratios = ratios_of(numbers)
    return {
        "machine": machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "rows": {
            row: {
                "ratios": ratios.get(row, {}),
                **{f"{system}_wall_us": round(cost.wall * 1e6, 1) for system, cost in costs.items()},
                **{f"{system}_processor_us": round(cost.processor * 1e6, 1) for system, cost in costs.items()},
            }
            for row, costs in numbers.items()
        },
        "sentences": sentences,
    }


# The result that was kept last.


def keep(name: str, numbers: Numbers) -> Path:
    """Keep the ratios of this run as those of this kind of machine. Rows that were not measured stay as they were."""
    KEPT.mkdir(exist_ok=True)
    path = KEPT / f"{name}-{machine()}.json"
    path.write_text(json.dumps({**read_kept(name), **ratios_of(numbers)}, indent=1, sort_keys=True) + "\n")
    return path


def read_kept(name: str) -> Ratios:
    """The ratios that were kept on this kind of machine; none if there are none."""
    path = KEPT / f"{name}-{machine()}.json"
    found: Ratios = json.loads(path.read_text()) if path.exists() else {}
    return found


def worse(found: Ratios, kept: Ratios, noise: float = NOISE) -> dict[str, list[str]]:
    """The rows whose ratios are lower than the kept ones by more than the noise, and which of their ratios are."""
    limits = {row: {what: (1 - noise) * min(ratio, LARGE_RATIO) for what, ratio in kept[row].items()} for row in kept}
    lower = {
        row: [what for what, now in ratios.items() if now < limits.get(row, {}).get(what, 0.0)]
        for row, ratios in found.items()
    }
    return {row: names for row, names in lower.items() if names}


def _plot(title: str, ratios: dict[str, float]) -> str:
    """How many times faster each row is, as a picture."""
    left, wide, high, most = 400, 360, 26, max(*ratios.values(), 1.0, 1.0)
    height = high * len(ratios) + 70
    one = left + wide / most
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + wide + 80}" height="{height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="100%" height="100%" fill="white"/><text x="16" y="26" font-size="15">{escape(title)}: '
        f"times faster than torch {escape(torch.__version__)}</text>",
    ]
    for place, (row, ratio) in enumerate(ratios.items()):
        y, width = 44 + place * high, wide * ratio / most
        colour = "#44aa99" if ratio >= 1 else "#cc6677"
        parts.append(
            f'<text x="{left - 10}" y="{y + 15}" text-anchor="end">{escape(row)}</text>'
            f'<rect x="{left}" y="{y}" width="{width:.1f}" height="{high - 6}" fill="{colour}"/>'
            f'<text x="{left + width + 6:.1f}" y="{y + 15}">{ratio:.2f}</text>'
        )
    parts.append(
        f'<line x1="{one:.1f}" x2="{one:.1f}" y1="38" y2="{height - 24}" stroke="#333" stroke-dasharray="4 3"/>'
        f'<text x="{one:.1f}" y="{height - 8}" text-anchor="middle">as fast as the reference</text></svg>'
    )
    return "\n".join(parts) + "\n"
