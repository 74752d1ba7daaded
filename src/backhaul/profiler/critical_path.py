"""What the time of the profiled thread was made of. Pure.

Walks back from the end: time in which a thread did something is that thing's. Time in which it waited is whatever the
message was doing that ended the wait: first on the wire, then what the thread did that sent it, and so on back.
"""

from __future__ import annotations

import operator
from bisect import bisect_left, bisect_right

from backhaul.profiler.model import Arrow, PathSegment, Slice, Timeline

_ENDING = ("reply", "report", "gradient")  # messages that can end a wait


def find_path(timeline: Timeline, home: int) -> list[PathSegment]:
    """Segments from the begin of the profile to its end, without gaps. ``home`` is the profiled thread's track."""
    return _Walk(timeline, home).walk()


class _Walk:
    def __init__(self, timeline: Timeline, home: int) -> None:
        self._home = home
        self._slices = {each.id: each for each in timeline.slices}
        self._workers = {track.id: track.worker for track in timeline.tracks}
        self._inside: dict[tuple[int, int], list[Slice]] = {}  # (track, parent) -> slices in order
        whole: dict[int, int] = {}  # parts of an operation -> all of it
        for each in timeline.slices:  # in order: parents come first
            parent = whole.get(each.parent, each.parent)
            if each.kind == "op" and parent >= 0 and self._is_whole(parent):
                whole[each.id] = parent
            else:
                self._inside.setdefault((each.track, parent), []).append(each)
        for slices in self._inside.values():
            slices.sort(key=lambda each: each.start)
        self._to: dict[int, Arrow] = {}  # by the slice that took it up
        self._ending: dict[int, list[tuple[int, Arrow]]] = {}  # by worker: what can end a wait, and when
        for arrow in timeline.arrows:
            if arrow.kind != "report":
                self._to[arrow.target] = arrow
            if arrow.kind in _ENDING:
                effects = self._ending.setdefault(self._worker_of(arrow.target), [])
                effects.append((arrow.end, arrow))
                if arrow.kind == "reply":
                    effects.append((self._slices[arrow.target].end, arrow))
        for effects in self._ending.values():
            effects.sort(key=lambda effect: effect[0])
        self._time = timeline.end
        self._track = home
        self._found: list[PathSegment] = []

    def _is_whole(self, number: int) -> bool:
        """Whether it is an operation, which is not looked into, and no region of the user's."""
        each = self._slices[number]
        return each.kind == "op" and not each.args.get("user")

    def walk(self) -> list[PathSegment]:
        while self._time > 0:
            before = self._time, self._track
            self._step()
            if (self._time, self._track) == before:  # clocks disagree: give up on what is left
                self._go_to(0, "idle", "unknown", None)
        self._found.reverse()
        return self._found

    def _worker_of(self, slice_id: int) -> int:
        return self._workers[self._slices[slice_id].track]

    def _step(self) -> None:
        around, last = self._look()
        if around is None:
            self._outside(last)
        elif around.kind == "wait":
            self._wait(around, last)
        else:
            kind = around.kind if around.kind in ("encode", "decode") else "compute"
            name = "backward" if around.kind == "group" else around.name
            self._go_to(around.start if last is None else last.end, kind, name, around)
            while around.parent >= 0 and self._slices[around.parent].start >= self._time:
                around = self._slices[around.parent]
            if around.parent < 0 and around.start >= self._time and around.id in self._to:
                self._follow(self._to[around.id], around)

    def _look(self) -> tuple[Slice | None, Slice | None]:
        """The innermost slice that is open just before now, and the last one inside of it that has ended."""
        around: Slice | None = None
        while True:
            inside = self._inside.get((self._track, -1 if around is None else around.id), [])
            place = bisect_left(inside, self._time, key=lambda each: each.start)
            last = inside[place - 1] if place else None
            if last is None or last.end < self._time:
                return around, last
            around = last

    def _outside(self, last: Slice | None) -> None:
        """No slice is open on this thread: its own program, or code between two messages."""
        if self._track == self._home:
            self._go_to(0 if last is None else last.end, "compute", "the program", None)
        elif last is not None:
            self._go_to(last.end, "compute", "callbacks", None)
        else:
            self._track = self._home

    def _wait(self, wait: Slice, last: Slice | None) -> None:
        lower = wait.start if last is None else last.end
        effects = self._ending.get(self._workers[self._track], [])
        place = bisect_right(effects, self._time, key=lambda effect: effect[0])
        when, arrow = effects[place - 1] if place else (-1, None)
        if arrow is not None and when > lower and arrow.start < self._time:
            self._go_to(when, "queue", "wakes up", wait)
            if when > arrow.end:  # it was read by another thread, for which this one waited
                target = self._slices[arrow.target]
                self._go_to(max(target.start, arrow.end), "decode", target.name, target)
            self._follow(arrow, wait)
        else:
            self._go_to(lower, "idle", "waits", wait)

    def _follow(self, arrow: Arrow, at: Slice) -> None:
        """Back over a message, to the thread that sent it."""
        source = self._slices[arrow.source]
        self._go_to(arrow.end, "queue", f"{arrow.kind} waits for a thread", at)
        sender = self._workers[source.track]
        if arrow.start < self._time:
            self._add(PathSegment("wire", sender, arrow.kind, max(arrow.start, 0), self._time, call=arrow.call))
        self._track = source.track

    def _go_to(self, time: int, kind: str, name: str, at: Slice | None) -> None:
        time = max(time, 0)
        if time < self._time:
            number, call = (at.id, at.call) if at is not None else (-1, -1)
            self._add(PathSegment(kind, self._workers[self._track], name, time, self._time, number, call))

    def _add(self, segment: PathSegment) -> None:
        self._time = segment.start
        later = self._found[-1] if self._found else None
        same = operator.attrgetter("kind", "worker", "name", "slice")
        if later is not None and same(later) == same(segment):
            later.start = segment.start
        else:
            self._found.append(segment)
