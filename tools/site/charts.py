"""Draws the kept results of benchmarks as bars: ``python -m tools.site.charts`` writes the pictures of ``docs/images``.

A picture has colors for light and dark pages. On GitHub it follows the browser, and in the site the theme of the site.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import NamedTuple

from tools.site.assemble import DOCS, ROOT

KEPT = ROOT / "benchmarks" / "kept" / "bench-auto-2-processors.json"
IMAGES = DOCS / "images"

_LABELS, _BARS, _ROW, _TOP = 215, 270, 26, 58  # widths and heights


class Chart(NamedTuple):
    """One picture: its file, its title, and which rows of the benchmark are in it."""

    file: str
    title: str
    rows: Mapping[str, str]


CHARTS = (
    Chart(
        "bench-programs.svg",
        "Steps of programs",
        {
            "parameter server, step of three trainers": "parameter server",
            "RNN split over two workers, step": "RNN over 2 workers",
            "CartPole actors, move": "CartPole actors",
            "pipeline of two stages, step": "pipeline of 2 stages",
            "transformer split over three workers, step": "transformer over 3 workers",
            "DDP with a remote embedding table, step": "DDP, remote embedding",
        },
    ),
    Chart(
        "bench-calls.svg",
        "Calls and gradients",
        {
            "empty call": "empty call",
            "16-float echo": "echo of 16 floats",
            "64 KiB echo": "echo of 64 KiB",
            "1 MiB echo": "echo of 1 MiB",
            "64 MiB echo": "echo of 64 MiB",
            "rref.rpc_sync().method": "method of a reference",
            "RemoteModule forward": "RemoteModule forward",
            "1 hop, forward and backward": "call and backward",
            "chain of 16 hops, forward and backward": "16 calls and backward",
            "start and stop of 8 workers": "start, stop of 8 workers",
        },
    ),
)

_STYLE = """
.bh { font: 14px system-ui, sans-serif; fill: var(--color-foreground-primary, #1f2328); }
.bh .bar { fill: #2563c9; }
.bh .less { fill: #b4540a; }
.bh .faint { fill: var(--color-foreground-secondary, #57606a); }
.bh line { stroke: var(--color-foreground-muted, #6e7781); stroke-dasharray: 3 3; }
@media (prefers-color-scheme: dark) {
  .bh { fill: var(--color-foreground-primary, #e6edf3); }
  .bh .bar { fill: #6ba3f5; }
  .bh .less { fill: #e8975a; }
  .bh .faint { fill: var(--color-foreground-secondary, #9da7b1); }
}
"""


def draw(chart: Chart, results: Mapping[str, Mapping[str, float]]) -> str:
    """The picture as SVG: one bar for each row, as long as the ratio; a line where both systems are equal."""
    values = {label: results[row]["wall"] for row, label in chart.rows.items()}
    scale = _BARS / max(values.values())
    height = _TOP + _ROW * len(values) + 8
    width = _LABELS + _BARS + 45
    text = ", ".join(f"{label} {_number(value)}" for label, value in values.items())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" class="chart bh" role="img">',
        f"<title>{escape(chart.title)}: how many times faster than torch.distributed.rpc: {escape(text)}</title>",
        f"<style>{_STYLE}</style>",
        f'<text x="0" y="18" font-weight="600">{escape(chart.title)}</text>',
        '<text x="0" y="38" class="faint">times faster than torch.distributed.rpc, wall time</text>',
    ]
    equal = _LABELS + scale
    parts.append(f'<line x1="{equal:.1f}" y1="{_TOP - 4}" x2="{equal:.1f}" y2="{height - 8}"/>')
    for number, (label, value) in enumerate(values.items()):
        y = _TOP + _ROW * number
        kind = "bar" if value >= 1 else "less"
        parts += [
            f'<text x="{_LABELS - 10}" y="{y + 14}" text-anchor="end">{escape(label)}</text>',
            f'<rect x="{_LABELS}" y="{y + 2}" width="{value * scale:.1f}" height="16" rx="2" class="{kind}"/>',
            f'<text x="{_LABELS + value * scale + 6:.1f}" y="{y + 14}" class="faint">{_number(value)}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def _number(value: float) -> str:
    return f"{value:.1f}" if value >= 2 else f"{value:.2f}"


def main() -> None:
    """Draw all pictures again."""
    results = json.loads(KEPT.read_text())
    for chart in CHARTS:
        (IMAGES / chart.file).write_text(draw(chart, results))


if __name__ == "__main__":
    main()
