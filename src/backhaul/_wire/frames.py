"""Frames: what a channel carries. A frame is a header, a table of buffer lengths, a body, and raw buffers.

    header  32 bytes   magic, version, kind, flags, number of buffers, body length, number, payload length
    table   8 bytes per buffer: its length; in a frame with slots 8 more bytes: its place, or 0 if it is in the payload
    body    a message, see ``messages``
    payload the buffers in order, except those in slots

Pure: no sockets, no threads. ``FrameReader`` turns bytes into frames. It checks every size before it allocates memory.
Large buffers are received directly into the memory that they stay in.

[Note: slots] Between processes of one host a buffer may be in shared memory. The frame then has the place of the
buffer instead of its bytes. All lengths, limits and sizes are those of the same frame without slots. The channel knows
what a place means (``_transport.shm``). Its two ends agree on places with *control* frames, which the reader hands to
the channel and to no layer above.
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
_HEAD = struct.Struct("<5sBHIIQQ")  # as HEADER, with magic and version as one field
_HEAD_OF_ONE = struct.Struct("<5sBHIIQQQ")  # as _HEAD, followed by the table of a frame with one buffer
MAX_BUFFERS = 1 << 20
MAX_BODY = (1 << 32) - 1
_SLOTS, _CONTROL = 1, 2  # flags
_TABLE, _BODY, _BUFFERS = range(3)  # pieces of a frame
_MAX_CONTROL_BYTES = 64
_MAX_JOINED_BYTES = 8 << 10  # copying a buffer of up to this size is cheaper than writing it as a separate piece
_MAX_READ_BYTES = 1 << 20  # how much one system call may read, see ``FrameReader.space``


class Slots(Protocol):
    """What a reader needs to read frames with slots."""

    def resolve(self, place: int, size: int) -> Buffer:
        """The ``size`` bytes at ``place``. Raises ``ProtocolError`` if there is no such place."""

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
        """The wire form, as pieces to write in order. ``places``: where each buffer is, see [Note: slots]."""
        body, buffers = self.body, self.buffers
        if not buffers:
            return [_HEAD.pack(_START, self.kind, 0, 0, len(body), self.number, 0) + body]
        if places is None and len(buffers) == 1:
            (buffer,) = buffers
            size = len(buffer)
            head = _HEAD_OF_ONE.pack(_START, self.kind, 0, 1, len(body), self.number, size, size)
            return [b"".join((head, body, buffer))] if size <= _MAX_JOINED_BYTES else [head + body, buffer]
        lengths = [len(buffer) for buffer in buffers]
        count, flags = len(lengths), 0 if places is None else _SLOTS
        header = _HEAD.pack(_START, self.kind, flags, count, len(body), self.number, sum(lengths))
        if places is None:
            head = header + struct.pack(f"<{count}Q", *lengths) + body
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
    return HEADER.pack(MAGIC, VERSION, kind, _CONTROL, 0, len(body), number, 0) + body


# Over the limit because all of them are the state of one incremental parser.
class FrameReader:
    """Turns a stream of bytes into frames. One reader per channel; used by one thread at a time.

    Put bytes into ``space`` and pass their number to ``fed``::

        >>> reader = FrameReader(limit=1 << 20)
        >>> wire = b"".join(Frame(3, 7, b"hello").parts())
        >>> reader.space[: len(wire)] = wire
        >>> reader.fed(len(wire))
        [Frame(kind=3, number=7, 37 bytes)]

    Attributes:
        space: Memory for the next bytes. It is never empty, and each ``fed`` may replace it.
    """

    SCRATCH = 1 << 16  # bytes

    def __init__(
        self, limit: int, recycler: Recycler | None = None, slots: Slots | None = None, buffers: int = MAX_BUFFERS
    ) -> None:
        self._limit = limit
        self._max_buffers = buffers
        self._recycler = recycler or Recycler()
        self._slots = slots
        # The last 8 bytes stay empty: ``fed`` reads the length of a first buffer there even if there is none.
        self._memory = bytearray(self.SCRATCH + 8)
        self._scratch = memoryview(self._memory)[: self.SCRATCH]
        self.space = self._scratch
        self._start = 0
        self._end = 0
        # A piece that is too large for the scratch memory is read directly into memory of its own.
        self._block: Buffer = b""
        self._large: memoryview | None = None
        self._filled = 0
        self._partial: _PartialFrame | None = None  # the frame being read, once its header is complete

    @property
    def midway(self) -> bool:
        """Whether part of a frame has been read."""
        return self._partial is not None or self._end > self._start

    def close(self) -> None:
        """Release all slots, also those of an incomplete frame. No more bytes may follow."""
        self._slots = None
        if self._partial is not None:
            self._partial.close()

    def fed(self, count: int) -> list[Frame]:
        """Account for ``count`` bytes written to ``space``; return the frames that are complete now.

        This method itself reads frames that are complete in memory, as small frames usually are. It leaves a frame
        that is incomplete, has flags, or is malformed to ``_read_header`` and ``_read_on``.
        """
        frames: list[Frame] = []
        memory = self._memory
        if self._partial is None:
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
            if (
                mark == _START
                and not flags
                and rest <= end
                and rest - start <= self._limit
                and several <= self._max_buffers
            ):
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
        """Set ``space`` for the rest of an incomplete frame.

        It never covers all of a large buffer. A system call that reads as fast as the peer writes would return only
        when the buffer is full, and until then nothing would show that bytes arrive.
        """
        if self._large is not None:
            self.space = self._large[self._filled : self._filled + _MAX_READ_BYTES]
            return
        if self._start and self._end - self._start < self.SCRATCH // 2:
            rest = self._memory[self._start : self._end]
            self._scratch[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        self.space = self._scratch[self._end :]

    def _read_on(self, count: int, frames: list[Frame]) -> bool:
        """Continue a frame whose header was read, after ``count`` more bytes. Returns whether it is complete."""
        partial = self._partial
        assert partial is not None
        if self._large is not None:
            self._filled += count
            if self._filled < len(self._large):
                return False
            block, self._block, self._large = self._block, b"", None
            self.space = self._scratch
            partial.add(block)
        else:
            self._end += count
        while partial.missing:
            need = partial.missing[0]
            have = self._end - self._start
            if have >= need:
                piece = self._memory[self._start : self._start + need]
                self._start += need
                partial.add(piece)
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
        self._partial = None
        frame = partial.finish()
        if frame is not None:
            frames.append(frame)
        return True

    def _read_header(self) -> None:
        magic, version, kind, flags, count, body, number, payload = HEADER.unpack_from(self._memory, self._start)
        if magic != MAGIC:
            raise ProtocolError(
                f"received bytes that are not a frame of Backhaul: they start with {magic!r}; "
                "check that the address belongs to a worker and that both ends use the same tls option"
            )
        if version != VERSION:
            raise ProtocolError(
                f"received a frame of protocol version {version}, but this worker uses version {VERSION}; "
                "install the same version of backhaul on all workers"
            )
        if flags:
            self._check_flags(flags, count, body)
        size = _HEADER_SIZE + 8 * count + body + payload
        if size > self._limit:
            raise ProtocolError(f"a frame of {size} bytes exceeds the limit of {self._limit} (limits.frame_bytes)")
        if count > self._max_buffers:
            raise ProtocolError(f"a frame of {count} buffers exceeds the limit of {self._max_buffers} (limits.tensors)")
        if count == 0 and payload:
            raise ProtocolError(f"malformed frame: no buffers, but a payload of {payload} bytes")
        self._start += _HEADER_SIZE
        self._partial = _PartialFrame(kind, number, flags, (count, body, payload), self._slots)

    def _check_flags(self, flags: int, count: int, body: int) -> None:
        if flags not in (_SLOTS, _CONTROL) or self._slots is None:
            raise ProtocolError(f"unknown frame flags {flags:#06x}")
        if flags == _CONTROL and (count or body > _MAX_CONTROL_BYTES):
            raise ProtocolError(f"malformed control frame: {count} buffers, {body} bytes")
        if flags == _SLOTS and not count:
            raise ProtocolError("malformed frame: it has slots but no buffers")


class _PartialFrame:
    """A frame of which only the header and some pieces have arrived.

    Attributes:
        missing: The sizes of the pieces still to come: table (if any), body, buffers.
    """

    __slots__ = (
        "_body",
        "_buffers",
        "_flags",
        "_kind",
        "_number",
        "_payload",
        "_places",
        "_reads",
        "_slots",
        "_slotted",
        "missing",
    )

    def __init__(self, kind: int, number: int, flags: int, sizes: tuple[int, int, int], slots: Slots | None) -> None:
        count, body, payload = sizes
        table = 16 * count if flags & _SLOTS else 8 * count
        self.missing = collections.deque((table, body) if count else (body,))
        self._kind = kind
        self._number = number
        self._flags = flags
        self._payload = payload
        self._slots = slots
        self._reads = _TABLE if count else _BODY  # what the next piece is
        self._body: Buffer = b""
        self._buffers: list[Buffer] = []
        self._places: tuple[int, ...] = ()  # of a frame with slots, whose buffers there are in ``_slotted``
        self._slotted: list[Buffer] = []

    def close(self) -> None:
        """Release the slots."""
        self._slots = None
        self._slotted = []

    def add(self, piece: Buffer) -> None:
        """Take the first of the missing pieces. Raises ``ProtocolError`` if the table contradicts the header."""
        self.missing.popleft()
        if self._reads == _BUFFERS:
            self._buffers.append(piece)
        elif self._reads == _BODY:
            self._body = piece
            self._reads = _BUFFERS
        else:
            self._reads = _BODY
            lengths = struct.unpack(f"<{len(piece) // 8}Q", piece)
            if self._flags:
                lengths, self._places = lengths[: len(lengths) // 2], lengths[len(lengths) // 2 :]
            if sum(lengths) != self._payload:
                raise ProtocolError(
                    f"malformed frame: the buffers have {sum(lengths)} bytes, but the header says {self._payload}"
                )
            self.missing.extend(self._resolve(lengths) if self._flags else lengths)

    def _resolve(self, lengths: Sequence[int]) -> list[int]:
        """Look up the buffers that are in slots; return the lengths of the others."""
        assert self._slots is not None
        inline = []
        for length, place in zip(lengths, self._places, strict=True):
            if place:
                self._slotted.append(self._slots.resolve(place, length))
            else:
                inline.append(length)
        return inline

    def finish(self) -> Frame | None:
        """Return the complete frame. A control frame goes to ``slots`` instead."""
        if self._flags == _CONTROL:
            assert self._slots is not None
            self._slots.control(self._kind, self._number, bytes(self._body))
            return None
        if self._flags:
            inline, slotted = iter(self._buffers), iter(self._slotted)
            self._buffers = [next(slotted if place else inline) for place in self._places]
        return Frame(self._kind, self._number, self._body, self._buffers)


def _cut(memory: bytearray, table: int, count: int, start: int, payload: int) -> list[Buffer] | None:
    """The buffers of a frame that is complete in memory; None if its table contradicts its header."""
    lengths = struct.unpack_from(f"<{count}Q", memory, table)
    if sum(lengths) != payload:
        return None
    buffers: list[Buffer] = []
    for length in lengths:
        buffers.append(memory[start : start + length])
        start += length
    return buffers
