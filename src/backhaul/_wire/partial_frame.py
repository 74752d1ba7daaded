"""A frame of which only the header and some pieces have arrived; part of ``frame_reader``. Pure."""

from __future__ import annotations

import collections
import struct
from collections.abc import Sequence
from typing import cast

from backhaul._wire.frames import CONTROL, LANES, PIECE_BYTES, PIECES, SLOTS, Frame, Lanes, Slots
from backhaul._wire.memory import Buffer
from backhaul.errors import ProtocolError

TABLE, BODY, BUFFERS = range(3)
"""Pieces of a frame."""


class PartialFrame:
    """A frame of which only the header and some pieces have arrived.

    Attributes:
        missing: The sizes of the pieces still to come: table (if any), body, buffers.
        left: How much of a payload in pieces is still to come.
    """

    __slots__ = (
        "_body",
        "_buffers",
        "_flags",
        "_kind",
        "_number",
        "_outside",
        "_payload",
        "_places",
        "_reads",
        "_slotted",
        "left",
        "missing",
    )

    def __init__(
        self, kind: int, number: int, flags: int, sizes: tuple[int, int, int], outside: Slots | Lanes | None
    ) -> None:
        count, body, payload = sizes
        table = 16 * count if flags & SLOTS else 8 * count
        self.missing = collections.deque((table, body) if count else (body,))
        self._kind = kind
        self._number = number
        self._flags = flags
        self._payload = payload
        self._outside = outside  # the channel's slots or lanes, which no channel has both of
        self._reads = TABLE if count else BODY  # what the next piece is
        self._body: Buffer = b""
        self._buffers: list[Buffer] = []
        # Of a frame with slots, whose buffers there are in ``_slotted``; or the lengths of the buffers of a head.
        self._places: tuple[int, ...] = ()
        self.left = 0
        self._slotted: list[Buffer] = []

    @property
    def in_pieces(self) -> bool:
        """Whether the payload comes in pieces, and is next."""
        return self._reads == BUFFERS and self._flags & PIECES != 0

    def close(self) -> None:
        """Release the slots."""
        self._outside = None
        self._slotted = []

    def add(self, piece: Buffer) -> None:
        """Take the first of the missing pieces. Raises ``ProtocolError`` if the table contradicts the header."""
        self.missing.popleft()
        if self._reads == BUFFERS:
            self._buffers.append(piece)
        elif self._reads == BODY:
            self._body = piece
            self._reads = BUFFERS
            if self._flags & PIECES:
                self.left = sum(self.missing)
                if self.left <= PIECE_BYTES:
                    raise ProtocolError(f"malformed frame: {self.left} bytes need no pieces")
        else:
            self._reads = BODY
            lengths = struct.unpack(f"<{len(piece) // 8}Q", piece)
            if self._flags & SLOTS:
                lengths, self._places = lengths[: len(lengths) // 2], lengths[len(lengths) // 2 :]
            if sum(lengths) != self._payload:
                raise ProtocolError(
                    f"malformed frame: the buffers have {sum(lengths)} bytes, but the header says {self._payload}"
                )
            if self._flags & LANES:
                self._places = lengths
            else:
                self.missing.extend(self._resolve(lengths) if self._flags & SLOTS else lengths)

    def _resolve(self, lengths: Sequence[int]) -> list[int]:
        """Look up the buffers that are in slots; return the lengths of the others."""
        slots = cast("Slots", self._outside)
        inline = []
        for length, place in zip(lengths, self._places, strict=True):
            if place:
                self._slotted.append(slots.resolve(place, length))
            else:
                inline.append(length)
        return inline

    def finish(self) -> Frame | None:
        """Return the complete frame. Control frames and heads go to ``slots`` or ``lanes`` instead."""
        if self._flags == CONTROL:
            assert self._outside is not None
            self._outside.control(self._kind, self._number, bytes(self._body))
            return None
        if self._flags & LANES:
            cast("Lanes", self._outside).announce(Frame(self._kind, self._number, self._body), self._places)
            return None
        if self._flags & SLOTS:
            inline, slotted = iter(self._buffers), iter(self._slotted)
            self._buffers = [next(slotted if place else inline) for place in self._places]
        return Frame(self._kind, self._number, self._body, self._buffers)
