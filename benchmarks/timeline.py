"""Stamps of several processes -> where the time of a run went: by station, and in order. Pure."""

from __future__ import annotations

import collections
import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stamps import FUNCTION, PROGRAM, WAIT, Stamp

WIRE = "wire, and threads that wake up"
_SHORT_SECONDS = 4e-6  # what takes less than this is no line of its own


@dataclass(frozen=True)
class Piece:
    """A time in which a thread was at one station, without what it did further inside."""

    start: float  # seconds since the begin of the run
    end: float
    used: float  # seconds of processor time
    where: str  # the worker
    thread: int
    station: str
    what: str


Runs = Sequence[tuple[float, Sequence[Piece]]]
"""How many seconds each run took, and its pieces."""


@dataclass(frozen=True)
class Share:
    """What a station took in one run."""

    times: int
    wall: float
    used: float


def pieces_of(run: Mapping[str, Sequence[Stamp]], driver: str, stations: Mapping[str, str]) -> list[Piece]:
    """The pieces of one run, in order. ``run`` has the stamps of each worker; the driver's first and last are the begin
    and the end. What the driver's thread does outside of all stations is the program.
    """
    first, last = run[driver][0], run[driver][-1]
    found = []
    for where, stamps in run.items():
        by_thread: dict[int, list[Stamp]] = collections.defaultdict(list)
        for stamp in stamps:
            by_thread[stamp.thread].append(stamp)
        for thread, own in by_thread.items():
            outside = PROGRAM if (where, thread) == (driver, first.thread) else WAIT
            found += _of_thread(own, where, outside, stations, first.when)
    duration = (last.when - first.when) / 1e9
    return sorted((piece for piece in found if piece.end > 0 and piece.start < duration), key=lambda each: each.start)


def _of_thread(
    stamps: Sequence[Stamp], where: str, outside: str, stations: Mapping[str, str], begin: int
) -> list[Piece]:
    inside: list[str] = []
    found = []
    for before, after in itertools.pairwise(stamps):
        name, _, edge = before.what.rpartition(" ")
        if edge == ">":
            inside.append(name)
        elif edge == "<" and name in inside:
            del inside[inside.index(name) :]
        what = inside[-1] if inside else ""
        station = stations.get(what, FUNCTION) if inside else outside
        times = ((before.when - begin) / 1e9, (after.when - begin) / 1e9, (after.used - before.used) / 1e9)
        found.append(Piece(*times, where, before.thread, station, what))
    return found


def by_station(pieces: Sequence[Piece]) -> dict[tuple[str, str], Share]:
    """What each station of each worker took, over all threads. Waiting threads are left out."""
    found: dict[tuple[str, str], Share] = {}
    for piece in pieces:
        if piece.station != WAIT:
            old = found.get((piece.where, piece.station), Share(0, 0.0, 0.0))
            new = Share(old.times + 1, old.wall + piece.end - piece.start, old.used + piece.used)
            found[piece.where, piece.station] = new
    return found


def idle_time(pieces: Sequence[Piece], duration: float) -> float:
    """How long no thread of any worker was at a station: a message was on the wire, or a thread woke up."""
    covered, until = 0.0, 0.0
    for piece in pieces:
        if piece.station != WAIT:
            start, end = max(piece.start, until), min(piece.end, duration)
            covered += max(end - start, 0.0)
            until = max(until, piece.end)
    return duration - covered


def medians(runs: Runs) -> dict[tuple[str, str], Share]:
    """What each station of each worker took."""
    shares = [by_station(pieces) for _, pieces in runs]
    none = Share(0, 0.0, 0.0)
    found = {}
    for key in {key for each in shares for key in each}:
        of_runs = [each.get(key, none) for each in shares]
        times, wall, used = (
            statistics.median(getattr(each, what) for each in of_runs) for what in ("times", "wall", "used")
        )
        found[key] = Share(round(times), wall, used)
    return found


def markdown(runs: Runs, order: Sequence[str]) -> list[str]:
    """A table for the documentation: how often a station is entered, and its processor time."""
    found = medians(runs)
    workers = list(dict.fromkeys(piece.where for _, pieces in runs for piece in pieces))
    lines = ["| station |" + "".join(f" {worker}: times | {worker}: processor |" for worker in workers)]
    lines.append("|" + "---|" * (1 + 2 * len(workers)))
    for station in order:
        shares = [found.get((worker, station)) for worker in workers]
        if any(shares):
            cells = (f" {each.times} | {each.used * 1e6:,.0f} us |" if each else " | |" for each in shares)
            lines.append(f"| {station} |{''.join(cells)}")
    sums = (sum(share.used for (where, _), share in found.items() if where == worker) for worker in workers)
    lines.append("| **together** |" + "".join(f" | **{used * 1e6:,.0f} us** |" for used in sums))
    return lines


def summary(runs: Runs) -> list[str]:
    """A table of medians over runs: for each station of each worker, own time and processor time."""
    rows = [(*key, share.times, share.wall, share.used) for key, share in medians(runs).items()]
    lines = [f"{'worker':<12}{'station':<24}{'times':>6}{'own time':>12}{'processor':>12}"]
    previous = ""
    for where, station, times, wall, used in sorted(rows, key=lambda row: (row[0], -row[4])):
        shown = where if where != previous else ""
        previous = where
        lines.append(f"{shown:<12}{station:<24}{times:>6}{wall * 1e6:>9.0f} us{used * 1e6:>9.0f} us")
    whole = statistics.median(duration for duration, _ in runs)
    idle = statistics.median(idle_time(pieces, duration) for duration, pieces in runs)
    lines += [
        f"{'all':<12}{'processor time':<30}{'':>12}{sum(row[4] for row in rows) * 1e6:>9.0f} us",
        f"{'':<12}{WIRE:<30}{idle * 1e6:>9.0f} us",
        f"{'':<12}{'the run':<30}{whole * 1e6:>9.0f} us",
    ]
    return lines


def in_order(pieces: Sequence[Piece], duration: float) -> list[str]:
    """One run: what each worker did when, and when nobody did anything."""
    lines = [f"{'at':>7}{'takes':>8}{'processor':>11}  what"]
    places = {where: place for place, where in enumerate(dict.fromkeys(piece.where for piece in pieces))}
    until = 0.0
    for piece in _merged(pieces):
        if piece.start - until > _SHORT_SECONDS:
            lines.append(f"{until * 1e6:>7.0f}{(piece.start - until) * 1e6:>8.0f}{'':>11}  ({WIRE})")
        until = max(until, piece.end)
        took, used = (piece.end - piece.start) * 1e6, piece.used * 1e6
        label = f"{piece.where}: {piece.station}" + (f" {piece.what}" if piece.station == FUNCTION else "")
        lines.append(f"{piece.start * 1e6:>7.0f}{took:>8.0f}{used:>11.0f}  {'    ' * places[piece.where]}{label}")
    lines.append(f"{duration * 1e6:>7.0f}  end")
    return lines


def _merged(pieces: Sequence[Piece]) -> list[Piece]:
    """Pieces of a thread that follow each other at one station become one. Short ones count for the one before."""
    found: list[Piece] = []
    last: dict[tuple[str, int], int] = {}
    for piece in pieces:
        key = piece.where, piece.thread
        if piece.station == WAIT:
            last.pop(key, None)
            continue
        before = found[last[key]] if key in last else None
        if before is not None and (piece.station == before.station or piece.end - piece.start < _SHORT_SECONDS):
            found[last[key]] = Piece(
                before.start, piece.end, before.used + piece.used, *key, before.station, before.what
            )
        else:
            last[key] = len(found)
            found.append(piece)
    return found
