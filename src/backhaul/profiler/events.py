"""Converts a timeline to events of ``torch.profiler``. Pure."""

from __future__ import annotations

from typing import Any

from torch.autograd.profiler_util import EventList, FunctionEvent

from backhaul.profiler.model import Slice, Timeline, TimelineCall

REMOTE = "#remote_op: "  # separates the name of a call from the name of what was done for it


def to_events(timeline: Timeline, shift: int = 0) -> EventList:
    """The operations, calls and passes of a timeline, ``shift`` nanoseconds later.

    The names of events on other workers begin with the calls that led to them.
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
            name = _origin_prefix(each, slices, calls, names, track.worker) + name
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


def _origin_prefix(
    each: Slice, slices: dict[int, Slice], calls: dict[int, TimelineCall], names: dict[int, str], worker: int
) -> str:
    """The calls that led to a slice, the outermost first, or the pass whose gradients the worker received."""
    chain = []
    call = calls.get(each.call)
    if call is not None and each.kind == "call":
        call = calls.get(call.parent)
    while call is not None:
        chain.append(call.name)
        call = calls.get(call.parent)
    if not chain:
        outer: Slice | None = each
        while outer is not None and outer.kind != "group":
            outer = slices.get(outer.parent)
        if outer is not None:
            driver = names.get(outer.args["driver"], "?")
            chain.append(f"backward({driver} -> {names[worker]})")
    return "".join(f"{name}{REMOTE}" for name in reversed(chain))
