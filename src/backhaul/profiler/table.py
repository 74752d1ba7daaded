"""A timeline as text. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from backhaul.profiler.model import Slice, Timeline, TimelineCall

_TOP = 20  # rows of what was waited for


def to_table(timeline: Timeline) -> str:
    """Three tables: workers, calls, and what the profiled thread's time was made of."""
    parts = [_workers(timeline), _calls(timeline), _waited(timeline)]
    return "\n\n".join(part for part in parts if part)


def _workers(timeline: Timeline) -> str:
    tracks = {track.id: track.worker for track in timeline.tracks}
    slices = {each.id: each for each in timeline.slices}
    busy: dict[tuple[int, str], int] = {}

    def add(worker: int, what: str, amount: int) -> None:
        busy[worker, what] = busy.get((worker, what), 0) + amount

    add(timeline.owner, "compute", timeline.end)  # the profiled thread's own, less what it waited
    for each in timeline.slices:
        worker, span = tracks[each.track], each.end - each.start
        add(worker, each.kind, span)
        around = [slices[parent].kind for parent in _outwards(each, slices)]
        works = bool({"run", "group"} & set(around)) or each.track == timeline.home
        if each.kind in ("run", "group") and not works:
            add(worker, "compute", span)
        elif each.kind == "wait" and works and "wait" not in around:
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
        times = [_time(busy.get((row.id, what), 0)) for what in ("compute", "queue", "wire", "wait")]
        clock = f"{row.offset / 1e3:+.1f} us, +-{row.error / 1e3:.1f}" if row.error else "the same"
        rows.append([row.name, str(made), str(served), *times, _bytes(busy.get((row.id, "sent"), 0)), clock])
        if row.note:
            notes.append(f"{row.name}: {row.note}")
    head = ["worker", "calls", "served", "compute", "queue", "wire", "waits", "bytes sent", "clock"]
    return "\n".join([_format(head, rows), *notes])


def _outwards(each: Slice, slices: Mapping[int, Slice]) -> Iterator[int]:
    """The slices around one, from the innermost."""
    while each.parent >= 0:
        yield each.parent
        each = slices[each.parent]


def _calls(timeline: Timeline) -> str:
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
    """What a call spent on its way, both ways."""
    there = call.arrived - call.sent if call.sent >= 0 and call.arrived >= 0 else 0
    back = call.received - call.replied if call.received >= 0 and call.replied >= 0 else 0
    return max(there, 0) + max(back, 0)


def _waited(timeline: Timeline) -> str:
    names = {row.id: row.name for row in timeline.workers}
    spent: dict[tuple[str, str, str], int] = {}
    for segment in timeline.path:
        key = segment.kind, names.get(segment.worker, "?"), segment.name
        spent[key] = spent.get(key, 0) + segment.end - segment.start
    total = max(timeline.end, 1)
    ordered = sorted(spent.items(), key=lambda item: -item[1])
    rows = [[kind, worker, name, _time(time), f"{time / total:.1%}"] for (kind, worker, name), time in ordered[:_TOP]]
    if len(ordered) > _TOP:
        rest = sum(time for _, time in ordered[_TOP:])
        rows.append(["", "", f"{len(ordered) - _TOP} more", _time(rest), f"{rest / total:.1%}"])
    return _format(["the time went to", "on", "in", "time", "share"], rows, 3) if rows else ""


def _span(call: TimelineCall, timeline: Timeline) -> int:
    return (call.done if call.done >= 0 else timeline.end) - call.start


def _compute_of_calls(timeline: Timeline) -> dict[int, int]:
    """Call -> how long its function ran, later steps of it included, less what it waited."""
    slices = {each.id: each for each in timeline.slices}
    found: dict[int, int] = {}
    for each in timeline.slices:
        if each.call < 0 or each.kind not in ("run", "wait"):
            continue
        around = [slices[parent].kind for parent in _outwards(each, slices)]
        if each.kind == "run" and "run" not in around:
            found[each.call] = found.get(each.call, 0) + each.end - each.start
        elif each.kind == "wait" and "run" in around and "wait" not in around:
            found[each.call] = found.get(each.call, 0) - (each.end - each.start)
    return found


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


def _format(head: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1) -> str:
    """The first ``texts`` columns are text, the others numbers. A short row has no columns."""
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
            text.ljust(w) if i < texts else text.rjust(w) for i, (text, w) in enumerate(zip(line, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)
