"""Collects slices on tracks while a timeline is built. Pure."""

from __future__ import annotations

import heapq

from backhaul.profiler.model import Slice, Track

Span = tuple[int, int]
"""When something began and ended. An end before the begin means that it has not ended."""

# Of two slices with the same times, the one whose kind comes first is the outer one.
_NESTING_ORDER = {kind: rank for rank, kind in enumerate(("serve", "group", "run", "wait", "encode", "decode", "op"))}


class Tracks:
    """Takes slices in any order. ``finish`` nests and numbers the slices of each track."""

    def __init__(self, end: int) -> None:
        self._end = end
        self._tracks: dict[tuple[int, str, int], Track] = {}
        self._slices: list[Slice] = []
        self._without_track: dict[tuple[int, str], list[Slice]] = {}  # by worker and name of the lanes

    def thread(self, worker: int, number: int, name: str) -> Track:
        """The track of a thread."""
        return self._track(worker, name, number, lane=False)

    def lane(self, worker: int, name: str, number: int = 0) -> Track:
        """A track that does not belong to a thread."""
        return self._track(worker, name, number, lane=True)

    def _track(self, worker: int, name: str, number: int, *, lane: bool) -> Track:
        key = worker, name if lane else "", number
        if key not in self._tracks:
            self._tracks[key] = Track(len(self._tracks), worker, name, lane)
        return self._tracks[key]

    def put(self, kind: str, name: str, track: Track, span: Span, call: int = -1) -> Slice:
        """Add a slice to a track. A slice that has not ended ends with the profile."""
        made = Slice(-1, track.id, kind, name, max(span[0], 0), max(self._end_of(span), 0), call=call)
        self._slices.append(made)
        return made

    def put_on_free_lane(self, kind: str, name: str, lanes: tuple[int, str], span: Span, call: int = -1) -> Slice:
        """Add a slice to a lane that is free at the time. ``lanes`` are the worker and the name of the lanes."""
        made = Slice(-1, -1, kind, name, max(span[0], 0), max(self._end_of(span), 0), call=call)
        self._without_track.setdefault(lanes, []).append(made)
        return made

    def _end_of(self, span: Span) -> int:
        return span[1] if span[1] >= span[0] else max(self._end, span[0])

    def finish(self) -> tuple[list[Track], list[Slice]]:
        """All tracks and slices. Sets the ids, parents and lanes of the slices."""
        for (worker, name), slices in self._without_track.items():
            self._assign_lanes(worker, name, slices)
        by_track: dict[int, list[Slice]] = {}
        for each in self._slices:
            by_track.setdefault(each.track, []).append(each)
        finished: list[Slice] = []
        for slices in by_track.values():
            nest(slices, len(finished))
            finished += slices
        return list(self._tracks.values()), finished

    def _assign_lanes(self, worker: int, name: str, slices: list[Slice]) -> None:
        """Put slices that overlap on different lanes, and use as few lanes as possible."""
        slices.sort(key=lambda each: each.start)
        lanes: list[tuple[int, int]] = []  # a heap of (when the lane becomes free, number of the lane)
        for each in slices:
            if lanes and lanes[0][0] <= each.start:
                _, number = heapq.heappop(lanes)
            else:
                number = len(lanes)
            heapq.heappush(lanes, (each.end, number))
            each.track = self.lane(worker, name, number).id
        self._slices += slices


def nest(slices: list[Slice], first: int) -> None:
    """Sort the slices of one track, number them from ``first``, and set their parents.

    Clocks differ slightly, so a slice may end after its parent. Its end is then set to that of the parent. A slice
    without a call gets the call of its parent.
    """
    slices.sort(key=lambda each: (each.start, -each.end, _NESTING_ORDER.get(each.kind, 0)))
    open_slices: list[Slice] = []
    for number, each in enumerate(slices, first):
        each.id = number
        while open_slices and _has_ended(open_slices[-1], each):
            open_slices.pop()
        if open_slices:
            outer = open_slices[-1]
            each.parent = outer.id
            each.end = min(each.end, outer.end)
            each.call = outer.call if each.call < 0 else each.call
        open_slices.append(each)


def _has_ended(outer: Slice, each: Slice) -> bool:
    """Whether a slice cannot be the parent of ``each``, because it has ended before."""
    return outer.end <= each.start and (outer.end < each.end or outer.end < each.start)
