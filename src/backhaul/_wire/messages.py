"""The messages of the protocol, as plain records. Encoding and decoding check every field's type."""

from __future__ import annotations

import enum
from typing import Annotated, Any, TypeVar

import msgspec

from backhaul._wire.memory import Buffer
from backhaul._wire.tensors.specs import EMPTY_TABLE, TensorTable
from backhaul.errors import ProtocolError

M = TypeVar("M", bound=msgspec.Struct)
Index = Annotated[int, msgspec.Meta(ge=0)]


class Kind(enum.IntEnum):
    """What a frame's body is."""

    HELLO = 1  # first frame of the connecting side: who it is, whom it means
    REFUSE = 2  # answer to a hello that is wrong; the channel closes
    REQUEST = 3
    REPLY = 4
    FAULT = 5  # a reply that is an exception
    CANCEL = 6  # nobody waits for these calls any more
    BEAT = 7  # nothing but a sign of life
    READY = 8  # shutdown: the sender has nothing more to start
    COUNT = 9  # shutdown: say what you sent and served, once you are idle
    TALLY = 10  # shutdown: the answer
    LEAVE = 11  # shutdown: everyone is done
    JOIN = 12  # first frame of one that wants to become a member
    WELCOME = 13  # the answer: its place and all members, or who is to be asked
    SEGMENTS = 14  # device memory is offered, accepted or withdrawn; see ``cuda.segments``


class Departure(msgspec.Struct, array_like=True, frozen=True):
    """A worker that has left, and the proof of it; see ``rpc.departure``."""

    incarnation: str
    id: int
    name: str
    proof: str


class Hello(msgspec.Struct, array_like=True, frozen=True):
    """Opens a channel: who speaks, whom it believes to speak to, and who had its name or id before and has left."""

    to: str
    to_incarnation: str
    record: bytes  # of the one who speaks; see ``rpc.membership_table``
    left: tuple[Departure, ...] = ()
    answer: bool = False  # the other is to say hello, too, over the same channel


class Refuse(msgspec.Struct, array_like=True, frozen=True):
    """Why a hello or a join was not accepted."""

    reason: str
    later: bool = False  # it may be worth to ask again


class Join(msgspec.Struct, array_like=True, frozen=True):
    """Asks to become a member. The id is -1 where any will do."""

    record: bytes


class Welcome(msgspec.Struct, array_like=True, frozen=True):
    """The newcomer's record as it is from now on, all members', and who has left; or the record of the leader, which is
    to be asked.
    """

    record: bytes
    members: tuple[bytes, ...] = ()
    left: tuple[Departure, ...] = ()


TREE = -1
"""In the place of ``Payload.loose``: the values are nested, see ``plain``."""


class Payload(msgspec.Struct, array_like=True, frozen=True):
    """A list of values, in one of three forms. Tensors stand in ``tensors`` always.

    Plain scalars and tensors go as ``plain``, a tensor's place taken by None and named in ``places``. Anything else is
    a pickle of the whole list; its large buffers follow those of the tensors in the frame, ``loose`` in number. Where
    one of the two ends does not trust the other, nothing is pickled: nested data stands in ``plain`` as well, in the
    form of ``wire.plain``, and ``loose`` is ``TREE``.
    """

    tensors: TensorTable = EMPTY_TABLE
    plain: list[Any] | None = None
    places: tuple[tuple[Index, Index], ...] = ()  # (place in ``plain``, index of the tensor)
    pickle: bytes = b""
    loose: int = 0
    wrapped: int = 0  # tensor subclasses in the pickle that require grad, see ``wire.subclasses``


class Request(msgspec.Struct, array_like=True, frozen=True):
    """A call. The values are the keyword arguments as one dict if ``keywords``, then the positional ones.

    ``function`` is a name, or empty: then the function itself is the first value.
    """

    function: str
    payload: Payload
    keywords: bool = False
    notes: dict[str, bytes] = {}  # of layers above; see rpc.intercept
    left: float = 0.0  # seconds that the caller still waits, when it sends; 0: for ever


class Reply(msgspec.Struct, array_like=True, frozen=True):
    """A call's result: one value."""

    payload: Payload
    notes: dict[str, bytes] = {}


class Fault(msgspec.Struct, array_like=True, frozen=True):
    """An exception: enough to report it always, and the exception itself as one value where it can travel."""

    worker: str
    type_name: str
    message: str
    traceback: str
    payload: Payload | None = None


class Cancel(msgspec.Struct, array_like=True, frozen=True):
    """Nobody waits for these calls any more; there will be no use for replies."""

    numbers: tuple[int, ...]


class CallTally(msgspec.Struct, array_like=True, frozen=True):
    """Shutdown: which call a worker has started last, and how many it has served since it began."""

    wave: int
    sent: int
    served: int


class Count(msgspec.Struct, array_like=True, frozen=True):
    """Shutdown: asks for a tally."""

    wave: int


_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type, msgspec.msgpack.Decoder[msgspec.Struct]] = {}


def prepare(*kinds: type[msgspec.Struct]) -> None:
    """Make messages known to ``unpack``. Called where they are defined: making a decoder is not thread-safe."""
    for kind in kinds:
        _decoders[kind] = msgspec.msgpack.Decoder(kind)


def pack(message: msgspec.Struct) -> bytes:
    """Encode a message into a frame's body."""
    return _encoder.encode(message)


def unpack(body: Buffer, kind: type[M]) -> M:
    """Decode a frame's body. Raises ``ProtocolError`` if it is not a ``kind``."""
    try:
        return _decoders[kind].decode(body)  # type: ignore[return-value]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a {kind.__name__}: {error}") from error


prepare(Hello, Refuse, Join, Welcome, Payload, Request, Reply, Fault, Cancel, CallTally, Count)
