"""Merging shares of workers whose clocks differ, and the critical path of timelines that are made by hand."""

from __future__ import annotations

import itertools
import time

from backhaul.profiler.critical_path import find_path
from backhaul.profiler.merge import Clock, CollectedShares, merge
from backhaul.profiler.model import Arrow, Slice, Timeline, Track, WorkerRow
from backhaul.profiler.records import (
    CallRecord,
    GradientRecord,
    GroupRecord,
    OpRecord,
    PassRecord,
    Records,
    ReportRecord,
    ServeRecord,
    Share,
    WaitRecord,
)
from backhaul.profiler.session import compare_clocks
from backhaul.profiler.tracks import nest

BEGIN = 1_000_000
AHEAD = 5_000_000_000  # how far the clock of worker 1 is ahead, in nanoseconds


def share(worker: int, records: Records, ops: list[OpRecord] | None = None) -> Share:
    return Share(worker, f"worker{worker}", "host", 1, [], {7: "MainThread", 9: "pool"}, records, ops or [])


def one_call() -> CollectedShares:
    """Worker 0 calls, waits from 30 to 95, and is done at 100. Worker 1 serves from 50 to 80, on another clock."""
    t, u = BEGIN, BEGIN + AHEAD
    near = Records(
        calls=[CallRecord(1, 0, "rpc_sync", "f", 1, 7, t + 10, t + 20, t + 30, t + 90, t + 95, t + 100, 7, 64, 32)],
        waits=[WaitRecord(7, t + 30, t + 95)],
    )
    far = Records(serves=[ServeRecord(1, 0, 9, u + 40, u + 50, "f", u + 55, u + 70, u + 70, u + 80, 9, 32)])
    ops = [OpRecord("aten::mm", 9, u + 56, u + 69)]
    clocks = {0: Clock(), 1: Clock(AHEAD, 3)}
    shares = [share(0, near), share(1, far, ops)]
    return CollectedShares(0, 7, t, t + 110, shares, clocks, {}, {0: "worker0", 1: "worker1"})


def test_clocks_are_aligned() -> None:
    timeline = merge(one_call())
    (call,) = timeline.calls
    times = (
        call.start,
        call.sent,
        call.arrived,
        call.begun,
        call.decoded,
        call.ran,
        call.replied,
        call.received,
        call.done,
    )
    assert times == (10, 30, 40, 50, 55, 70, 80, 90, 100)
    assert (timeline.workers[1].offset, timeline.workers[1].error) == (AHEAD, 3)
    slices = {each.id: each for each in timeline.slices}
    mm = next(each for each in timeline.slices if each.name == "aten::mm")
    assert (mm.start, mm.end, mm.call) == (56, 69, call.id)
    assert slices[mm.parent].kind == "run"
    assert [(a.kind, a.start, a.end, a.nbytes) for a in timeline.arrows] == [
        ("request", 30, 40, 64),
        ("reply", 80, 90, 32),
    ]


def test_clocks_are_compared_by_the_fastest_round_trip() -> None:
    """Requests, replies, or both are slow. The true offset is always within the error."""
    ahead = 7_000_000_000
    delays = itertools.cycle([(0.002, 0.0), (0.0, 0.002), (0.0, 0.0), (0.001, 0.003)])

    def ask() -> int:
        request, reply = next(delays)
        time.sleep(request)
        answer = time.time_ns() + ahead
        time.sleep(reply)
        return answer

    for _ in range(5):
        found = compare_clocks(ask)
        assert abs(found.offset - ahead) <= found.error
        assert found.error < 1_000_000


def test_the_path_of_one_call() -> None:
    path = [(s.kind, s.worker, s.start, s.end) for s in merge(one_call()).path]
    assert path == [
        ("compute", 0, 0, 10),
        ("encode", 0, 10, 30),
        ("wire", 0, 30, 40),
        ("queue", 1, 40, 50),
        ("decode", 1, 50, 55),
        ("compute", 1, 55, 56),
        ("compute", 1, 56, 69),
        ("compute", 1, 69, 70),
        ("encode", 1, 70, 80),
        ("wire", 1, 80, 90),
        ("queue", 0, 90, 95),
        ("decode", 0, 95, 100),
        ("compute", 0, 100, 110),
    ]


def test_the_path_of_a_pass() -> None:
    """Worker 0 sends a gradient and waits. Worker 1 runs the group and reports to worker 0, the driver."""
    t, u = BEGIN, BEGIN + AHEAD
    key, roots = (1, 0, 1, 5), (1, 0, 1, 0)
    near = Records(
        passes=[PassRecord(1, 1, 7, t + 5, t + 90)],
        groups=[GroupRecord(roots, -1, 7, t + 5, t + 5, t + 20)],
        gradients=[GradientRecord(key, 1, 7, t + 15, t + 20, 100)],
        waits=[WaitRecord(7, t + 20, t + 90)],
        reports=[ReportRecord(1, 9, t + 85, False)],
    )
    far = Records(
        groups=[GroupRecord(key, 0, 9, u + 30, u + 40, u + 75)],
        reports=[ReportRecord(0, 9, u + 74, True)],
    )
    clocks = {0: Clock(), 1: Clock(AHEAD, 3)}
    names = {0: "a", 1: "b", 2: "c"}
    shares = [share(0, near), share(1, far)]
    timeline = merge(CollectedShares(0, 7, t, t + 90, shares, clocks, {2: "lost"}, names))
    assert [(s.kind, s.worker, s.start, s.end) for s in timeline.path] == [
        ("compute", 0, 0, 5),
        ("compute", 0, 5, 15),
        ("encode", 0, 15, 20),
        ("wire", 0, 20, 30),
        ("queue", 1, 30, 40),
        ("compute", 1, 40, 74),
        ("wire", 1, 74, 85),
        ("queue", 0, 85, 90),
    ]
    assert [(row.name, row.missing) for row in timeline.workers] == [("worker0", ""), ("worker1", ""), ("c", "lost")]


def test_a_wait_that_no_message_ended_is_idle() -> None:
    timeline = Timeline(0, 100, [WorkerRow(0, "a")], [Track(0, 0, "main")], [Slice(0, 0, "wait", "waits", 20, 80)])
    assert [(s.kind, s.start, s.end) for s in find_path(timeline, 0)] == [
        ("compute", 0, 20),
        ("idle", 20, 80),
        ("compute", 80, 100),
    ]


def test_the_walk_ends_when_clocks_disagree() -> None:
    """A reply seems to be sent after it arrived, which the error of the clocks makes possible."""
    tracks = [Track(0, 0, "main"), Track(1, 1, "pool")]
    slices = [
        Slice(0, 0, "wait", "waits", 20, 80),
        Slice(1, 0, "decode", "result", 80, 85),
        Slice(2, 1, "encode", "result", 80, 90),
    ]
    timeline = Timeline(0, 100, [WorkerRow(0, "a"), WorkerRow(1, "b")], tracks, slices)
    timeline.arrows = [Arrow("reply", 2, 1, 90, 79)]
    path = find_path(timeline, 0)
    assert [segment.start for segment in path] == [0, *(segment.end for segment in path[:-1])]
    assert path[-1].end == 100


def test_a_slice_ends_no_later_than_its_parent() -> None:
    slices = [
        Slice(-1, 0, "op", "b", 12, 35),
        Slice(-1, 0, "serve", "a", 10, 30, call=4),
        Slice(-1, 0, "op", "c", 30, 40),
    ]
    nest(slices, 5)
    assert [(s.name, s.id, s.parent, s.start, s.end, s.call) for s in slices] == [
        ("a", 5, -1, 10, 30, 4),
        ("b", 6, 5, 12, 30, 4),
        ("c", 7, -1, 30, 40, -1),
    ]
