"""The records that workers make while a profile is open, and their encoding for the owner of the profile.

Times are nanoseconds on the clock of the worker that made the record. 0 means that it has not happened. Threads are
identified by their native ids.
"""

from __future__ import annotations

import msgspec

from backhaul._runtime.observer import GradientKey


# Over the limit because it is a record: each attribute is a field on the wire.
class CallRecord(msgspec.Struct, array_like=True):
    """A call, on the caller. See ``_runtime.observer.CallTrace`` for the times."""

    id: int
    parent: int
    mode: str
    label: str
    callee: int
    thread: int
    start: int
    encoded: int = 0
    sent: int = 0
    received: int = 0
    opened: int = 0
    done: int = 0
    end_thread: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    failed: str = ""


class ServeRecord(msgspec.Struct, array_like=True):
    """A call, on the callee. See ``_runtime.observer.ServeTrace`` for the times."""

    call: int
    caller: int
    thread: int
    arrived: int
    begun: int
    label: str = ""
    decoded: int = 0
    ran: int = 0
    resumed: int = 0
    replied: int = 0
    reply_thread: int = 0
    nbytes: int = 0


class StepRecord(msgspec.Struct, array_like=True):
    """A thread continued with a call whose function had returned, such as a coroutine."""

    call: int
    thread: int
    start: int
    end: int


class WaitRecord(msgspec.Struct, array_like=True):
    """A thread waited. ``joining``: it waited for a worker to join the profile."""

    thread: int
    start: int
    end: int
    joining: bool = False


class PassRecord(msgspec.Struct, array_like=True):
    """A backward pass, on its driver."""

    context: int
    number: int
    thread: int
    start: int
    end: int
    call: int = 0


class GroupRecord(msgspec.Struct, array_like=True):
    """The engine ran the group of graph nodes for a gradient message, or for the roots."""

    key: GradientKey
    sender: int
    thread: int
    arrived: int
    begun: int
    end: int


class GradientRecord(msgspec.Struct, array_like=True):
    """A gradient message, on its sender."""

    key: GradientKey
    to: int
    thread: int
    begun: int
    sent: int
    nbytes: int


class ReportRecord(msgspec.Struct, array_like=True):
    """A report to the driver of a pass, on its sender (``out``) or on the driver."""

    worker: int
    thread: int
    time: int
    out: bool


class OpRecord(msgspec.Struct, array_like=True):
    """An operation of torch. If ``device`` is "", ``thread`` ran it on the CPU; else ``thread`` is a stream."""

    name: str
    thread: int
    start: int
    end: int
    device: str = ""
    shapes: list[list[int]] | None = None
    memory: int = 0
    user: bool = False  # a region that the user named


class Records(msgspec.Struct):
    """All records of one worker for one profile."""

    calls: list[CallRecord] = []
    serves: list[ServeRecord] = []
    steps: list[StepRecord] = []
    waits: list[WaitRecord] = []
    passes: list[PassRecord] = []
    groups: list[GroupRecord] = []
    gradients: list[GradientRecord] = []
    reports: list[ReportRecord] = []


class Share(msgspec.Struct):
    """One worker's part of a profile.

    Attributes:
        joined: The workers that it asked to join the profile.
        threads: The names of its threads.
        note: Why operations of torch are missing; "" if none are.
    """

    worker: int
    name: str
    host: str
    pid: int
    joined: list[int]
    threads: dict[int, str]
    records: Records
    ops: list[OpRecord]
    note: str = ""


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Share).decode
