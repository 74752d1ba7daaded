"""Calls <-> frames: one function for each station of a call. A station is where a worker encodes or decodes one of the
two messages of a call.

Each function has two twins with the same results and the same errors. One is in this module. The other is in the
native core (``_native``), and calls the twin here for what it does not handle. Arguments are positional, because that
is what the core takes fastest. Knows no channels, no interceptors, and no policy.

    caller                                        callee
    encoded = encode_values(...)                  request = read_request(frame)
    ... interceptors make notes ...               ... interceptors replace tensors ...
    frame = request_frame(..., encoded, ...)      values = request.values(tensors, worker)

    reply = read_reply(frame)                     encoded = encode_values((result,), ...)
    value = reply.value(tensors, worker)          frame = reply_frame(number, encoded, notes)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import torch

from backhaul._native import core
from backhaul._wire import nested
from backhaul._wire.codec import Encoded, encode, load
from backhaul._wire.device_link import Link, decline
from backhaul._wire.frames import Frame
from backhaul._wire.memory import Buffer
from backhaul._wire.messages import (
    Kind,
    Payload,
    Reply,
    Request,
    pack,
    unpack,
)
from backhaul._wire.tensors.reader import tensors_of
from backhaul._wire.tensors.subclasses import may_require_grad


class ReceivedValues(Protocol):
    """The values of a message that has arrived. Its tensors come first: layers above may replace them.

    Attributes:
        notes: The notes of the message, by owner.
        requires_grad: Whether a tensor of the message, or a wrapper built from them, requires grad. Valid once
            ``tensors`` was called.
    """

    @property
    def notes(self) -> Mapping[str, bytes]: ...

    @property
    def requires_grad(self) -> bool: ...

    def tensors(self, link: Link | None, /) -> list[torch.Tensor]:
        """The tensors of the message, on the memory of its buffers and of the slots of ``link``. Call it once.

        Raises:
            ProtocolError: The message does not describe them properly.
        """

    def values(self, tensors: Sequence[torch.Tensor], worker: object, /) -> list[Any]:
        """The values, with these tensors, for the worker ``worker``. Runs code of the values' classes, so it may raise
        anything.
        """

    def decline(self, link: Link | None, /) -> None:
        """Nobody reads the message: give its slots back."""


class ReceivedRequest(ReceivedValues, Protocol):
    """A request that has arrived.

    Attributes:
        function: The name of the function; empty if the function is the first value.
        keywords: Whether the first value, after the function, is the keyword arguments as a dict.
        left: How many seconds the caller still waits; 0: it has no deadline.
    """

    @property
    def function(self) -> str: ...

    @property
    def keywords(self) -> bool: ...

    @property
    def left(self) -> float: ...


class ReceivedReply(ReceivedValues, Protocol):
    """A reply that has arrived."""

    def value(self, tensors: Sequence[torch.Tensor], worker: object, /) -> Any:
        """The only value, as ``values`` makes it."""


# The twins in Python.


def encode_values_in_python(  # noqa: PLR0917 (as the native core takes them)
    values: Sequence[Any],
    names: Sequence[str],
    main_shared: bool,
    plain: bool,
    link: Link | None,
    apart: bool,
    /,
) -> Encoded:
    """See ``encode_values``."""
    return encode(values, names=names, main_shared=main_shared, plain=plain, link=link, apart=apart)


def request_frame_in_python(  # noqa: PLR0917 (see above)
    number: int, function: str, encoded: Encoded, keywords: bool, notes: dict[str, bytes], left: float, /
) -> Frame:
    """See ``request_frame``."""
    body = pack(Request(function, encoded.payload, keywords, notes, left))
    return Frame(Kind.REQUEST, number, body, encoded.buffers, encoded.keep)


def reply_frame_in_python(number: int, encoded: Encoded, notes: dict[str, bytes], /) -> Frame:
    """See ``reply_frame``."""
    return Frame(Kind.REPLY, number, pack(Reply(encoded.payload, notes)), encoded.buffers, encoded.keep)


class ValueReader:
    """Reads the values of a message, see ``ReceivedReply``."""

    __slots__ = ("_buffers", "_payload", "notes", "requires_grad")

    def __init__(self, payload: Payload, buffers: Sequence[Buffer], notes: Mapping[str, bytes]) -> None:
        self._payload = payload
        self._buffers = buffers
        self.notes = notes
        self.requires_grad = False

    def tensors(self, link: Link | None, /) -> list[torch.Tensor]:
        found = tensors_of(self._payload, self._buffers, link)
        self.requires_grad = may_require_grad(found)
        return found

    def values(self, tensors: Sequence[torch.Tensor], worker: object, /) -> list[Any]:
        return load(self._payload, self._buffers, tensors, worker)

    def value(self, tensors: Sequence[torch.Tensor], worker: object, /) -> Any:
        (found,) = load(self._payload, self._buffers, tensors, worker)
        return found

    def decline(self, link: Link | None, /) -> None:
        decline(self._payload, link)


class RequestReader(ValueReader):
    """Reads a request, see ``ReceivedRequest``."""

    __slots__ = ("function", "keywords", "left")

    def __init__(self, request: Request, buffers: Sequence[Buffer]) -> None:
        super().__init__(request.payload, buffers, request.notes)
        self.function = request.function
        self.keywords = request.keywords
        self.left = request.left


def read_request_in_python(frame: Frame, /) -> ReceivedRequest:
    """See ``read_request``."""
    return RequestReader(unpack(frame.body, Request), frame.buffers)


def read_reply_in_python(frame: Frame, /) -> ReceivedReply:
    """See ``read_reply``."""
    reply = unpack(frame.body, Reply)
    return ValueReader(reply.payload, frame.buffers, reply.notes)


def read_values_in_python(payload: Buffer, buffers: Sequence[Buffer], /) -> ReceivedValues:
    """See ``read_values``."""
    return ValueReader(unpack(payload, Payload), buffers, {})


# What other modules use.

if core is not None:
    core.connect(
        take_apart=nested.take_apart,
        put_together=nested.put_together,
        immutable=nested.IMMUTABLE,
        raw=msgspec.Raw,
        encode_values=encode_values_in_python,
        request_frame=request_frame_in_python,
        reply_frame=reply_frame_in_python,
        read_request=read_request_in_python,
        read_reply=read_reply_in_python,
        read_values=read_values_in_python,
    )

encode_values: Callable[..., Encoded]
encode_values = encode_values_in_python if core is None else core.encode_values
"""Encode the values of a message: ``(values, names, main_shared, plain, link, apart)``.

Arguments and errors are those of ``codec.encode``. The result is for ``request_frame`` or ``reply_frame``. It has the
attributes of ``Encoded``, and its payload may be a ``msgspec.Raw``: encoded already.
"""

request_frame: Callable[[int, str, Encoded, bool, dict[str, bytes], float], Frame]
request_frame = request_frame_in_python if core is None else core.request_frame
"""The frame of a request: ``(number, function, encoded, keywords, notes, left)``, see ``messages.Request``."""

reply_frame: Callable[[int, Encoded, dict[str, bytes]], Frame]
reply_frame = reply_frame_in_python if core is None else core.reply_frame
"""The frame of a reply: ``(number, encoded, notes)``."""

read_request: Callable[[Frame], ReceivedRequest]
read_request = read_request_in_python if core is None else core.read_request
"""Read a request. Raises ``ProtocolError`` if it is malformed, here or when its tensors and values are asked for."""

read_reply: Callable[[Frame], ReceivedReply]
read_reply = read_reply_in_python if core is None else core.read_reply
"""Read a reply. Raises as ``read_request`` does."""

read_values: Callable[[Buffer, Sequence[Buffer]], ReceivedValues]
read_values = read_values_in_python if core is None else core.read_values
"""Read the values of another message: ``(payload, buffers)``. Raises as ``read_request`` does."""
