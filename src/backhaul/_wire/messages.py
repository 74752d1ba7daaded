"""The messages of the protocol, as plain records. Encoding and decoding check the type of every field."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec

from backhaul._wire.memory import Buffer
from backhaul._wire.tensors.specs import EMPTY_TABLE, TensorTable
from backhaul.errors import ProtocolError

M = TypeVar("M", bound=msgspec.Struct)
Index = Annotated[int, msgspec.Meta(ge=0)]


class Kind(enum.IntEnum):
    """What the body of a frame is."""

    HELLO = 1  # first frame of the connecting side: which worker it is, and which worker it expects
    REFUSE = 2  # answer to a hello that is not accepted; the channel closes
    REQUEST = 3
    REPLY = 4
    FAULT = 5  # a reply that is an exception
    CANCEL = 6  # the caller no longer waits for these calls
    BEAT = 7  # a heartbeat
    READY = 8  # shutdown: the sender starts no more calls
    COUNT = 9  # shutdown: asks how many calls the receiver has sent and served, once it is idle
    TALLY = 10  # shutdown: the answer to COUNT
    LEAVE = 11  # shutdown: all workers are done
    JOIN = 12  # first frame of a worker that wants to become a member
    WELCOME = 13  # the answer to JOIN: the joiner's record and all members, or the leader to ask
    SEGMENTS = 14  # device memory is offered, accepted or withdrawn; see ``_devices``


class Departure(msgspec.Struct, array_like=True, frozen=True):
    """A worker that has left, and the proof that it has; see ``_rpc.cluster.departure``."""

    incarnation: str
    id: int
    name: str
    proof: str


class Hello(msgspec.Struct, array_like=True, frozen=True):
    """Opens a channel. It names the sender, the receiver that the sender expects, and workers that had the name or id
    of the sender and have left.
    """

    to: str
    to_incarnation: str
    record: bytes  # of the sender; see ``_rpc.cluster.membership_table``
    left: tuple[Departure, ...] = ()
    answer: bool = False  # whether the receiver must send a hello over the same channel too


class Refuse(msgspec.Struct, array_like=True, frozen=True):
    """Why a hello or a join was not accepted."""

    reason: str
    later: bool = False  # whether a later attempt may succeed


class Join(msgspec.Struct, array_like=True, frozen=True):
    """Asks to become a member. The id in the record is -1 if the joiner accepts any id."""

    record: bytes


class Welcome(msgspec.Struct, array_like=True, frozen=True):
    """Answers a join: the joiner's final record, the records of all members, the workers that have left, and the ids
    of the members to which the joiner says hello (None: to all). Without members, it has the record of the leader,
    which the joiner must ask.
    """

    record: bytes
    members: tuple[bytes, ...] = ()
    left: tuple[Departure, ...] = ()
    greeted: tuple[int, ...] | None = None


TREE = -1
"""A special value of ``Payload.loose``: the values are nested, see ``plain``."""


NESTED = -2
"""A special value of ``Payload.loose``: the values are nested, see ``nested``."""


class Payload(msgspec.Struct, array_like=True, frozen=True):
    """A list of values, in one of four forms. Tensors are always in ``tensors``.

    Plain scalars and tensors are in ``plain``. A tensor is None there, and ``places`` says where. Containers of these,
    references and functions are there in the form of ``_wire.nested``, and ``loose`` is ``NESTED``. Any other list is a
    pickle. Its large buffers, ``loose`` in number, follow those of the tensors in the frame. If one of the two ends
    does not trust the other, nothing is pickled: ``plain`` has nested data in the form of ``_wire.plain``, and
    ``loose`` is ``TREE``.
    """

    tensors: TensorTable = EMPTY_TABLE
    plain: list[Any] | None = None
    places: tuple[tuple[Index, Index], ...] = ()  # (place in ``plain``, index of the tensor)
    pickle: bytes = b""
    loose: int = 0
    wrapped: int = 0  # tensor subclasses in the pickle that require grad, see ``tensors.subclasses``


class Request(msgspec.Struct, array_like=True, frozen=True):
    """A call. The values are the keyword arguments as one dict, if ``keywords``, and then the positional arguments.

    ``function`` is a name. If it is empty, the function itself is the first value.
    """

    function: str
    payload: Payload
    keywords: bool = False
    notes: dict[str, bytes] = {}  # of layers above; see ``_rpc.interceptors``
    left: float = 0.0  # seconds until the caller's deadline, when it sends; 0: it has no deadline


class Reply(msgspec.Struct, array_like=True, frozen=True):
    """A call's result: one value."""

    payload: Payload
    notes: dict[str, bytes] = {}


class Fault(msgspec.Struct, array_like=True, frozen=True):
    """An exception as text, and the exception itself as one value if it can be sent."""

    worker: str
    type_name: str
    message: str
    traceback: str
    payload: Payload | None = None


class Cancel(msgspec.Struct, array_like=True, frozen=True):
    """The caller no longer waits for these calls and needs no replies."""

    numbers: tuple[int, ...]


class CallTally(msgspec.Struct, array_like=True, frozen=True):
    """Shutdown: the number of the last call that a worker has started, and how many calls it has served."""

    wave: int
    sent: int
    served: int


class Count(msgspec.Struct, array_like=True, frozen=True):
    """Shutdown: asks for a ``CallTally``."""

    wave: int


class AllDone(msgspec.Struct, array_like=True, frozen=True):
    """Shutdown: all workers are done. By name, the members that were lost before that, and why."""

    lost: dict[str, str]


MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What a decoder raises if bytes are not the message that they should be."""

pack: Callable[[msgspec.Struct], bytes] = msgspec.msgpack.Encoder().encode
"""Encodes a message into a frame's body."""

_decoders: dict[type, msgspec.msgpack.Decoder[msgspec.Struct]] = {}


def prepare(*kinds: type[msgspec.Struct]) -> None:
    """Make messages known to ``unpack``. Called where they are defined: making a decoder is not thread-safe."""
    for kind in kinds:
        _decoders[kind] = msgspec.msgpack.Decoder(kind)


def unpack(body: Buffer, kind: type[M]) -> M:
    """Decode a frame's body. Raises ``ProtocolError`` if it is not a ``kind``."""
    try:
        return _decoders[kind].decode(body)  # type: ignore[return-value]
    except MALFORMED as error:
        raise malformed(kind, error) from error


def malformed(kind: type[msgspec.Struct], error: Exception) -> ProtocolError:
    """The error of a frame whose body is not a ``kind``."""
    return ProtocolError(f"not a {kind.__name__}: {error}")


prepare(Hello, Refuse, Join, Welcome, Payload, Request, Reply, Fault, Cancel, CallTally, Count, AllDone)
