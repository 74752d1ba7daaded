"""Slices on tracks, while a timeline is being made. Pure."""

from __future__ import annotations

import heapq

from backhaul.profiler.model import Slice, Track

Span = tuple[int, int]
"""When something began and ended; an end before the begin means that it never did."""

_RANK = {kind: rank for rank, kind in enumerate(("serve", "group", "run", "wait", "encode", "decode", "op"))}


class Tracks:
    """Takes slices in any order; ``finish`` makes those of each track nest and numbers them."""

    def __init__(self, end: int) -> None:
        self._end = end
        self._tracks: dict[tuple[int, str, int], Track] = {}
        self._slices: list[Slice] = []
        self._floating: dict[tuple[int, str], list[Slice]] = {}  # to be put on lanes: (worker, name of the lane)

    def thread(self, worker: int, number: int, name: str) -> Track:
        """The track of a thread."""
        return self._track(worker, name, number, lane=False)

    def lane(self, worker: int, name: str, number: int = 0) -> Track:
        """A track that is no thread."""
        return self._track(worker, name, number, lane=True)

    def _track(self, worker: int, name: str, number: int, *, lane: bool) -> Track:
        key = worker, name if lane else "", number
        if key not in self._tracks:
            self._tracks[key] = Track(len(self._tracks), worker, name, lane)
        return self._tracks[key]

    def put(self, kind: str, name: str, track: Track, span: Span, call: int = -1) -> Slice:
        """A slice on a track. What has not ended ends with the profile."""
        made = Slice(-1, track.id, kind, name, max(span[0], 0), max(self._end_of(span), 0), call=call)
        self._slices.append(made)
        return made

    def float(self, kind: str, name: str, lane: tuple[int, str], span: Span, call: int = -1) -> Slice:
        """A slice on whichever lane of that worker and name has room."""
        made = Slice(-1, -1, kind, name, max(span[0], 0), max(self._end_of(span), 0), call=call)
        self._floating.setdefault(lane, []).append(made)
        return made

    def _end_of(self, span: Span) -> int:
        return span[1] if span[1] >= span[0] else max(self._end, span[0])

    def finish(self) -> tuple[list[Track], list[Slice]]:
        """All tracks and slices."""
        for (worker, name), slices in self._floating.items():
            self._land(worker, name, slices)
        by_track: dict[int, list[Slice]] = {}
        for each in self._slices:
            by_track.setdefault(each.track, []).append(each)
        finished: list[Slice] = []
        for slices in by_track.values():
            nest(slices, len(finished))
            finished += slices
        return list(self._tracks.values()), finished

    def _land(self, worker: int, name: str, slices: list[Slice]) -> None:
        """Slices that overlap go on different lanes, as few as possible."""
        slices.sort(key=lambda each: each.start)
        free: list[tuple[int, int]] = []  # (when it is free, number)
        for each in slices:
            if free and free[0][0] <= each.start:
                _, number = heapq.heappop(free)
            else:
                number = len(free)
            heapq.heappush(free, (each.end, number))
            each.track = self.lane(worker, name, number).id
        self._slices += slices


def nest(slices: list[Slice], first: int) -> None:
    """Sort the slices of one track, number them, set parents. Clocks differ a little: what sticks out of what is
    around it is cut. A slice belongs to the call that what is around it belongs to, if to no other.
    """
    slices.sort(key=lambda each: (each.start, -each.end, _RANK.get(each.kind, 0)))
    around: list[Slice] = []
    for number, each in enumerate(slices, first):
        each.id = number
        while around and around[-1].end <= each.start and (around[-1].end < each.end or around[-1].end < each.start):
            around.pop()
        if around:
            outer = around[-1]
            each.parent = outer.id
            each.end = min(each.end, outer.end)
            each.call = outer.call if each.call < 0 else each.call
        around.append(each)
