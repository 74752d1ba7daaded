"""What workers write down while a profile is open, and how it travels to the worker that profiles.

Times are nanoseconds of the worker's own clock; 0 is "never". Threads are named by their numbers in the system.
"""

from __future__ import annotations

import msgspec

from backhaul._runtime.observer import GradientKey


# Over the limit because it is a record: each attribute is a field on the wire.
class CallRecord(msgspec.Struct, array_like=True):
    """A call, at the caller. See ``observe.CallTrace`` for the times."""

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
    """A call, at the callee. See ``observe.ServeTrace``."""

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
    """A thread went on with a call whose function had returned."""

    call: int
    thread: int
    start: int
    end: int


class WaitRecord(msgspec.Struct, array_like=True):
    """A thread waited. ``joining``: for a worker to join the profile."""

    thread: int
    start: int
    end: int
    joining: bool = False


class PassRecord(msgspec.Struct, array_like=True):
    """A backward pass, at its driver."""

    context: int
    number: int
    thread: int
    start: int
    end: int
    call: int = 0


class GroupRecord(msgspec.Struct, array_like=True):
    """What a gradient message, or the roots, led to."""

    key: GradientKey
    sender: int
    thread: int
    arrived: int
    begun: int
    end: int


class GradientRecord(msgspec.Struct, array_like=True):
    """A gradient message, where it left."""

    key: GradientKey
    to: int
    thread: int
    begun: int
    sent: int
    nbytes: int


class ReportRecord(msgspec.Struct, array_like=True):
    """A report to the driver of a pass, where it left or where it came."""

    worker: int
    thread: int
    time: int
    out: bool


class OpRecord(msgspec.Struct, array_like=True):
    """An operation of torch. ``device`` "": on the processor, by ``thread``; else ``thread`` is a stream."""

    name: str
    thread: int
    start: int
    end: int
    device: str = ""
    shapes: list[list[int]] | None = None
    memory: int = 0
    user: bool = False  # a region that the user named


class Records(msgspec.Struct):
    """All that one worker wrote down for one profile."""

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
        joined: The workers it asked to look on.
        threads: Names of its threads.
        note: Why there are no operations of torch, if there are none for a reason.
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
