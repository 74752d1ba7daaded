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
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

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
SLOTS, CONTROL = 1, 2  # flags
_MAX_JOINED_BYTES = 8 << 10  # copying a buffer of up to this size is cheaper than writing it as a separate piece


class Frame(msgspec.Struct, eq=False):
    """One message on the wire.

    Attributes:
        kind: What the body is; see ``messages.Kind``.
        number: The call that the frame belongs to; 0 if it belongs to none.
        body: The encoded message.
        buffers: Raw memory, which is sent without a copy.
        keep: The owners of that memory. They live as long as the frame.
        pieces: The wire form without slots, if there is one already; see ``parts``.
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
        if places is None and len(buffers) == 1:
            (buffer,) = buffers
            size = len(buffer)
            head = HEAD_OF_ONE.pack(START, self.kind, 0, 1, len(body), self.number, size, size)
            return [b"".join((head, body, buffer))] if size <= _MAX_JOINED_BYTES else [head + body, buffer]
        if places is None and core is not None:
            joined = core.join_frame(self.kind, self.number, body, buffers)
            if joined is not None:
                return [joined]
        lengths = [len(buffer) for buffer in buffers]
        count, flags, payload = len(lengths), 0 if places is None else SLOTS, sum(lengths)
        header = _HEAD.pack(START, self.kind, flags, count, len(body), self.number, payload)
        if places is None:
            head = header + struct.pack(f"<{count}Q", *lengths) + body
            if payload <= _MAX_JOINED_BYTES:
                return [b"".join((head, *buffers))]
            return [head, *(buffer for buffer in buffers if len(buffer))]
        head = header + struct.pack(f"<{2 * count}Q", *lengths, *places) + body
        return [head, *(buffer for buffer, place in zip(buffers, places, strict=True) if len(buffer) and not place)]

    def copied(self, recycler: Recycler) -> Frame:
        """The same frame on new memory, as if it had been received."""
        buffers = []
        for buffer in self.buffers:
            copy = recycler.allocate(len(buffer))
            copy_into(copy, buffer)
            buffers.append(copy)
        return Frame(self.kind, self.number, bytes(self.body), buffers)


def control_frame(kind: int, number: int, body: bytes = b"") -> bytes:
    """The wire form of a control frame, see [Note: slots]."""
    return HEADER.pack(MAGIC, VERSION, kind, CONTROL, 0, len(body), number, 0) + body
