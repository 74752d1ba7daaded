"""Frames: what a channel carries. Header, table of buffer lengths, body, raw buffers.

    header  32 bytes   magic, version, kind, flags, number of buffers, body length, number, payload length
    table   8 bytes per buffer: its length; in a frame with slots 8 more for each: its place, 0 if it is in the payload
    body    a message, see ``messages``
    payload the buffers, one behind the other, but for those that lie in slots

Pure: no sockets, no threads. ``FrameReader`` turns bytes into frames and allocates nothing whose size it
has not checked; large buffers are received straight into the memory they stay in.

[Note: slots] Between processes of one host a buffer may lie in memory that both see. Its place then stands for its
bytes; all lengths, limits and sizes are those of the same frame without slots. What a place means the channel knows
(``transport.shm``), and its two ends agree on it by *control* frames, which no layer above gets to see.
"""

from __future__ import annotations

import collections
import struct
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from backhaul._wire.memory import Buffer, Recycler, copy_into
from backhaul.errors import ProtocolError

MAGIC = b"BkHl"
VERSION = 1
HEADER = struct.Struct("<4sBBHIIQQ")
_HEADER_SIZE = HEADER.size
_START = MAGIC + bytes((VERSION,))
_HEAD = struct.Struct("<5sBHIIQQ")  # the same with magic and version in one
_HEAD_OF_ONE = struct.Struct("<5sBHIIQQQ")  # and the table, if there is one buffer
MAX_BUFFERS = 1 << 20
MAX_BODY = (1 << 32) - 1
_SLOTS, _CONTROL = 1, 2  # flags
_MAX_CONTROL = 64
_JOINED = 8 << 10  # up to here a buffer is cheaper copied than written as a piece of its own
_AT_ONCE = 1 << 20  # bytes to read at once, see ``FrameReader.space``


class Slots(Protocol):
    """What a reader has to be given to take frames with slots."""

    def resolve(self, place: int, size: int) -> Buffer:
        """The ``size`` bytes at ``place``. Raises ``ProtocolError`` if there are none."""

    def control(self, kind: int, number: int, body: bytes) -> None:
        """A control frame came."""


class Frame(msgspec.Struct, eq=False):
    """One message on the wire.

    Attributes:
        kind: What the body is; see ``messages.Kind``.
        number: Names the call the frame belongs to; 0 where there is none.
        body: The encoded message.
        buffers: Raw memory that goes along uncopied.
        keep: Owners of that memory, kept alive as long as the frame.
    """

    kind: int
    number: int = 0
    body: Buffer = b""
    buffers: Sequence[Buffer] = ()
    keep: Any = None

    def __repr__(self) -> str:
        return f"Frame(kind={self.kind}, number={self.number}, {self.nbytes} bytes)"

    @property
    def nbytes(self) -> int:
        """Size on the wire."""
        size = _HEADER_SIZE + len(self.body)
        for buffer in self.buffers:
            size += 8 + len(buffer)
        return size

    def parts(self, places: Sequence[int] | None = None) -> list[Buffer]:
        """The wire form, as pieces to be written in order. ``places``: which are in slots, see [Note: slots]."""
        body, buffers = self.body, self.buffers
        if not buffers:
            return [_HEAD.pack(_START, self.kind, 0, 0, len(body), self.number, 0) + body]
        if places is None and len(buffers) == 1:
            (buffer,) = buffers
            size = len(buffer)
            head = _HEAD_OF_ONE.pack(_START, self.kind, 0, 1, len(body), self.number, size, size)
            return [b"".join((head, body, buffer))] if size <= _JOINED else [head + body, buffer]
        lengths = [len(buffer) for buffer in buffers]
        count, flags = len(lengths), 0 if places is None else _SLOTS
        header = _HEAD.pack(_START, self.kind, flags, count, len(body), self.number, sum(lengths))
        if places is None:
            head = header + struct.pack(f"<{count}Q", *lengths) + body
            return [head, *(buffer for buffer in buffers if len(buffer))]
        head = header + struct.pack(f"<{2 * count}Q", *lengths, *places) + body
        return [head, *(buffer for buffer, place in zip(buffers, places, strict=True) if len(buffer) and not place)]

    def copied(self, recycler: Recycler) -> Frame:
        """The same frame on memory of its own, as if it had been received."""
        buffers = []
        for buffer in self.buffers:
            copy = recycler.allocate(len(buffer))
            copy_into(copy, buffer)
            buffers.append(copy)
        return Frame(self.kind, self.number, bytes(self.body), buffers)


def control_frame(kind: int, number: int, body: bytes = b"") -> bytes:
    """The wire form of a control frame, see [Note: slots]."""
    return HEADER.pack(MAGIC, VERSION, kind, _CONTROL, 0, len(body), number, 0) + body


class FrameReader:
    """Turns a stream of bytes into frames. One reader per channel; used by one thread at a time.

    Put bytes into ``space``, say how many with ``fed``::

        >>> reader = FrameReader(limit=1 << 20)
        >>> wire = b"".join(Frame(3, 7, b"hello").parts())
        >>> reader.space[: len(wire)] = wire
        >>> reader.fed(len(wire))
        [Frame(kind=3, number=7, 37 bytes)]
    """

    SCRATCH = 1 << 16

    def __init__(
        self, limit: int, recycler: Recycler | None = None, slots: Slots | None = None, buffers: int = MAX_BUFFERS
    ) -> None:
        self._limit = limit
        self._most = buffers
        self._recycler = recycler or Recycler()
        self._slots = slots
        self._memory = bytearray(self.SCRATCH + 8)  # the last bytes are never filled: a table may be looked for there
        self._scratch = memoryview(self._memory)[: self.SCRATCH]
        self.space = self._scratch  # memory for the next bytes; never empty, and another after each ``fed``
        self._start = 0
        self._end = 0
        # A piece too large for the scratch is read straight into its own memory.
        self._block: Buffer = b""
        self._large: memoryview | None = None
        self._filled = 0
        # The frame being read: None until its header is there.
        self._kind = 0
        self._number = 0
        self._pieces: collections.deque[int] | None = None  # sizes of table (if any), body, buffers still to come
        self._payload = 0
        self._flags = 0
        self._has_table = False
        self._body: Buffer = b""
        self._body_read = False
        self._buffers: list[Buffer] = []
        self._places: tuple[int, ...] = ()  # of a frame with slots, whose buffers there are in ``_slotted``
        self._slotted: list[Buffer] = []

    @property
    def midway(self) -> bool:
        """Whether part of a frame has been read."""
        return self._pieces is not None or self._end > self._start

    def close(self) -> None:
        """No more bytes will come: let go of slots, those of a frame that is not complete too."""
        self._slots = None
        self._slotted = []

    def fed(self, count: int) -> list[Frame]:
        """Account for ``count`` bytes written to ``space``; return the frames now complete.

        A frame that is there as a whole, as small ones mostly are, is cut out here. One that comes piece by piece, has
        flags, or is not right is left to ``_read_header`` and ``_read_on``.
        """
        frames: list[Frame] = []
        memory = self._memory
        if self._pieces is None:
            start, end = self._start, self._end + count
        elif self._read_on(count, frames):
            start, end = self._start, self._end
        else:
            self._make_space()
            return frames
        while end - start >= _HEADER_SIZE:
            mark, kind, flags, several, body, number, payload, first = _HEAD_OF_ONE.unpack_from(memory, start)
            at = start + _HEADER_SIZE + 8 * several
            cut = at + body
            rest = cut + payload
            if mark == _START and not flags and rest <= end and rest - start <= self._limit and several <= self._most:
                buffers: list[Buffer] | None
                if several == 1 and first == payload:
                    buffers = [memory[cut:rest]]
                else:
                    buffers = _cut(memory, at - 8 * several, several, cut, payload) if several or payload else []
                if buffers is not None:
                    frames.append(Frame(kind, number, memory[at:cut], buffers))
                    start = rest
                    continue
            self._start, self._end = start, end
            self._read_header()
            if not self._read_on(0, frames):
                self._make_space()
                return frames
            start, end = self._start, self._end
        if start != end:
            self._start, self._end = start, end
            self._make_space()
        elif self._end:
            self._start = self._end = 0
            self.space = self._scratch
        return frames

    def _make_space(self) -> None:
        """Find ``space`` for the rest of a frame.

        Not all of a large buffer at once: a system call that reads as fast as the peer writes would not return before
        the buffer is full, and until then nobody could tell that bytes arrive.
        """
        if self._large is not None:
            self.space = self._large[self._filled : self._filled + _AT_ONCE]
            return
        if self._start and self._end - self._start < self.SCRATCH // 2:
            rest = self._memory[self._start : self._end]
            self._scratch[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        self.space = self._scratch[self._end :]

    def _read_on(self, count: int, frames: list[Frame]) -> bool:
        """Go on with a frame whose header was read, ``count`` bytes later; return whether it is complete."""
        if self._large is not None:
            self._filled += count
            if self._filled < len(self._large):
                return False
            block, self._block, self._large = self._block, b"", None
            self.space = self._scratch
            self._accept(block, frames)
        else:
            self._end += count
        while self._pieces is not None:
            need = self._pieces[0]
            have = self._end - self._start
            if have >= need:
                piece = self._memory[self._start : self._start + need]
                self._start += need
                self._accept(piece, frames)
            elif need > self.SCRATCH // 2:
                self._block = self._recycler.allocate(need)
                self._large = memoryview(self._block).cast("B")
                self._large[:have] = self._scratch[self._start : self._end]
                self._filled = have
                self._start = self._end = 0
                return False
            else:
                if not have:
                    self._start = self._end = 0
                return False
        return True

    def _read_header(self) -> None:
        magic, version, kind, flags, count, body, number, payload = HEADER.unpack_from(self._memory, self._start)
        if magic != MAGIC:
            raise ProtocolError(f"not a frame: it starts with {magic!r}")
        if version != VERSION:
            raise ProtocolError(f"frame of version {version}; this worker speaks version {VERSION}")
        if flags:
            self._check_flags(flags, count, body)
        size = _HEADER_SIZE + 8 * count + body + payload
        if size > self._limit:
            raise ProtocolError(f"frame of {size} bytes exceeds the limit of {self._limit} (max_frame_bytes)")
        if count > self._most:
            raise ProtocolError(f"frame of {count} buffers exceeds the limit of {self._most} (max_tensors)")
        if count == 0 and payload:
            raise ProtocolError(f"impossible frame: {count} buffers with {payload} bytes")
        self._start += _HEADER_SIZE
        self._kind, self._number, self._payload, self._flags = kind, number, payload, flags
        self._has_table = count > 0
        table = 16 * count if flags & _SLOTS else 8 * count
        self._pieces = collections.deque((table, body) if count else (body,))
        self._body_read = False
        self._buffers = []

    def _check_flags(self, flags: int, count: int, body: int) -> None:
        if flags not in (_SLOTS, _CONTROL) or self._slots is None:
            raise ProtocolError(f"unknown frame flags {flags:#06x}")
        if flags == _CONTROL and (count or body > _MAX_CONTROL):
            raise ProtocolError(f"impossible control frame: {count} buffers, {body} bytes")
        if flags == _SLOTS and not count:
            raise ProtocolError("a frame with slots but no buffers")

    def _accept(self, piece: Buffer, frames: list[Frame]) -> None:
        assert self._pieces is not None
        self._pieces.popleft()
        if self._has_table:
            self._has_table = False
            lengths = struct.unpack(f"<{len(piece) // 8}Q", piece)
            if self._flags:
                lengths, self._places = lengths[: len(lengths) // 2], lengths[len(lengths) // 2 :]
            if sum(lengths) != self._payload:
                raise ProtocolError(f"buffer lengths add up to {sum(lengths)}, the header says {self._payload}")
            self._pieces.extend(self._resolve(lengths) if self._flags else lengths)
        elif not self._body_read:
            self._body = piece
            self._body_read = True
        else:
            self._buffers.append(piece)
        if not self._pieces:
            self._pieces = None
            if self._flags:
                self._finish_flagged(frames)
            else:
                frames.append(Frame(self._kind, self._number, self._body, self._buffers))
            self._body, self._buffers = b"", []

    def _resolve(self, lengths: Sequence[int]) -> list[int]:
        """Get the buffers that lie in slots; return the lengths of the others."""
        assert self._slots is not None
        inline = []
        for length, place in zip(lengths, self._places, strict=True):
            if place:
                self._slotted.append(self._slots.resolve(place, length))
            else:
                inline.append(length)
        return inline

    def _finish_flagged(self, frames: list[Frame]) -> None:
        if self._flags == _CONTROL:
            assert self._slots is not None
            self._slots.control(self._kind, self._number, bytes(self._body))
            return
        inline, slotted = iter(self._buffers), iter(self._slotted)
        buffers = [next(slotted if place else inline) for place in self._places]
        self._slotted = []
        frames.append(Frame(self._kind, self._number, self._body, buffers))


def _cut(memory: bytearray, table: int, count: int, start: int, payload: int) -> list[Buffer] | None:
    """The buffers of a frame that is there as a whole; None if its table does not add up."""
    lengths = struct.unpack_from(f"<{count}Q", memory, table)
    if sum(lengths) != payload:
        return None
    buffers: list[Buffer] = []
    for length in lengths:
        buffers.append(memory[start : start + length])
        start += length
    return buffers
