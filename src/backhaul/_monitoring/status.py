"""What a worker tells a monitor about itself, as plain records: the messages between the two.

A record is a message on the wire and an object of the JSON output. A field that is added later needs a default.
"""

from __future__ import annotations

import enum

import msgspec

from backhaul._wire.messages import prepare


class MonitoringKind(enum.IntEnum):
    """Kinds of frames between monitors and workers; they follow those of references."""

    QUERY = 23  # from a monitor, which is no worker and says no hello
    STATUS = 24  # the answer of a worker: a ``WorkerStatus``
    RECORD = 25  # from a monitor: asks for a profile of all workers
    TIMELINE = 26  # the answer: the profile
    REFUSED = 27  # the worker does not answer this question, and why


class Query(msgspec.Struct, array_like=True, frozen=True):
    """Asks a worker for its status.

    Attributes:
        watch: For how many seconds the worker goes on to count the calls of each function.
    """

    watch: float = 10.0


class Record(msgspec.Struct, array_like=True, frozen=True):
    """Asks a worker to profile itself and all other workers.

    Attributes:
        seconds: How long.
        ops: Whether to record operations of torch.
    """

    seconds: float
    ops: bool = True


class Refused(msgspec.Struct, array_like=True, frozen=True):
    """Why a worker does not answer."""

    reason: str


class CallStatus(msgspec.Struct, frozen=True):
    """A call under way: the function, the worker at the other end, and for how long."""

    function: str
    worker: str
    seconds: float


class ChannelStatus(msgspec.Struct, frozen=True):
    """A channel to another worker, with the bytes that it has carried and those that wait to be sent."""

    worker: str
    sent: int
    received: int
    waiting: int = 0


class FunctionStatus(msgspec.Struct, frozen=True):
    """The calls of one function that this worker has served while a monitor watched. Times in seconds."""

    name: str
    calls: int
    seconds: float
    longest: float
    waited: float  # between arrival and the start of the function


class PassStatus(msgspec.Struct, frozen=True):
    """A backward pass that this worker drove while a monitor watched. ``began``: seconds of the worker's clock."""

    context: int
    number: int
    began: float
    seconds: float


class ReferenceStatus(msgspec.Struct, frozen=True):
    """The references of a worker: values that it owns, their bytes, and forks that it holds of other values."""

    owned: int = 0
    owned_bytes: int = 0
    forks: int = 0
    held: int = 0


class GraphStatus(msgspec.Struct, frozen=True):
    """What autograd keeps on a worker.

    Attributes:
        contexts: Contexts that are open.
        messages: Messages that were sent and wait for their gradients.
        gradient_bytes: The gradients that contexts hold.
        passes: Backward passes that this worker drives now.
        passes_ended: Backward passes that it drove and that have ended.
    """

    contexts: int = 0
    messages: int = 0
    gradient_bytes: int = 0
    passes: int = 0
    passes_ended: int = 0


class MemberStatus(msgspec.Struct, frozen=True):
    """A member as this worker sees it. ``state``: "ok", "suspected" or "lost"; ``reason`` says why."""

    id: int
    name: str
    incarnation: str
    host: str
    addresses: tuple[str, ...]
    state: str = "ok"
    reason: str = ""


# Over the limit because it is a message: each attribute is a field on the wire.
class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says about itself.

    Attributes:
        at: The worker's clock, in seconds; differences between two answers are exact.
        uptime: Seconds since the worker started.
        served: Calls that it has served since then.
        called: Calls that it has made.
        tasks: Tasks that wait for a thread.
        serving: Calls that it serves now, those that run longest first; at most a few.
        calling: Calls that it waits for, likewise.
        num_serving, num_calling: How many of them there are.
        memory: The memory of its process, in bytes.
        counters: See ``backhaul.get_debug_info``.
    """

    id: int
    name: str
    incarnation: str
    host: str
    machine: str
    pid: int
    version: str
    at: float
    uptime: float
    served: int
    called: int
    tasks: int
    num_serving: int
    num_calling: int
    memory: int
    serving: tuple[CallStatus, ...] = ()
    calling: tuple[CallStatus, ...] = ()
    channels: tuple[ChannelStatus, ...] = ()
    functions: tuple[FunctionStatus, ...] = ()
    passes: tuple[PassStatus, ...] = ()
    references: ReferenceStatus = ReferenceStatus()
    graphs: GraphStatus = GraphStatus()
    members: tuple[MemberStatus, ...] = ()
    counters: dict[str, int] = {}


prepare(Query, Record, Refused, WorkerStatus)
