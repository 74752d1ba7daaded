"""Finds what the time of the profiled thread was spent on: the critical path. Pure.

The search goes backward from the end of the profile. Time in which a thread did something is attributed to what it did.
Time in which a thread waited is attributed to the message that ended the wait: first to its way over the wire, then to
what the sending thread did before it sent the message, and so on.
"""

from __future__ import annotations

import operator
from bisect import bisect_left, bisect_right

from backhaul.profiler.model import Arrow, PathSegment, Slice, Timeline

_WAIT_ENDING_KINDS = ("reply", "report", "gradient")  # the kinds of messages that can end a wait


def find_path(timeline: Timeline, profiled_track: int) -> list[PathSegment]:
    """The segments of the critical path, from the begin of the profile to its end, without gaps.

    ``profiled_track`` is the track of the profiled thread.
    """
    return _BackwardWalk(timeline, profiled_track).walk()


class _BackwardWalk:
    """A position (a track and a time) that moves back through the timeline, and the segments passed so far."""

    def __init__(self, timeline: Timeline, profiled_track: int) -> None:
        self._profiled_track = profiled_track
        self._slices = {each.id: each for each in timeline.slices}
        self._workers = {track.id: track.worker for track in timeline.tracks}
        self._children: dict[tuple[int, int], list[Slice]] = {}  # (track, parent) -> slices in order of time
        outer_ops: dict[int, int] = {}  # operation inside an operation -> the outermost one
        for each in timeline.slices:  # parents come before their children
            parent = outer_ops.get(each.parent, each.parent)
            if each.kind == "op" and parent >= 0 and self._is_operation(parent):
                outer_ops[each.id] = parent
            else:
                self._children.setdefault((each.track, parent), []).append(each)
        for slices in self._children.values():
            slices.sort(key=lambda each: each.start)
        self._arrow_to: dict[int, Arrow] = {}  # by the slice that received the message
        self._wait_ends: dict[int, list[tuple[int, Arrow]]] = {}  # by worker: when a message may have ended a wait
        for arrow in timeline.arrows:
            if arrow.kind != "report":
                self._arrow_to[arrow.target] = arrow
            if arrow.kind in _WAIT_ENDING_KINDS:
                wait_ends = self._wait_ends.setdefault(self._worker_of(arrow.target), [])
                wait_ends.append((arrow.end, arrow))
                if arrow.kind == "reply":
                    wait_ends.append((self._slices[arrow.target].end, arrow))
        for wait_ends in self._wait_ends.values():
            wait_ends.sort(key=lambda wait_end: wait_end[0])
        self._time = timeline.end
        self._track = profiled_track
        self._segments: list[PathSegment] = []

    def _is_operation(self, number: int) -> bool:
        """Whether a slice is an operation of torch. The path contains it as a whole, unlike a region of the user."""
        each = self._slices[number]
        return each.kind == "op" and not each.args.get("user")

    def walk(self) -> list[PathSegment]:
        while self._time > 0:
            before = self._time, self._track
            self._step()
            if (self._time, self._track) == before:  # the clocks of two workers disagree: the rest is not known
                self._move_to(0, "idle", "unknown", None)
        self._segments.reverse()
        return self._segments

    def _worker_of(self, slice_id: int) -> int:
        return self._workers[self._slices[slice_id].track]

    def _step(self) -> None:
        current, last = self._innermost_slice()
        if current is None:
            self._step_outside_slices(last)
        elif current.kind == "wait":
            self._step_over_wait(current, last)
        else:
            kind = current.kind if current.kind in ("encode", "decode") else "compute"
            name = "backward" if current.kind == "group" else current.name
            self._move_to(current.start if last is None else last.end, kind, name, current)
            while current.parent >= 0 and self._slices[current.parent].start >= self._time:
                current = self._slices[current.parent]
            if current.parent < 0 and current.start >= self._time and current.id in self._arrow_to:
                self._follow(self._arrow_to[current.id], current)

    def _innermost_slice(self) -> tuple[Slice | None, Slice | None]:
        """The innermost slice that is open just before the current time, and the last ended slice inside it."""
        current: Slice | None = None
        while True:
            children = self._children.get((self._track, -1 if current is None else current.id), [])
            place = bisect_left(children, self._time, key=lambda each: each.start)
            last = children[place - 1] if place else None
            if last is None or last.end < self._time:
                return current, last
            current = last

    def _step_outside_slices(self, last: Slice | None) -> None:
        """No slice is open on this thread: it runs the user's program, or code between two messages."""
        if self._track == self._profiled_track:
            self._move_to(0 if last is None else last.end, "compute", "the program", None)
        elif last is not None:
            self._move_to(last.end, "compute", "callbacks", None)
        else:
            self._track = self._profiled_track

    def _step_over_wait(self, wait: Slice, last: Slice | None) -> None:
        lower = wait.start if last is None else last.end
        wait_ends = self._wait_ends.get(self._workers[self._track], [])
        place = bisect_right(wait_ends, self._time, key=lambda wait_end: wait_end[0])
        when, arrow = wait_ends[place - 1] if place else (-1, None)
        if arrow is not None and when > lower and arrow.start < self._time:
            self._move_to(when, "queue", "thread wakes up", wait)
            if when > arrow.end:  # this thread waited for another thread, which decoded the message
                target = self._slices[arrow.target]
                self._move_to(max(target.start, arrow.end), "decode", target.name, target)
            self._follow(arrow, wait)
        else:
            self._move_to(lower, "idle", "waits", wait)

    def _follow(self, arrow: Arrow, at: Slice) -> None:
        """Move back along a message to the thread that sent it."""
        source = self._slices[arrow.source]
        self._move_to(arrow.end, "queue", f"{arrow.kind} waits for a thread", at)
        sender = self._workers[source.track]
        if arrow.start < self._time:
            self._add(PathSegment("wire", sender, arrow.kind, max(arrow.start, 0), self._time, call=arrow.call))
        self._track = source.track

    def _move_to(self, time: int, kind: str, name: str, at: Slice | None) -> None:
        """Move back to a time on the same track, and add a segment for the time between."""
        time = max(time, 0)
        if time < self._time:
            number, call = (at.id, at.call) if at is not None else (-1, -1)
            self._add(PathSegment(kind, self._workers[self._track], name, time, self._time, number, call))

    def _add(self, segment: PathSegment) -> None:
        """Add a segment in front of those found so far. It extends the next one if both are of the same slice."""
        self._time = segment.start
        later = self._segments[-1] if self._segments else None
        same = operator.attrgetter("kind", "worker", "name", "slice")
        if later is not None and same(later) == same(segment):
            later.start = segment.start
        else:
            self._segments.append(segment)
