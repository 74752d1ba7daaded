"""The timeline: the result of a profile, merged from the shares of all workers.

All times are nanoseconds since the profile began, on the clock of the owner of the profile. Slices, tracks, calls and
workers are referred to by ``id``; -1 means none.
"""

from __future__ import annotations

from typing import Any

import msgspec


class WorkerRow(msgspec.Struct):
    """One worker that took part.

    Attributes:
        offset: How far its clock was ahead of the owner's clock. The times in the timeline are already corrected.
        error: The largest possible error of ``offset``.
        missing: Why its share of the profile is missing; "" if it is not.
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
    """A row of nested slices of one worker: a thread, or a lane for slices that do not belong to a thread."""

    id: int
    worker: int
    name: str
    lane: bool = False


class Slice(msgspec.Struct):
    """An activity with a begin and an end.

    Attributes:
        kind: One of ``KINDS``.
        parent: The slice of the same track that contains this one.
        call: The call that this slice belongs to.
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
    "encode": "values are encoded as bytes",
    "decode": "bytes are decoded to values",
    "queue": "a message has arrived and waits for a thread (on a lane)",
    "wait": "a thread waits for a reply or for the end of a pass",
    "pass": "a backward pass, on its driver (on a lane)",
    "group": "the engine runs a part of the graph",
    "op": "an operation of torch, or a region named by the user",
}


class Arrow(msgspec.Struct):
    """A message: from the slice that sent it to the slice that received it.

    Attributes:
        kind: "request", "reply", "gradient", or "report" (on the progress of a pass, to its driver).
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
    """One call, with the times of both workers. An unknown time is -1.

    ``start`` <= ``sent`` on the caller; ``arrived`` <= ``begun`` <= ``decoded`` <= ``ran`` <= ``replied`` on the
    callee; ``received`` <= ``done`` on the caller again.

    Attributes:
        name: For example ``rpc_async#fn(worker0 -> worker1)``.
        parent: The call whose function made this one.
        near: Its slice on the caller.
        far: Its slice on the callee.
        failed: The type of the exception; "" if there was none.
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
    """What the profiled thread's time was spent on for a while. If it waited, what it waited for.

    The segments of a timeline follow each other without gaps.

    Attributes:
        kind: "compute", "encode", "decode", "queue", "wire" or "idle".
        worker: The worker on which the time was spent. For "wire", the sender.
        name: What ran, or what was on the wire.
        slice: The slice that contains the segment.
    """

    kind: str
    worker: int
    name: str
    start: int
    end: int
    slice: int = -1
    call: int = -1


class Timeline(msgspec.Struct):
    """The complete result of a profile. ``path`` is the critical path of the profiled thread.

    Example:
        >>> import backhaul as bh
        >>> with bh.cluster(2):
        ...     with bh.profile() as prof:
        ...         _ = bh.rpc_sync("worker1", abs, args=(-1,))
        >>> [call.name for call in prof.timeline.calls]
        ['rpc_sync#abs(worker0 -> worker1)']
    """

    owner: int
    end: int
    workers: list[WorkerRow] = []
    tracks: list[Track] = []
    slices: list[Slice] = []
    arrows: list[Arrow] = []
    calls: list[TimelineCall] = []
    path: list[PathSegment] = []
    profiled_track: int = -1  # the track of the profiled thread
