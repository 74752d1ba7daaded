"""Merges the shares of all workers into one timeline. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

import msgspec

from backhaul._autograd.ids import split
from backhaul._runtime.observer import GradientKey
from backhaul.profiler.critical_path import find_path
from backhaul.profiler.model import Arrow, PathSegment, Slice, Timeline, TimelineCall, WorkerRow
from backhaul.profiler.records import CallRecord, GradientRecord, GroupRecord, OpRecord, Records, ServeRecord, Share
from backhaul.profiler.tracks import Span, Tracks

_MAX_SLICES_SEARCHED = 100  # how many earlier slices are searched for one that is still open
_MAX_DIRECT_REPLY_NS = 50_000  # the longest time between a function's return and its reply, if it returns its result


class Clock(msgspec.Struct):
    """How far a worker's clock is ahead of the owner's clock, and the largest possible error of that. Nanoseconds."""

    offset: int = 0
    error: int = 0


class CollectedShares(msgspec.Struct):
    """What the owner of a profile has collected.

    Attributes:
        thread: The profiled thread.
        clocks: By worker.
        missing: Why a worker's share is missing, by worker.
        names: The names of all workers.
    """

    owner: int
    thread: int
    begin: int
    end: int
    shares: list[Share]
    clocks: dict[int, Clock]
    missing: dict[int, str]
    names: dict[int, str]


def merge(collected: CollectedShares) -> Timeline:
    """One timeline, on the clock of the owner of the profile."""
    owner, end = collected.owner, collected.end - collected.begin
    shares = [share for share in collected.shares if share.worker == owner or _is_used(share.records)]
    tracks = Tracks(end)
    ends = _MessageEnds()
    profiled = tracks.thread(owner, collected.thread, "")
    for share in shares:
        if share.worker == owner:
            profiled.name = share.threads.get(collected.thread, "MainThread")
        _ShareReader(collected, share, tracks, ends).read()
    finished, slices = tracks.finish()
    timeline = Timeline(owner, end, _rows(collected, shares), finished, slices, profiled_track=profiled.id)
    timeline.arrows = sorted([*ends.messages(), *_reports(collected, shares, timeline)], key=lambda arrow: arrow.start)
    timeline.calls = sorted(ends.finished_calls(), key=lambda call: call.start)
    timeline.path = find_path(timeline, profiled.id)
    _renumber(timeline)
    return timeline


def _renumber(timeline: Timeline) -> None:
    """Give calls small numbers. The numbers that workers gave them are too large for JavaScript."""
    numbers = {call.id: number for number, call in enumerate(timeline.calls)} | {-1: -1}
    for call in timeline.calls:
        call.id, call.parent = numbers[call.id], numbers[call.parent]
    with_call: list[Slice | Arrow | PathSegment] = [*timeline.slices, *timeline.arrows, *timeline.path]
    for each in with_call:
        each.call = numbers.get(each.call, -1)


def _is_used(records: Records) -> bool:
    return bool(records.calls or records.serves or records.groups)


def _rows(collected: CollectedShares, shares: list[Share]) -> list[WorkerRow]:
    present = {share.worker for share in collected.shares}
    missing = {worker: reason for worker, reason in collected.missing.items() if worker not in present}
    names = collected.names
    rows = [WorkerRow(worker, names.get(worker, str(worker)), missing=reason) for worker, reason in missing.items()]
    for share in shares:
        clock = collected.clocks.get(share.worker, Clock())
        rows.append(
            WorkerRow(share.worker, share.name, share.host, share.pid, clock.offset, clock.error, note=share.note)
        )
    return sorted(rows, key=lambda row: row.id)


class _MessageEnds:
    """The slices at both ends of every message, by call or by gradient message."""

    def __init__(self) -> None:
        self.calls: dict[int, TimelineCall] = {}
        self.near: dict[int, Slice] = {}  # the whole call, on the caller
        self.request: dict[int, Slice] = {}  # the caller encodes the arguments
        self.serve: dict[int, Slice] = {}  # the callee serves the call
        self.reply: dict[int, Slice] = {}  # the callee encodes the result
        self.result: dict[int, Slice] = {}  # the caller decodes the result
        self.served: dict[int, tuple[int, int, int, int, int]] = {}  # arrived, begun, decoded, ran, replied
        self.gradient: dict[GradientKey, tuple[Slice, int]] = {}  # the sender encodes a gradient; bytes
        self.group: dict[GradientKey, tuple[Slice, int]] = {}  # the receiver runs the group; when it arrived

    def finished_calls(self) -> Iterator[TimelineCall]:
        for number, call in self.calls.items():
            call.near = self.near[number].id
            if number in self.serve:
                call.far = self.serve[number].id
                call.arrived, call.begun, call.decoded, call.ran, call.replied = self.served[number]
            call.parent = call.parent if call.parent in self.calls else -1
            yield call

    def messages(self) -> Iterator[Arrow]:
        for number, call in self.calls.items():
            source, target = self.request.get(number), self.serve.get(number)
            if source is not None and target is not None:
                arrived = self.served[number][0]
                end = arrived if arrived >= 0 else target.start
                yield Arrow("request", source.id, target.id, call.sent, end, call.bytes_out, number)
            source, target = self.reply.get(number), self.result.get(number)
            if source is not None and target is not None:
                replied = self.served[number][4]
                yield Arrow("reply", source.id, target.id, replied, call.received, call.bytes_in, number)
        for key, (sent, nbytes) in self.gradient.items():
            if key in self.group:
                group, arrived = self.group[key]
                yield Arrow("gradient", sent.id, group.id, sent.end, arrived, nbytes)


class _ShareReader:
    """Makes slices of the records of one worker."""

    def __init__(self, collected: CollectedShares, share: Share, tracks: Tracks, ends: _MessageEnds) -> None:
        self._names = collected.names
        self._share = share
        self._tracks = tracks
        self._ends = ends
        self._origin = _origin_on(collected, share.worker)
        self._labels = {call.id: call.label for each in collected.shares for call in each.records.calls}

    def read(self) -> None:
        records, worker = self._share.records, self._share.worker
        for call in records.calls:
            self._add_call(call)
        for serve in records.serves:
            self._add_serve(serve)
        for group in records.groups:
            self._add_group(group)
        for gradient in records.gradients:
            self._add_gradient(gradient)
        for wait in records.waits:
            if wait.end > self._origin:  # it may have ended before the profile began
                name = "waits for a worker to join the profile" if wait.joining else "waits"
                self._put("wait", name, wait.thread, (wait.start, wait.end))
        for step in records.steps:
            served = self._labels.get(step.call, "a call")
            self._put("run", f"{served} continues", step.thread, (step.start, step.end), step.call)
        for each in records.passes:
            name, span = f"backward of context {split(each.context)[1]}", self._span(each.start, each.end)
            made = self._tracks.put_on_free_lane("pass", name, (worker, "passes"), span, each.call or -1)
            made.args = _pass_args((each.context, worker, each.number, 0))
        for op in self._share.ops:
            self._add_op(op)

    def _time(self, time: int) -> int:
        return time - self._origin if time else -1

    def _span(self, start: int, end: int) -> Span:
        return self._time(start), self._time(end)

    def _put(self, kind: str, name: str, thread: int, times: Span, call: int = -1) -> Slice:
        track = self._tracks.thread(self._share.worker, thread, self._share.threads.get(thread, f"thread {thread}"))
        return self._tracks.put(kind, name, track, self._span(*times), call)

    def _add_call(self, record: CallRecord) -> None:
        ends, number, label = self._ends, record.id, record.label
        callee = self._names.get(record.callee, str(record.callee))
        call = TimelineCall(
            number,
            f"{record.mode}#{label}({self._share.name} -> {callee})",
            record.mode,
            label,
            self._share.worker,
            record.callee,
            self._time(record.start),
            parent=record.parent or -1,
            sent=self._time(record.sent),
            received=self._time(record.received),
            done=self._time(record.done),
            bytes_out=record.bytes_out,
            bytes_in=record.bytes_in,
            failed=record.failed,
        )
        ends.calls[number] = call
        lanes = (call.caller, "calls")
        ends.near[number] = self._tracks.put_on_free_lane("call", call.name, lanes, (call.start, call.done), number)
        if record.encoded:
            end = record.sent or record.encoded
            ends.request[number] = self._put(
                "encode", f"arguments of {label}", record.thread, (record.start, end), number
            )
        if record.opened and record.received:
            ends.result[number] = self._put(
                "decode", f"result of {label}", record.end_thread, (record.opened, record.done), number
            )

    def _add_serve(self, record: ServeRecord) -> None:
        ends, number = self._ends, record.call
        label = self._labels.get(number) or record.label or "a call"
        ran = record.ran or record.resumed  # 0 if the function still runs
        is_direct = record.thread == record.reply_thread and 0 <= record.resumed - ran < _MAX_DIRECT_REPLY_NS
        end = record.replied if is_direct else ran
        ends.serve[number] = self._put("serve", label, record.thread, (record.begun, end), number)
        self._put("decode", f"arguments of {label}", record.thread, (record.begun, record.decoded or ran), number)
        if record.decoded:
            self._put("run", label, record.thread, (record.decoded, ran), number)
        if record.replied:
            name = f"result of {label}"
            ends.reply[number] = self._put(
                "encode", name, record.reply_thread, (record.resumed, record.replied), number
            )
        if record.arrived:
            span = self._span(record.arrived, record.begun)
            self._tracks.put_on_free_lane("queue", label, (self._share.worker, "queue"), span, number)
        times = record.arrived, record.begun, record.decoded, ran, record.replied
        arrived, begun, decoded, ran, replied = map(self._time, times)
        ends.served[number] = arrived, begun, decoded, ran, replied

    def _add_group(self, record: GroupRecord) -> None:
        message = record.key[3]
        maker, number = split(message)
        sender = self._names.get(maker, "?")
        name = f"backward of message {number} from {sender}" if message else "backward of the roots"
        made = self._put("group", name, record.thread, (record.begun, record.end))
        made.args = _pass_args(record.key)
        if record.sender >= 0:
            span = self._span(record.arrived, record.begun)
            self._ends.group[record.key] = made, span[0]
            self._tracks.put_on_free_lane("queue", name, (self._share.worker, "queue"), span)

    def _add_gradient(self, record: GradientRecord) -> None:
        name = f"gradient to {self._names.get(record.to, record.to)}"
        made = self._put("encode", name, record.thread, (record.begun, record.sent))
        made.args = _pass_args(record.key)
        self._ends.gradient[record.key] = made, record.nbytes

    def _add_op(self, op: OpRecord) -> None:
        if op.device:
            lane = self._tracks.lane(self._share.worker, f"{op.device} stream {op.thread}", op.thread)
            made = self._tracks.put("op", op.name, lane, self._span(op.start, op.end))
        else:
            made = self._put("op", op.name, op.thread, (op.start, op.end))
        if op.user:
            made.args = {"user": True}
        if op.shapes:
            made.args = {**made.args, "shapes": op.shapes}
        if op.memory:
            made.args = {**made.args, "memory": op.memory}


def _origin_on(collected: CollectedShares, worker: int) -> int:
    """The begin of the profile, on the clock of a worker."""
    return collected.begin + collected.clocks.get(worker, Clock()).offset


def _pass_args(key: GradientKey) -> dict[str, int]:
    return {"context": split(key[0])[1], "driver": key[1], "pass": key[2]}


def _reports(collected: CollectedShares, shares: list[Share], timeline: Timeline) -> Iterator[Arrow]:
    """The reports to drivers. They arrive in the order in which they were sent, so they need no numbers."""
    groups: dict[int, list[Slice]] = {}
    passes: dict[int, list[Slice]] = {}
    workers = {track.id: track.worker for track in timeline.tracks}
    for each in sorted(timeline.slices, key=lambda each: each.start):
        if each.kind in ("group", "pass"):
            found = groups if each.kind == "group" else passes
            found.setdefault(workers[each.track], []).append(each)
    sent: dict[tuple[int, int], list[int]] = {}
    received: dict[tuple[int, int], list[int]] = {}
    for share in shares:
        origin = _origin_on(collected, share.worker)
        for report in share.records.reports:
            key = (share.worker, report.worker) if report.out else (report.worker, share.worker)
            (sent if report.out else received).setdefault(key, []).append(report.time - origin)
    for (worker, driver), times in sent.items():
        for start, end in zip(times, received.get((worker, driver), []), strict=False):
            source, target = _open_slice(groups.get(worker, []), start), _open_slice(passes.get(driver, []), end)
            if source is not None and target is not None:
                yield Arrow("report", source.id, target.id, start, end)


def _open_slice(slices: list[Slice], time: int) -> Slice | None:
    """The slice that was open at a time and began last. ``slices`` are in order of time."""
    place = bisect_right(slices, time, key=lambda each: each.start)
    lowest = max(place - _MAX_SLICES_SEARCHED, -1)
    return next((slices[i] for i in range(place - 1, lowest, -1) if slices[i].end >= time), None)
