"""What the tests of profiles check about timelines."""

from __future__ import annotations

from collections import Counter

from backhaul.profiler.model import KINDS, Timeline

OPS = ("aten::mm", "aten::relu", "aten::threshold_backward")  # the operations that tests count


def worker_of(timeline: Timeline) -> dict[int, str]:
    names = {row.id: row.name for row in timeline.workers}
    return {track.id: names[track.worker] for track in timeline.tracks}


def count_ops(timeline: Timeline) -> Counter[tuple[str, str]]:
    where = worker_of(timeline)
    return Counter((where[s.track], s.name) for s in timeline.slices if s.kind == "op" and s.name in OPS)


def check(timeline: Timeline) -> None:
    """Check the invariants of every timeline."""
    slices = {each.id: each for each in timeline.slices}
    workers = {row.id: row for row in timeline.workers}
    tracks = {track.id: track for track in timeline.tracks}
    assert len(slices) == len(timeline.slices)
    last: dict[tuple[int, int], int] = {}
    for each in timeline.slices:
        assert each.kind in KINDS
        assert tracks[each.track].worker in workers
        assert each.start <= each.end
        if each.parent >= 0:
            outer = slices[each.parent]
            assert outer.track == each.track
            assert outer.start <= each.start
            assert each.end <= outer.end
        assert last.get((each.track, each.parent), each.start) <= each.start, "siblings overlap"
        last[each.track, each.parent] = each.end
    for call in timeline.calls:
        near = [call.start, call.sent, call.received, call.done]
        far = [call.arrived, call.begun, call.decoded, call.ran, call.replied]
        for times in (near, far):
            known = [time for time in times if time >= 0]
            assert known == sorted(known)
        assert slices[call.near].kind == "call"
        assert call.far < 0 or slices[call.far].kind == "serve"
    for arrow in timeline.arrows:
        source, target = slices[arrow.source], slices[arrow.target]
        ends = workers[tracks[source.track].worker], workers[tracks[target.track].worker]
        assert arrow.end - arrow.start >= -sum(row.error for row in ends), "a message arrives after it was sent"
    edges = [segment.start for segment in timeline.path] + [timeline.end]
    assert edges[0] == 0
    assert [segment.end for segment in timeline.path] == edges[1:]
