"""Timelines that a small deterministic simulation makes, to test reports without a cluster.

Times are in nanoseconds. A function that simulates an activity returns when it ended and its path segments.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from backhaul.profiler.model import Arrow, PathSegment, Slice, Timeline, TimelineCall, Track, WorkerRow

US = 1_000
MS = 1_000_000
HOSTILE = "</script><img src=x onerror=\"window.hacked=1\"><!-- {{script}} \u2028 & 'quoted'"

Done = tuple[int, list[PathSegment]]
Body = Callable[["Step", int, int, int], Done]  # simulation, worker, call, when it begins


class Step:
    """One training step of a trainer, two stages of a model, and a worker whose share is missing."""

    def __init__(self, seed: int = 5) -> None:
        self.draw = random.Random(seed)
        self.timeline = Timeline(owner=0, end=0)
        self.timeline.workers = [
            WorkerRow(0, "trainer", host="node-a", pid=4101),
            WorkerRow(1, "stage1", host="node-a", pid=4102, offset=-184 * US, error=9 * US),
            WorkerRow(2, "stage2", host="node-b", pid=977, offset=3_412 * US, error=41 * US),
            WorkerRow(3, "logger", host="node-b", pid=978, missing="it did not answer within 5 s"),
        ]
        self.main = self.track(0, "MainThread")
        self.receiver = {0: self.track(0, "receiver")}
        self.lanes = {0: [self.track(0, "calls", lane=True)]}
        self.passes = self.track(0, "passes", lane=True)
        self.queues = {worker: self.track(worker, "queue", lane=True) for worker in (1, 2)}
        self.threads = {worker: [self.track(worker, f"serve-{n}") for n in range(2)] for worker in (1, 2)}
        self.engines = {0: self.main, 1: self.threads[1][0], 2: self.threads[2][0]}
        for worker in (1, 2):
            self.receiver[worker] = self.track(worker, "receiver")
            self.lanes[worker] = [self.track(worker, "calls", lane=True)]
        self.busy: dict[int, int] = {}  # track -> when it becomes free

    def track(self, worker: int, name: str, *, lane: bool = False) -> int:
        self.timeline.tracks.append(Track(len(self.timeline.tracks), worker, name, lane))
        return len(self.timeline.tracks) - 1

    def slice(
        self,
        track: int,
        kind: str,
        name: str,
        start: int,
        end: int,
        *,
        parent: int = -1,
        call: int = -1,
        **args: object,
    ) -> int:
        self.timeline.slices.append(Slice(len(self.timeline.slices), track, kind, name, start, end, parent, call, args))
        self.busy[track] = max(self.busy.get(track, 0), end)
        return len(self.timeline.slices) - 1

    def about(self, mean: int) -> int:
        return max(1, int(mean * self.draw.uniform(0.6, 1.5)))

    def compute(self, track: int, name: str, start: int, took: int, *, parent: int = -1, call: int = -1) -> Done:
        """A sequence of operations, some of which contain others."""
        worker = self.timeline.tracks[track].worker
        time, segments = start, []
        for op in ("aten::linear", "aten::gelu", "aten::layer_norm", "aten::add_"):
            end = time + self.about(took // 4)
            outer = self.slice(track, "op", op, time, end, parent=parent, call=call, shapes="[32, 128]")
            if op == "aten::linear":
                self.slice(track, "op", "aten::addmm", time + 4 * US, end - 2 * US, parent=outer, call=call)
            segments.append(PathSegment("compute", worker, name, time, end, outer, call))
            time = end
        return time, segments

    def thread_of(self, worker: int, time: int) -> int:
        threads = self.threads[worker]
        free = [thread for thread in threads if self.busy.get(thread, 0) <= time]
        return (free or [min(threads, key=lambda thread: self.busy[thread])])[0]

    def lane_of(self, worker: int, time: int) -> int:
        """A lane of calls that is free, because the slices of a track must not overlap."""
        lanes = self.lanes[worker]
        for lane in lanes:
            if self.busy.get(lane, 0) <= time:
                return lane
        lanes.append(self.track(worker, f"calls {len(lanes) + 1}", lane=True))
        return lanes[-1]

    def call(
        self, mode: str, function: str, near: int, thread: int, far: int, start: int, body: Body,
        *, parent: int = -1, within: int = -1, out: int = 65_536, back: int = 65_536, failed: str = "",
    ) -> Done:  # fmt: skip
        """A complete call. The thread of the caller is free again once the call is sent."""
        names = [row.name for row in self.timeline.workers]
        call = TimelineCall(
            len(self.timeline.calls),
            f"{mode}#{function}({names[near]} -> {names[far]})",
            mode,
            function,
            near,
            far,
            start,
            parent=parent,
            bytes_out=out,
            bytes_in=back,
            failed=failed,
        )
        self.timeline.calls.append(call)
        number = call.id
        call.sent = start + self.about(40 * US)
        coded = self.slice(thread, "encode", "encode", start, call.sent, parent=within, call=number, nbytes=out)
        segments = [PathSegment("encode", near, function, start, call.sent, coded, number)]
        if self.timeline.workers[far].missing:
            call.received = call.sent + self.about(900 * US)
            call.done = call.received + self.about(10 * US)
            call.near = self.slice(self.lane_of(near, start), "call", call.name, start, call.done, call=number)
            return call.done, [*segments, PathSegment("idle", near, function, call.sent, call.done, call.near, number)]

        call.arrived = call.sent + self.about(90 * US)
        server = self.thread_of(far, call.arrived)
        call.begun = max(call.arrived + self.about(12 * US), self.busy.get(server, 0))
        waiting = self.slice(self.queues[far], "queue", function, call.arrived, call.begun, call=number)
        call.decoded = call.begun + self.about(35 * US)
        call.far = self.slice(server, "serve", call.name, call.begun, call.decoded, call=number)
        decode = self.slice(server, "decode", "decode", call.begun, call.decoded, parent=call.far, call=number)
        run = self.slice(server, "run", function, call.decoded, call.decoded, parent=call.far, call=number)
        self.running = (server, run)
        call.ran, inside = body(self, far, number, call.decoded)
        self.timeline.slices[run].end = call.ran
        call.replied = call.ran + self.about(30 * US)
        encode = self.slice(
            server, "encode", "encode", call.ran, call.replied, parent=call.far, call=number, nbytes=back
        )
        self.timeline.slices[call.far].end = call.replied
        call.received = call.replied + self.about(80 * US)
        call.done = call.received + self.about(25 * US)
        call.near = self.slice(self.lane_of(near, start), "call", call.name, start, call.done, call=number)
        decoded = self.slice(self.receiver[near], "decode", "decode", call.received, call.done, call=number)
        self.timeline.arrows += [
            Arrow("request", coded, call.far, call.sent, call.arrived, out, number),
            Arrow("reply", encode, decoded, call.replied, call.received, back, number),
        ]
        segments += [
            PathSegment("wire", near, function, call.sent, call.arrived, -1, number),
            PathSegment("queue", far, function, call.arrived, call.begun, waiting, number),
            PathSegment("decode", far, function, call.begun, call.decoded, decode, number),
            *inside,
            PathSegment("encode", far, function, call.ran, call.replied, encode, number),
            PathSegment("wire", far, function, call.replied, call.received, -1, number),
            PathSegment("decode", near, function, call.received, call.done, decoded, number),
        ]
        return call.done, segments

    def wait(self, start: int, end: int, name: str, *, call: int = -1) -> None:
        self.slice(self.main, "wait", name, start, end, call=call)

    def backward(self, start: int, micro: int) -> Done:
        """A backward pass from the trainer through the stages, the last stage first."""
        time, segments, sender = start, [], -1
        for worker in (0, 2, 1, 0):
            track = self.engines[worker]
            if sender >= 0:
                sent, source = time, self.timeline.slices[sender]
                time = max(sent + self.about(85 * US), self.busy.get(track, 0) if worker else 0)
                segments.append(PathSegment("wire", self.timeline.tracks[source.track].worker, "gradients", sent, time))
            group = self.slice(track, "group", f"backward of micro-batch {micro}", time, time, **{"pass": micro})
            if sender >= 0:
                self.timeline.arrows.append(Arrow("gradient", sender, group, sent, time, 65_536))
            begun = time
            time, inside = self.compute(track, "backward", time, 500 * US if worker else 120 * US, parent=group)
            self.timeline.slices[group].end = time
            segments += inside
            if begun == start:
                waits = time
            sender = group
        last = self.timeline.slices[sender]
        self.wait(waits, last.start, "backward")
        self.slice(self.passes, "pass", f"pass {micro}", start, time, **{"pass": micro})
        return time, segments


def forward1(step: Step, worker: int, call: int, start: int) -> Done:
    """The first stage computes, then calls the second stage."""
    server, run = step.running
    time, before = step.compute(server, "stage1.forward", start, 700 * US, parent=run, call=call)
    done, inside = step.call("rpc_sync", "stage2.forward", worker, server, 2, time, forward2, parent=call, within=run)
    made = step.timeline.calls[call + 1]
    step.slice(server, "wait", "stage2.forward", made.sent, done, parent=run, call=made.id)
    after, rest = step.compute(server, "stage1.forward", done, 60 * US, parent=run, call=call)
    return after, before + inside + rest


def forward2(step: Step, worker: int, call: int, start: int) -> Done:
    server, run = step.running
    return step.compute(server, "stage2.forward", start, 900 * US, parent=run, call=call)


def brief(step: Step, worker: int, call: int, start: int) -> Done:
    server, run = step.running
    return step.compute(server, "optimizer.step", start, 180 * US, parent=run, call=call)


def clipped(segments: list[PathSegment], start: int) -> list[PathSegment]:
    """The part of the segments after a time."""
    kept = [segment for segment in segments if segment.end > start]
    if kept:
        kept[0].start = start
    return kept


def sample(*, hostile: str = "") -> Timeline:
    """About forty calls in five micro-batches: nested calls, a failed call, and a call to a missing worker.

    Args:
        hostile: A name for a worker, a track, calls and slices.
    """
    step = Step()
    path = step.timeline.path
    time = 120 * US
    path.append(PathSegment("idle", 0, "", 0, time))
    for micro in range(5):
        time, did = step.compute(step.main, "embed", time, 320 * US)
        path += did
        done, did = step.call("rpc_sync", "stage1.forward", 0, step.main, 1, time, forward1, out=131_072)
        outer = next(call for call in reversed(step.timeline.calls) if call.function == "stage1.forward")
        step.wait(outer.sent, done, "stage1.forward", call=outer.id)
        path += did
        time, did = step.compute(step.main, "loss", done, 200 * US)
        path += did
        time, did = step.backward(time, micro)
        path += did
        time = fan_out(step, time, micro)
    if hostile:
        step.timeline.workers[2].name = hostile
        step.timeline.tracks[0].name = hostile
        step.timeline.calls[0].name = step.timeline.calls[0].function = hostile
        for name in (step.timeline.calls[0].near, step.timeline.calls[0].far):
            step.timeline.slices[name].name = hostile
        path[1].name = hostile
    step.timeline.end = time + 60 * US
    path.append(PathSegment("idle", 0, "", time, step.timeline.end))
    return step.timeline


def fan_out(step: Step, time: int, micro: int) -> int:
    """Several concurrent calls. The step waits for the one that ends last."""
    planned = [
        ("optimizer.step", 1, ""),
        ("optimizer.step", 2, ""),
        ("scheduler.step", 1, ""),
        ("metrics.update", 2, "ValueError" if micro == 2 else ""),
        ("checkpoint.put", 1, ""),
        *([("log", 3, "")] if micro == 1 else []),
    ]
    dones, first = [], len(step.timeline.calls)
    for function, far, failed in planned:
        done, did = step.call("rpc_async", function, 0, step.main, far, time, brief, out=2_048, back=184, failed=failed)
        dones.append((done, did))
        sent = step.timeline.calls[-1].sent
        step.timeline.path.append(PathSegment("encode", 0, function, time, sent, did[0].slice, did[0].call))
        time = sent
    last, did = max(dones, key=lambda one: one[0])
    step.wait(time, last, "wait_all", call=first)
    step.timeline.path += clipped(did, time)
    return last


def big(slices: int = 50_000) -> Timeline:
    """Many slices on a few threads, and thousands of calls. Most slices are thinner than a pixel."""
    draw = random.Random(1)
    made = Timeline(owner=0, end=0, workers=[WorkerRow(n, f"worker{n}", host="node", pid=100 + n) for n in range(4)])
    made.tracks = [Track(n, n, "MainThread") for n in range(4)]
    made.tracks += [Track(4 + n, n, "calls", lane=True) for n in range(4)]
    time = 0
    while len(made.slices) < slices:
        number, far = len(made.calls), 1 + len(made.calls) % 3
        call = TimelineCall(
            number,
            f"rpc_sync#layer{number % 7}(worker0 -> worker{far})",
            "rpc_sync",
            f"layer{number % 7}",
            0,
            far,
            time,
        )
        call.sent = time + draw.randrange(5, 40) * US
        call.arrived = call.sent + draw.randrange(20, 90) * US
        call.begun, call.decoded = call.arrived + 2 * US, call.arrived + 9 * US
        call.far = len(made.slices)
        made.slices.append(Slice(call.far, far, "serve", call.name, call.begun, 0, call=number))
        moment = call.decoded
        for op in range(draw.randrange(4, 30)):
            end = moment + draw.randrange(1, 60) * US
            made.slices.append(Slice(len(made.slices), far, "op", f"aten::op{op}", moment, end, call.far, number))
            made.path.append(PathSegment("compute", far, call.function, moment, end, made.slices[-1].id, number))
            moment = end
        call.ran, call.replied = moment, moment + 4 * US
        made.slices[call.far].end = call.replied
        call.received = call.replied + draw.randrange(20, 90) * US
        call.done = call.received + 5 * US
        call.near = len(made.slices)
        made.slices.append(Slice(call.near, 4, "call", call.name, time, call.done, call=number))
        made.slices.append(Slice(call.near + 1, 0, "wait", call.name, call.sent, call.received, call=number))
        made.arrows += [
            Arrow("request", call.near, call.far, call.sent, call.arrived, 1000, number),
            Arrow("reply", call.far, call.near, call.replied, call.received, 1000, number),
        ]
        made.calls.append(call)
        time = call.done + 3 * US
    made.end = time
    return made
