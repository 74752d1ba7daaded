"""The distributed graph of one training step, from a recorded timeline: who called what on which worker, and which way
the gradients went back. Pure: records in, a graph or an SVG picture out.
"""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Literal, NamedTuple

from backhaul._monitoring.table import to_bytes, to_seconds
from backhaul.profiler.model import Slice, Timeline

_MAX_NODES = 200  # of one picture
_COLUMN, _ROW, _TOP, _LEFT, _BOX, _BOX_HEIGHT = 210, 40, 56, 16, 168, 28  # lengths in the picture
_MAX_CHARACTERS = 16  # of a label
_NANO = 1e-9


class StepNode(NamedTuple):
    """Something that a worker did in the step. Times in nanoseconds of the timeline; ``end`` -1: it has not ended."""

    kind: Literal["begin", "call", "backward"]
    worker: int
    label: str
    start: int
    end: int


class StepEdge(NamedTuple):
    """A message between two nodes, by their places in the list."""

    kind: Literal["request", "gradient"]
    source: int
    target: int
    nbytes: int


class StepGraph(NamedTuple):
    """One step. ``left_out``: how many nodes are missing because there are too many."""

    workers: list[tuple[int, str]]
    nodes: list[StepNode]
    edges: list[StepEdge]
    left_out: int = 0


def last_step(timeline: Timeline) -> StepGraph | None:
    """The last step in a timeline: from the end of one backward pass to the end of the next by the same driver. None:
    no pass ended.
    """
    tracks = {track.id: track.worker for track in timeline.tracks}
    passes = sorted((each for each in timeline.slices if each.kind == "pass"), key=lambda each: each.end)
    if not passes:
        return None
    last = passes[-1]
    driver = tracks[last.track]
    earlier = [each.end for each in passes[:-1] if tracks[each.track] == driver and each.end <= last.start]
    begin, end = max(earlier, default=0), last.end
    nodes = [StepNode("begin", driver, "step", begin, last.start)]
    calls = {  # of the step: those that began in it, on any worker
        each.id: each
        for each in timeline.calls
        if begin <= each.start <= end and each.decoded >= 0 and not each.name.startswith("internal#")
    }
    groups = [each for each in timeline.slices if each.kind == "group" and begin <= each.start <= end]
    shown = [
        *(
            (
                call.decoded,
                StepNode("call", call.callee, call.function, call.decoded, call.ran),
                call.id,
            )
            for call in calls.values()
        ),
        *(
            (each.start, StepNode("backward", tracks[each.track], "backward", each.start, each.end), each.id)
            for each in groups
        ),
    ]
    shown.sort(key=lambda item: item[0])
    place_of_call: dict[int, int] = {}
    place_of_group: dict[int, int] = {}
    for _, node, number in shown[:_MAX_NODES]:
        (place_of_call if node.kind == "call" else place_of_group)[number] = len(nodes)
        nodes.append(node)
    edges = [
        StepEdge("request", place_of_call.get(call.parent, 0), place_of_call[call.id], call.bytes_out)
        for call in calls.values()
        if call.id in place_of_call
    ]
    edges += _gradients(timeline, place_of_group)
    present = {node.worker for node in nodes}
    workers = [(worker.id, worker.name) for worker in timeline.workers if worker.id in present]
    workers.sort(key=lambda worker: (worker[0] != driver, worker[0]))
    return StepGraph(workers, nodes, edges, max(len(shown) - _MAX_NODES, 0))


def _gradients(timeline: Timeline, places: dict[int, int]) -> Iterable[StepEdge]:
    slices = {each.id: each for each in timeline.slices}
    for arrow in timeline.arrows:
        if arrow.kind != "gradient" or arrow.target not in places:
            continue
        source: Slice | None = slices.get(arrow.source)
        while source is not None and source.id not in places:
            source = slices.get(source.parent)
        if source is not None:
            yield StepEdge("gradient", places[source.id], places[arrow.target], arrow.nbytes)


_STYLE = """
text { font: 12px sans-serif; fill: #18202b; }
.muted { fill: #596575; font-size: 11px; }
.lane { stroke: #dde2e9; }
.ground { fill: #ffffff; }
.begin { fill: #e3e8ef; stroke: #596575; }
.call { fill: #d6ebf7; stroke: #1f6fc4; }
.backward { fill: #f3dcef; stroke: #a0307f; }
path { fill: none; stroke-width: 1.3; }
.request { stroke: #1f6fc4; }
.gradient { stroke: #a0307f; stroke-dasharray: 5 3; }
.request-head { fill: #1f6fc4; }
.gradient-head { fill: #a0307f; }
"""


def to_svg(graph: StepGraph, *, title: str = "One step") -> str:
    """A picture: a column for each worker, time from top to bottom. Calls have solid arrows, gradients dashed ones.

    Example:
        >>> to_svg(StepGraph([(0, "a")], [StepNode("begin", 0, "step", 0, 1)], []))[:4]
        '<svg'
    """
    column = {worker: place for place, (worker, _) in enumerate(graph.workers)}
    width = _LEFT * 2 + _COLUMN * max(len(graph.workers), 1)
    height = _TOP + _ROW * len(graph.nodes) + 60
    first = min((node.start for node in graph.nodes[1:]), default=0)

    def corner(place: int) -> tuple[int, int]:
        return _LEFT + column[graph.nodes[place].worker] * _COLUMN, _TOP + place * _ROW

    parts = [
        f'<rect class="ground" width="{width}" height="{height}"/>',
        *_lanes(graph, height),
        *(_arrow(edge, corner(edge.source), corner(edge.target)) for edge in graph.edges),
    ]
    for place, node in enumerate(graph.nodes):
        x, y = corner(place)
        label = node.label if len(node.label) <= _MAX_CHARACTERS else f"…{node.label[1 - _MAX_CHARACTERS :]}"
        took = _took(node)
        at = to_seconds(max(node.start - first, 0) * _NANO)
        hint = f"{node.label}: {took}, {at} after the first call" if place else "the step begins"
        parts.append(
            f'<g><title>{html.escape(hint)}</title><rect class="{node.kind}" x="{x}" y="{y}" rx="5" width="{_BOX}" '
            f'height="{_BOX_HEIGHT}"/><text x="{x + 8}" y="{y + 18}">{html.escape(label)}</text>'
            + (f'<text class="muted" text-anchor="end" x="{x + _BOX - 8}" y="{y + 18}">{took}</text>' if place else "")
            + "</g>"
        )
    parts += _legend(graph, height)
    about = f"{title}: {len(graph.nodes) - 1} calls and backward parts on {len(graph.workers)} workers"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{html.escape(about)}"><style>{_STYLE}</style><defs>'
        + "".join(
            f'<marker id="{kind}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path class="{kind}-head" d="M0,0 L8,4 L0,8 z"/></marker>'
            for kind in ("request", "gradient")
        )
        + "</defs>"
        + "".join(parts)
        + "</svg>"
    )


def _took(node: StepNode) -> str:
    return to_seconds((node.end - node.start) * _NANO) if node.end >= 0 else "…"


def _lanes(graph: StepGraph, height: int) -> Iterable[str]:
    for place, (_, name) in enumerate(graph.workers):
        x = _LEFT + place * _COLUMN
        yield f'<text x="{x}" y="24" font-weight="bold">{html.escape(name)}</text>'
        yield f'<line class="lane" x1="{x - 8}" y1="34" x2="{x - 8}" y2="{height - 44}"/>'


def _arrow(edge: StepEdge, source: tuple[int, int], target: tuple[int, int]) -> str:
    half = _BOX_HEIGHT // 2
    (x1, y1), (x2, y2) = source, target
    if x1 == x2:  # on one worker: around the boxes
        d = f"M{x1},{y1 + half} C{x1 - 14},{y1 + half} {x2 - 14},{y2 + half} {x2},{y2 + half}"
    else:
        start, end = (x1 + _BOX, x2) if x1 < x2 else (x1, x2 + _BOX)
        bend = 40 if x1 < x2 else -40
        d = f"M{start},{y1 + half} C{start + bend},{y1 + half} {end - bend},{y2 + half} {end},{y2 + half}"
    what = "arguments" if edge.kind == "request" else "gradients"
    hint = f"{what}, {to_bytes(edge.nbytes)}"
    return f'<path class="{edge.kind}" marker-end="url(#{edge.kind})" d="{d}"><title>{hint}</title></path>'


def _legend(graph: StepGraph, height: int) -> Iterable[str]:
    y = height - 20
    text = "solid: a call, from its caller to where it ran; dashed: gradients"
    if graph.left_out:
        text += f"; {graph.left_out} more calls and parts are left out"
    yield f'<text class="muted" x="{_LEFT}" y="{y}">{text}</text>'


_PAGE_STYLE = """
body { margin: 0; padding: 16px; color: #18202b; background: #ffffff; font: 14px/1.45 system-ui, sans-serif; }
h1 { margin: 0 0 12px; font-size: 20px; }
h2 { margin: 16px 0 4px; font-size: 16px; }
.scroll { overflow: auto; border: 1px solid #dde2e9; border-radius: 8px; }
.scroll:focus-visible { outline: 2px solid #0a5fd0; }
svg { display: block; }
table { border-collapse: collapse; }
th, td { padding: 2px 16px 2px 8px; border-bottom: 1px solid #dde2e9; text-align: left; white-space: nowrap; }
th { color: #596575; font-weight: 500; }
"""


def to_page(graph: StepGraph, *, title: str = "One step") -> str:
    """The picture as an HTML page, with a table of the same calls and backward parts."""
    names = dict(graph.workers)
    causes: dict[int, list[str]] = {}
    for edge in graph.edges:
        source = graph.nodes[edge.source]
        causes.setdefault(edge.target, []).append(f"{source.label} on {names[source.worker]}, {to_bytes(edge.nbytes)}")
    rows = [
        (node.label, names[node.worker], "; ".join(causes.get(place, ())), _took(node))
        for place, node in enumerate(graph.nodes)
        if place
    ]
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_PAGE_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{html.escape(title)}</h1>\n"
        f'<div class="scroll" role="region" tabindex="0" aria-label="Picture">\n{to_svg(graph, title=title)}\n</div>\n'
        '<h2>Calls and backward parts</h2>\n<div class="scroll" role="region" tabindex="0" aria-label="Table">\n'
        '<table>\n<thead><tr><th scope="col">What</th><th scope="col">On</th><th scope="col">Because of</th>'
        f'<th scope="col">Took</th></tr></thead>\n<tbody>{body}</tbody>\n</table>\n</div>\n</main>\n</body>\n</html>\n'
    )
