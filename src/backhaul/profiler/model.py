"""What a profile holds once the shares of all workers are together: one timeline.

All times are nanoseconds since the profile began, on the clock of the worker that profiles. Where something refers to a
slice, a track, a call or a worker, it is by ``id``; -1 is none.
"""

from __future__ import annotations

from typing import Any

import msgspec


class WorkerRow(msgspec.Struct):
    """One worker that took part.

    Attributes:
        offset: What its clock was ahead of the profiling worker's; it has been subtracted.
        error: How far off that may be.
        missing: Why its share is not here, "" if it is.
        note: What its share lacks, and why.
    """

    id: int
    name: str
    host: str = ""
    pid: int = 0
    offset: int = 0
    error: int = 0
    missing: str = ""
    note: str = ""


class Track(msgspec.Struct):
    """A row of slices of one worker that nest: a thread, or a lane for things that no thread does."""

    id: int
    worker: int
    name: str
    lane: bool = False


class Slice(msgspec.Struct):
    """Something that took time.

    Attributes:
        kind: One of ``KINDS``.
        parent: The slice of the same track around this one.
        call: The call it belongs to.
    """

    id: int
    track: int
    kind: str
    name: str
    start: int
    end: int
    parent: int = -1
    call: int = -1
    args: dict[str, Any] = {}


KINDS = {
    "call": "a call, from its start to its result (on a lane of the caller)",
    "serve": "a thread serves a call",
    "run": "the called function runs",
    "encode": "values are made into bytes",
    "decode": "bytes are made into values",
    "queue": "a message has come and waits for a thread (on a lane)",
    "wait": "a thread waits for a reply or for the end of a pass",
    "pass": "a backward pass, at its driver (on a lane)",
    "group": "the engine runs a part of the graph",
    "op": "an operation of torch, or a region of the user's",
}


class Arrow(msgspec.Struct):
    """A message: from the slice that sent it to the slice that took it up.

    Attributes:
        kind: "request", "reply", "gradient", or "report" on what has been done of a pass, to its driver.
        start: When it was sent.
        end: When it arrived.
    """

    kind: str
    source: int
    target: int
    start: int
    end: int
    nbytes: int = 0
    call: int = -1


# Over the limit because it is a record: each attribute is a column of the report.
class TimelineCall(msgspec.Struct):
    """One call, seen from both ends. A time that is not known is -1.

    ``start`` <= ``sent`` at the caller; ``arrived`` <= ``begun`` <= ``decoded`` <= ``ran`` <= ``replied`` at the
    callee; ``received`` <= ``done`` at the caller again.

    Attributes:
        name: As in ``rpc_async#fn(worker0 -> worker1)``.
        parent: The call whose function made this one.
        near: Its slice at the caller.
        far: Its slice at the callee.
        failed: The exception's type, "" if there is none.
    """

    id: int
    name: str
    mode: str
    function: str
    caller: int
    callee: int
    start: int
    parent: int = -1
    near: int = -1
    far: int = -1
    sent: int = -1
    arrived: int = -1
    begun: int = -1
    decoded: int = -1
    ran: int = -1
    replied: int = -1
    received: int = -1
    done: int = -1
    bytes_out: int = 0
    bytes_in: int = 0
    failed: str = ""


class PathSegment(msgspec.Struct):
    """A piece of what the profiled thread's time was made of: while it waited, what it waited for.

    The segments of a timeline follow each other without gaps.

    Attributes:
        kind: "compute", "encode", "decode", "queue", "wire" or "idle".
        worker: Where the time went; for "wire" the worker that sent.
        name: What ran, or what was on the wire.
        slice: The slice it is a part of.
    """

    kind: str
    worker: int
    name: str
    start: int
    end: int
    slice: int = -1
    call: int = -1


class Timeline(msgspec.Struct):
    """All of a profile."""

    owner: int
    end: int
    workers: list[WorkerRow] = []
    tracks: list[Track] = []
    slices: list[Slice] = []
    arrows: list[Arrow] = []
    calls: list[TimelineCall] = []
    path: list[PathSegment] = []
    home: int = -1  # the track of the thread that profiles
