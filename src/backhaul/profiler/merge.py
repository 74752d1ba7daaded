"""Makes one timeline out of the shares of all workers. Pure."""

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

_AT_ONCE = 50_000  # nanoseconds between a function's return and its reply, if it returned the result itself


class Clock(msgspec.Struct):
    """How far a worker's clock is ahead of the profiling one's, and by how much that may be wrong."""

    offset: int = 0
    error: int = 0


class Raw(msgspec.Struct):
    """What a profiling worker has collected.

    Attributes:
        home: The thread that profiles.
        clocks: By worker.
        missing: Workers whose share could not be had, and why.
        names: Of all workers.
    """

    owner: int
    home: int
    begin: int
    end: int
    shares: list[Share]
    clocks: dict[int, Clock]
    missing: dict[int, str]
    names: dict[int, str]


def merge(raw: Raw) -> Timeline:
    """One timeline, on the clock of the worker that profiles."""
    shares = [share for share in raw.shares if share.worker == raw.owner or _is_used(share.records)]
    tracks = Tracks(raw.end - raw.begin)
    ends = _Ends()
    home = tracks.thread(raw.owner, raw.home, "")
    for share in shares:
        if share.worker == raw.owner:
            home.name = share.threads.get(raw.home, "MainThread")
        _Drawer(raw, share, tracks, ends).draw()
    finished, slices = tracks.finish()
    timeline = Timeline(raw.owner, raw.end - raw.begin, _rows(raw, shares), finished, slices, home=home.id)
    timeline.arrows = sorted([*ends.messages(), *_reports(raw, shares, timeline)], key=lambda arrow: arrow.start)
    timeline.calls = sorted(ends.finished_calls(), key=lambda call: call.start)
    timeline.path = find_path(timeline, home.id)
    _renumber(timeline)
    return timeline


def _renumber(timeline: Timeline) -> None:
    """Give calls small numbers; those that workers gave them are too large for JavaScript."""
    numbers = {call.id: number for number, call in enumerate(timeline.calls)} | {-1: -1}
    for call in timeline.calls:
        call.id, call.parent = numbers[call.id], numbers[call.parent]
    named: list[Slice | Arrow | PathSegment] = [*timeline.slices, *timeline.arrows, *timeline.path]
    for each in named:
        each.call = numbers.get(each.call, -1)


def _is_used(records: Records) -> bool:
    return bool(records.calls or records.serves or records.groups)


def _rows(raw: Raw, shares: list[Share]) -> list[WorkerRow]:
    here = {share.worker for share in raw.shares}
    missing = {worker: why for worker, why in raw.missing.items() if worker not in here}
    rows = [WorkerRow(worker, raw.names.get(worker, str(worker)), missing=why) for worker, why in missing.items()]
    for share in shares:
        clock = raw.clocks.get(share.worker, Clock())
        rows.append(
            WorkerRow(share.worker, share.name, share.host, share.pid, clock.offset, clock.error, note=share.note)
        )
    return sorted(rows, key=lambda row: row.id)


class _Ends:
    """Both ends of every message, by what names it."""

    def __init__(self) -> None:
        self.calls: dict[int, TimelineCall] = {}
        self.near: dict[int, Slice] = {}
        self.request: dict[int, Slice] = {}
        self.serve: dict[int, Slice] = {}
        self.reply: dict[int, Slice] = {}
        self.result: dict[int, Slice] = {}
        self.served: dict[int, tuple[int, int, int, int, int]] = {}
        self.gradient: dict[GradientKey, tuple[Slice, int]] = {}
        self.group: dict[GradientKey, tuple[Slice, int]] = {}

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


class _Drawer:
    """Draws one worker's share."""

    def __init__(self, raw: Raw, share: Share, tracks: Tracks, ends: _Ends) -> None:
        self._raw = raw
        self._share = share
        self._sheet = tracks
        self._ends = ends
        self._shift = raw.begin + raw.clocks.get(share.worker, Clock()).offset
        self._labels = {call.id: call.label for each in raw.shares for call in each.records.calls}

    def draw(self) -> None:
        records, worker = self._share.records, self._share.worker
        for call in records.calls:
            self._call(call)
        for serve in records.serves:
            self._serve(serve)
        for group in records.groups:
            self._group(group)
        for gradient in records.gradients:
            self._gradient(gradient)
        for wait in records.waits:
            if wait.end > self._shift:  # it may have ended before the profile began
                name = "lets a worker join the profile" if wait.joining else "waits"
                self._put("wait", name, wait.thread, (wait.start, wait.end))
        for step in records.steps:
            served = self._labels.get(step.call, "a call")
            self._put("run", f"{served} goes on", step.thread, (step.start, step.end), step.call)
        for each in records.passes:
            name, span = f"backward of context {split(each.context)[1]}", self._span(each.start, each.end)
            made = self._sheet.float("pass", name, (worker, "passes"), span, each.call or -1)
            made.args = _pass_args((each.context, worker, each.number, 0))
        for op in self._share.ops:
            self._op(op)

    def _time(self, time: int) -> int:
        return time - self._shift if time else -1

    def _span(self, start: int, end: int) -> Span:
        return self._time(start), self._time(end)

    def _put(self, kind: str, name: str, thread: int, times: Span, call: int = -1) -> Slice:
        track = self._sheet.thread(self._share.worker, thread, self._share.threads.get(thread, f"thread {thread}"))
        return self._sheet.put(kind, name, track, self._span(*times), call)

    def _call(self, record: CallRecord) -> None:
        ends, number, label = self._ends, record.id, record.label
        callee = self._raw.names.get(record.callee, str(record.callee))
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
        ends.near[number] = self._sheet.float(
            "call", call.name, (call.caller, "calls"), (call.start, call.done), number
        )
        if record.encoded:
            end = record.sent or record.encoded
            ends.request[number] = self._put(
                "encode", f"arguments of {label}", record.thread, (record.start, end), number
            )
        if record.opened and record.received:
            ends.result[number] = self._put(
                "decode", f"result of {label}", record.end_thread, (record.opened, record.done), number
            )

    def _serve(self, record: ServeRecord) -> None:
        ends, number = self._ends, record.call
        label = self._labels.get(number) or record.label or "a call"
        ran = record.ran or record.resumed  # never, if it still runs
        at_once = record.thread == record.reply_thread and 0 <= record.resumed - ran < _AT_ONCE
        end = record.replied if at_once else ran
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
            self._sheet.float("queue", label, (self._share.worker, "queue"), span, number)
        times5 = record.arrived, record.begun, record.decoded, ran, record.replied
        arrived, begun, decoded, ran, replied = map(self._time, times5)
        ends.served[number] = arrived, begun, decoded, ran, replied

    def _group(self, record: GroupRecord) -> None:
        message = record.key[3]
        maker, number = split(message)
        sender = self._raw.names.get(maker, "?")
        name = f"backward of message {number} from {sender}" if message else "backward of the roots"
        made = self._put("group", name, record.thread, (record.begun, record.end))
        made.args = _pass_args(record.key)
        if record.sender >= 0:
            span = self._span(record.arrived, record.begun)
            self._ends.group[record.key] = made, span[0]
            self._sheet.float("queue", name, (self._share.worker, "queue"), span)

    def _gradient(self, record: GradientRecord) -> None:
        name = f"gradient to {self._raw.names.get(record.to, record.to)}"
        made = self._put("encode", name, record.thread, (record.begun, record.sent))
        made.args = _pass_args(record.key)
        self._ends.gradient[record.key] = made, record.nbytes

    def _op(self, op: OpRecord) -> None:
        if op.device:
            lane = self._sheet.lane(self._share.worker, f"{op.device} stream {op.thread}", op.thread)
            made = self._sheet.put("op", op.name, lane, self._span(op.start, op.end))
        else:
            made = self._put("op", op.name, op.thread, (op.start, op.end))
        if op.user:
            made.args = {"user": True}
        if op.shapes:
            made.args = {**made.args, "shapes": op.shapes}
        if op.memory:
            made.args = {**made.args, "memory": op.memory}


def _pass_args(key: GradientKey) -> dict[str, int]:
    return {"context": split(key[0])[1], "driver": key[1], "pass": key[2]}


def _reports(raw: Raw, shares: list[Share], timeline: Timeline) -> Iterator[Arrow]:
    """Reports come in the order in which they left, so they need no numbers."""
    groups: dict[int, list[Slice]] = {}
    passes: dict[int, list[Slice]] = {}
    workers = {track.id: track.worker for track in timeline.tracks}
    for each in sorted(timeline.slices, key=lambda each: each.start):
        if each.kind in ("group", "pass"):
            found = groups if each.kind == "group" else passes
            found.setdefault(workers[each.track], []).append(each)
    sent: dict[tuple[int, int], list[int]] = {}
    came: dict[tuple[int, int], list[int]] = {}
    for share in shares:
        shift = raw.begin + raw.clocks.get(share.worker, Clock()).offset
        for report in share.records.reports:
            key = (share.worker, report.worker) if report.out else (report.worker, share.worker)
            (sent if report.out else came).setdefault(key, []).append(report.time - shift)
    for (worker, driver), times in sent.items():
        for start, end in zip(times, came.get((worker, driver), []), strict=False):
            source, target = _around(groups.get(worker, []), start), _around(passes.get(driver, []), end)
            if source is not None and target is not None:
                yield Arrow("report", source.id, target.id, start, end)


def _around(slices: list[Slice], time: int) -> Slice | None:
    """The slice that was open then and began last, of some in order."""
    place = bisect_right(slices, time, key=lambda each: each.start)
    found = (slices[i] for i in range(place - 1, max(place - 100, -1), -1) if slices[i].end >= time)
    return next(found, None)
