"""Converts a timeline to a trace for Perfetto and ``chrome://tracing``. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from backhaul.profiler.model import Arrow, Slice, Timeline


def to_chrome(timeline: Timeline) -> bytes:
    """The trace, as JSON. Each worker is a process of the trace. Times are microseconds since the profile began."""
    clocks = {
        row.name: {"offset_us": row.offset / 1e3, "error_us": row.error / 1e3}
        for row in timeline.workers
        if not row.missing
    }
    missing = {row.name: row.missing for row in timeline.workers if row.missing}
    notes = {row.name: row.note for row in timeline.workers if row.note}
    trace = {
        "displayTimeUnit": "ns",
        "otherData": {"clocks": clocks, "missing": missing, "notes": notes},
        "traceEvents": [*_names(timeline), *_slices(timeline), *_flows(timeline)],
    }
    return msgspec.json.encode(trace)


def _names(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for row in timeline.workers:
        label = f"{row.name} ({row.missing})" if row.missing else row.name
        yield {"ph": "M", "name": "process_name", "pid": row.id, "args": {"name": label}}
        yield {"ph": "M", "name": "process_sort_index", "pid": row.id, "args": {"sort_index": row.id}}
    for track in timeline.tracks:
        place = {"pid": track.worker, "tid": track.id}
        yield {"ph": "M", "name": "thread_name", **place, "args": {"name": track.name}}
        yield {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": track.id + 1000 * track.lane}}


def _slices(timeline: Timeline) -> Iterator[dict[str, Any]]:
    workers = {track.id: track.worker for track in timeline.tracks}
    calls = {call.id: call.name for call in timeline.calls}
    for each in timeline.slices:
        args = dict(each.args)
        if each.call in calls:
            args["call"] = calls[each.call]
        yield {
            "ph": "X",
            "name": each.name,
            "cat": each.kind,
            "pid": workers[each.track],
            "tid": each.track,
            "ts": each.start / 1e3,
            "dur": (each.end - each.start) / 1e3,
            "args": args,
        }


def _flows(timeline: Timeline) -> Iterator[dict[str, Any]]:
    workers = {track.id: track.worker for track in timeline.tracks}
    slices = {each.id: each for each in timeline.slices}

    def end(number: int, arrow: Arrow, phase: str, at: Slice, time: int) -> dict[str, Any]:
        return {
            "ph": phase,
            "id": number,
            "name": arrow.kind,
            "cat": arrow.kind,
            "pid": workers[at.track],
            "tid": at.track,
            "ts": min(max(time, at.start), at.end) / 1e3,  # viewers attach it to the slice that is open at this time
            "args": {"bytes": arrow.nbytes},
        }

    for number, arrow in enumerate(timeline.arrows, 1):
        source, target = slices[arrow.source], slices[arrow.target]
        yield end(number, arrow, "s", source, arrow.start)
        yield {**end(number, arrow, "f", target, max(arrow.end, target.start)), "bp": "e"}
