"""Frames: what a channel carries. A frame is a header, a table of buffer lengths, a body, and raw buffers.

    header  32 bytes   magic, version, kind, flags, number of buffers, body length, number, payload length
    table   8 bytes per buffer: its length; in a frame with slots 8 more bytes: its place, or 0 if it is in the payload
    body    a message, see ``messages``
    payload the buffers in order, except those in slots

Pure: no sockets, no threads. ``frame_reader`` turns bytes into frames.

[Note: slots] Between processes of one host a buffer may be in shared memory. The frame then has the place of the
buffer instead of its bytes. All lengths, limits and sizes are those of the same frame without slots. The channel knows
what a place means (``_transport.shm``). Its two ends agree on places with *control* frames, which the reader hands to
the channel and to no layer above.

[Note: pieces] A payload of more than ``PIECE_BYTES`` is sent in pieces of this size. Between two pieces there is a
*gap*: the size of what follows in 4 bytes, usually 0, and then so many bytes of whole frames. So a small frame of
another thread need not wait for the end of a large frame. Sizes and limits do not count the gaps.

[Note: lanes] The payload of a large frame may go over other connections of the channel (``lane_pieces``). The frame is
then a *head*: it has the same lengths, but no payload follows.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import msgspec

from backhaul._native import core
from backhaul._wire.memory import Buffer, Recycler, copy_into

MAGIC = b"BkHl"
VERSION = 1
HEADER = struct.Struct("<4sBBHIIQQ")
HEADER_BYTES = HEADER.size
START = MAGIC + bytes((VERSION,))
_HEAD = struct.Struct("<5sBHIIQQ")  # as HEADER, with magic and version as one field
HEAD_OF_ONE = struct.Struct("<5sBHIIQQQ")  # as _HEAD, followed by the table of a frame with one buffer
MAX_BUFFERS = 1 << 20
MAX_BODY = (1 << 32) - 1
SLOTS, CONTROL, PIECES, LANES = 1, 2, 4, 8  # flags
_MAX_JOINED_BYTES = 8 << 10  # copying a buffer of up to this size is cheaper than writing it as a separate piece
PIECE_BYTES = 1 << 20
"""Size of the pieces of a large payload, see [Note: pieces]."""

GAP = bytes(4)
"""An empty gap, see [Note: pieces]. A writer finds this object among the parts of a frame, and may fill the gap."""

MAX_GAP_BYTES = 1 << 16
"""The most bytes of frames in one gap."""

GAP_SIZE = struct.Struct("<I")  # the beginning of a gap


class Slots(Protocol):
    """What a reader needs to read frames with slots."""

    def resolve(self, place: int, size: int) -> Buffer:
        """The ``size`` bytes at ``place``. Raises ``ProtocolError`` if there is no such place."""

    def control(self, kind: int, number: int, body: bytes) -> None:
        """Called for each control frame."""


class Lanes(Protocol):
    """What a reader needs to read frames whose payloads are on other connections, see [Note: lanes]."""

    @property
    def blocked(self) -> bool:
        """Whether the reader must not go on with the frames that follow. Changes only while the reader calls this
        object, or while it waits for ``FrameReader.fed``.
        """

    def announce(self, frame: Frame, lengths: Sequence[int]) -> None:
        """Called for each head, with its frame without buffers, and their lengths."""

    def control(self, kind: int, number: int, body: bytes) -> None:
        """Called for each control frame."""


class Frame(msgspec.Struct, eq=False):
    """One message on the wire.

    Attributes:
        kind: What the body is; see ``messages.Kind``.
        number: The call that the frame belongs to; 0 if it belongs to none.
        body: The encoded message.
        buffers: Raw memory, which is sent without a copy.
        keep: The owners of that memory. They live as long as the frame.
        pieces: The wire form, if there is one already: of small frames that the native core has made.
    """

    kind: int
    number: int = 0
    body: Buffer = b""
    buffers: Sequence[Buffer] = ()
    keep: Any = None
    pieces: Sequence[Buffer] = ()

    def __repr__(self) -> str:
        return f"Frame(kind={self.kind}, number={self.number}, {self.nbytes} bytes)"

    @property
    def nbytes(self) -> int:
        """Size on the wire."""
        size = HEADER_BYTES + len(self.body)
        for buffer in self.buffers:
            size += 8 + len(buffer)
        return size

    def parts(self, places: Sequence[int] | None = None) -> list[Buffer]:
        """The wire form, as pieces to write in order. ``places``: where each buffer is, see [Note: slots]."""
        if self.pieces and places is None:
            return list(self.pieces)
        body, buffers = self.body, self.buffers
        if not buffers:
            return [_HEAD.pack(START, self.kind, 0, 0, len(body), self.number, 0) + body]
        if places is None and len(buffers) == 1 and (size := len(buffers[0])) <= PIECE_BYTES:
            (buffer,) = buffers
            head = HEAD_OF_ONE.pack(START, self.kind, 0, 1, len(body), self.number, size, size)
            return [b"".join((head, body, buffer))] if size <= _MAX_JOINED_BYTES else [head + body, buffer]
        if places is None and core is not None:
            joined = core.join_frame(self.kind, self.number, body, buffers)
            if joined is not None:
                return [joined]
        lengths = [len(buffer) for buffer in buffers]
        count, payload, flags = len(lengths), sum(lengths), 0
        table = struct.pack(f"<{count}Q", *lengths)
        if places is None:
            inline, size = [buffer for buffer in buffers if len(buffer)], payload
        else:
            flags, table = SLOTS, table + struct.pack(f"<{count}Q", *places)
            inline = [buffer for buffer, place in zip(buffers, places, strict=True) if len(buffer) and not place]
            size = sum(map(len, inline))
        if size > PIECE_BYTES:
            flags, inline = flags | PIECES, list(_pieces_of(inline))
        head = _HEAD.pack(START, self.kind, flags, count, len(body), self.number, payload) + table + body
        return [b"".join((head, *inline))] if size <= _MAX_JOINED_BYTES else [head, *inline]

    def head(self) -> bytes:
        """The wire form without the buffers, which go over other connections, see [Note: lanes]."""
        lengths = [len(buffer) for buffer in self.buffers]
        table = struct.pack(f"<{len(lengths)}Q", *lengths)
        fields = (START, self.kind, LANES, len(lengths), len(self.body), self.number, sum(lengths))
        return b"".join((_HEAD.pack(*fields), table, self.body))

    def copied(self, recycler: Recycler) -> Frame:
        """The same frame on new memory, as if it had been received."""
        buffers = []
        for buffer in self.buffers:
            copy = recycler.allocate(len(buffer))
            copy_into(copy, buffer)
            buffers.append(copy)
        return Frame(self.kind, self.number, bytes(self.body), buffers)


def _pieces_of(buffers: Sequence[Buffer]) -> Iterator[Buffer]:
    """The buffers, cut where a piece ends, with an empty gap between two pieces."""
    left = PIECE_BYTES
    for buffer in buffers:
        start, size = 0, len(buffer)
        while start < size:
            if not left:
                yield GAP
                left = PIECE_BYTES
            end = min(start + left, size)
            yield buffer if not start and end == size else memoryview(buffer).cast("B")[start:end]
            left -= end - start
            start = end


def fill_gap(frames: Sequence[Buffer]) -> list[Buffer]:
    """A gap that holds ``frames``, which are whole and have no more than ``MAX_GAP_BYTES`` together."""
    return [GAP_SIZE.pack(sum(map(len, frames))), *frames] if frames else [GAP]


def control_frame(kind: int, number: int, body: bytes = b"") -> bytes:
    """The wire form of a control frame, see [Note: slots]."""
    return HEADER.pack(MAGIC, VERSION, kind, CONTROL, 0, len(body), number, 0) + body
