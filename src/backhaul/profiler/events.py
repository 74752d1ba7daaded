"""A timeline as events of ``torch.profiler``. Pure."""

from __future__ import annotations

from typing import Any

from torch.autograd.profiler_util import EventList, FunctionEvent

from backhaul.profiler.model import Slice, Timeline, TimelineCall

REMOTE = "#remote_op: "


def to_events(timeline: Timeline, shift: int = 0) -> EventList:
    """Operations, calls and passes, ``shift`` nanoseconds later. What is not of the profiling worker is named by the
    calls that led to it.
    """
    tracks = {track.id: track for track in timeline.tracks}
    names = {row.id: row.name for row in timeline.workers}
    slices = {each.id: each for each in timeline.slices}
    calls = {call.id: call for call in timeline.calls}
    made = []
    for each in timeline.slices:
        track = tracks[each.track]
        if each.kind not in ("op", "call", "pass"):
            continue
        remote = track.worker != timeline.owner
        name = each.name
        if remote:
            name = _lineage(each, slices, calls, names, track.worker) + name
        event: Any = FunctionEvent(
            id=each.id,
            name=name,
            trace_name=name,
            thread=each.track,
            start_us=(each.start + shift) / 1e3,
            end_us=(each.end + shift) / 1e3,
            input_shapes=each.args.get("shapes"),
            stack=[],
            cpu_memory_usage=each.args.get("memory", 0),
            is_async=each.kind != "op",
            is_remote=remote,
            node_id=track.worker,
        )
        made.append(event)
    events = EventList(sorted(made, key=lambda event: (event.time_range.start, -event.time_range.end)), use_device=None)
    events._build_tree()
    return events


def _lineage(
    each: Slice, slices: dict[int, Slice], calls: dict[int, TimelineCall], names: dict[int, str], worker: int
) -> str:
    """What led to it: calls from the outermost in, or the pass whose gradients came there."""
    chain = []
    found = calls.get(each.call)
    if found is not None and each.kind == "call":
        found = calls.get(found.parent)
    while found is not None:
        chain.append(found.name)
        found = calls.get(found.parent)
    if not chain:
        around: Slice | None = each
        while around is not None and around.kind != "group":
            around = slices.get(around.parent)
        if around is not None:
            driver = names.get(around.args["driver"], "?")
            chain.append(f"backward({driver} -> {names[worker]})")
    return "".join(f"{name}{REMOTE}" for name in reversed(chain))
