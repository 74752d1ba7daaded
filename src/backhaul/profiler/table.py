"""Converts a timeline to tables of text. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from backhaul.profiler.model import Slice, Timeline, TimelineCall

_MAX_PATH_ROWS = 20


def to_table(timeline: Timeline) -> str:
    """Three tables: workers, calls, and what the time of the profiled thread was spent on."""
    parts = [_worker_table(timeline), _call_table(timeline), _path_table(timeline)]
    return "\n\n".join(part for part in parts if part)


def _worker_table(timeline: Timeline) -> str:
    tracks = {track.id: track.worker for track in timeline.tracks}
    slices = {each.id: each for each in timeline.slices}
    totals: dict[tuple[int, str], int] = {}

    def add(worker: int, column: str, amount: int) -> None:
        totals[worker, column] = totals.get((worker, column), 0) + amount

    add(timeline.owner, "compute", timeline.end)  # of the profiled thread; its waits are subtracted below
    for each in timeline.slices:
        worker, span = tracks[each.track], each.end - each.start
        add(worker, each.kind, span)
        outer_kinds = [slices[parent].kind for parent in _ancestors(each, slices)]
        is_counted = bool({"run", "group"} & set(outer_kinds)) or each.track == timeline.profiled_track
        if each.kind in ("run", "group") and not is_counted:
            add(worker, "compute", span)
        elif each.kind == "wait" and is_counted and "wait" not in outer_kinds:
            add(worker, "compute", -span)
    for arrow in timeline.arrows:
        sender = tracks[slices[arrow.source].track]
        add(sender, "wire", max(arrow.end - arrow.start, 0))
        add(sender, "sent", arrow.nbytes)
    rows, notes = [], []
    for row in timeline.workers:
        if row.missing:
            rows.append([row.name, f"missing: {row.missing}"])
            continue
        made = sum(call.caller == row.id for call in timeline.calls)
        served = sum(call.callee == row.id and call.far >= 0 for call in timeline.calls)
        times = [_time(totals.get((row.id, column), 0)) for column in ("compute", "queue", "wire", "wait")]
        clock = f"{row.offset / 1e3:+.1f} us, +-{row.error / 1e3:.1f}" if row.error else "the same"
        rows.append([row.name, str(made), str(served), *times, _bytes(totals.get((row.id, "sent"), 0)), clock])
        if row.note:
            notes.append(f"{row.name}: {row.note}")
    head = ["worker", "calls", "served", "compute", "queue", "wire", "waits", "bytes sent", "clock"]
    return "\n".join([_format(head, rows), *notes])


def _ancestors(each: Slice, slices: Mapping[int, Slice]) -> Iterator[int]:
    """The slices that contain a slice, the innermost first."""
    while each.parent >= 0:
        yield each.parent
        each = slices[each.parent]


def _call_table(timeline: Timeline) -> str:
    computed = _compute_of_calls(timeline)
    groups: dict[str, list[TimelineCall]] = {}
    for call in timeline.calls:
        groups.setdefault(call.name, []).append(call)
    rows = []
    for name, calls in sorted(groups.items(), key=lambda item: -sum(_span(call, timeline) for call in item[1])):
        compute = sum(computed.get(call.id, 0) for call in calls)
        failed = sum(bool(call.failed) for call in calls)
        rows.append(
            [
                name,
                str(len(calls)) + (f" ({failed} failed)" if failed else ""),
                _time(sum(_span(call, timeline) for call in calls)),
                _time(compute),
                _time(sum(call.begun - call.arrived for call in calls if call.arrived >= 0)),
                _time(sum(wire_of(call) for call in calls)),
                _bytes(sum(call.bytes_out + call.bytes_in for call in calls)),
            ]
        )
    return _format(["call", "count", "total", "compute", "queue", "wire", "bytes"], rows) if rows else ""


def wire_of(call: TimelineCall) -> int:
    """The time that the request and the reply of a call were on the wire."""
    request = call.arrived - call.sent if call.sent >= 0 and call.arrived >= 0 else 0
    reply = call.received - call.replied if call.received >= 0 and call.replied >= 0 else 0
    return max(request, 0) + max(reply, 0)


def _path_table(timeline: Timeline) -> str:
    names = {row.id: row.name for row in timeline.workers}
    spent: dict[tuple[str, str, str], int] = {}
    for segment in timeline.path:
        key = segment.kind, names.get(segment.worker, "?"), segment.name
        spent[key] = spent.get(key, 0) + segment.end - segment.start
    total = max(timeline.end, 1)
    ordered = sorted(spent.items(), key=lambda item: -item[1])
    rows = [
        [kind, worker, name, _time(time), f"{time / total:.1%}"]
        for (kind, worker, name), time in ordered[:_MAX_PATH_ROWS]
    ]
    if len(ordered) > _MAX_PATH_ROWS:
        rest = sum(time for _, time in ordered[_MAX_PATH_ROWS:])
        rows.append(["", "", f"{len(ordered) - _MAX_PATH_ROWS} more", _time(rest), f"{rest / total:.1%}"])
    return _format(["the time went to", "on", "in", "time", "share"], rows, 3) if rows else ""


def _span(call: TimelineCall, timeline: Timeline) -> int:
    return (call.done if call.done >= 0 else timeline.end) - call.start


def _compute_of_calls(timeline: Timeline) -> dict[int, int]:
    """Call -> how long its function ran, including steps after it returned, without the time it waited."""
    slices = {each.id: each for each in timeline.slices}
    computed: dict[int, int] = {}
    for each in timeline.slices:
        if each.call < 0 or each.kind not in ("run", "wait"):
            continue
        outer_kinds = [slices[parent].kind for parent in _ancestors(each, slices)]
        if each.kind == "run" and "run" not in outer_kinds:
            computed[each.call] = computed.get(each.call, 0) + each.end - each.start
        elif each.kind == "wait" and "run" in outer_kinds and "wait" not in outer_kinds:
            computed[each.call] = computed.get(each.call, 0) - (each.end - each.start)
    return computed


def _time(nanoseconds: int) -> str:
    if nanoseconds >= 1e9:
        return f"{nanoseconds / 1e9:.2f} s"
    if nanoseconds >= 1e6:
        return f"{nanoseconds / 1e6:.2f} ms"
    return f"{nanoseconds / 1e3:.1f} us"


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _format(head: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> str:
    """The first ``text_columns`` columns are text, the others numbers. A row with fewer cells than the head is not
    aligned to the columns.
    """
    widths = [
        max(len(line[i]) for line in [head, *rows] if i < len(line) and len(line) == len(head))
        for i in range(len(head))
    ]
    lines = []
    for line in (head, *rows):
        if len(line) < len(head):
            lines.append("  ".join([line[0].ljust(widths[0]), *line[1:]]).rstrip())
            continue
        cells = [
            text.ljust(width) if i < text_columns else text.rjust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)
