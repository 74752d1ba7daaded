"""Turns a stream of bytes into frames, see ``frames``.

``FrameReader`` checks every size before it allocates memory. Large buffers are received directly into the memory that
they stay in. Pure: no sockets, no threads.
"""

from __future__ import annotations

import collections
import struct
from collections.abc import Callable, Sequence
from typing import Protocol

from backhaul._native import core
from backhaul._wire.frames import (
    CONTROL,
    HEAD_OF_ONE,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    MAX_BUFFERS,
    SLOTS,
    START,
    VERSION,
    Frame,
)
from backhaul._wire.memory import Buffer, Recycler
from backhaul.errors import ProtocolError

_TABLE, _BODY, _BUFFERS = range(3)  # pieces of a frame
_MAX_CONTROL_BYTES = 64
_MAX_READ_BYTES = 1 << 20  # how much one system call may read, see ``FrameReader.space``


class Slots(Protocol):
    """What a reader needs to read frames with slots."""

    def resolve(self, place: int, size: int) -> Buffer:
        """The ``size`` bytes at ``place``. Raises ``ProtocolError`` if there is no such place."""

    def control(self, kind: int, number: int, body: bytes) -> None:
        """Called for each control frame."""


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

        ``cut_frames`` reads frames that are complete in memory, as small frames usually are. It leaves a frame that is
        incomplete, has flags, or is malformed to ``_read_header`` and ``_read_on``.
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
        while end - start >= HEADER_BYTES:
            start = cut_frames(frames, memory, start, end, self._limit, self._max_buffers)
            if end - start < HEADER_BYTES:
                break
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
        size = HEADER_BYTES + 8 * count + body + payload
        if size > self._limit:
            raise ProtocolError(f"a frame of {size} bytes exceeds the limit of {self._limit} (limits.frame_bytes)")
        if count > self._max_buffers:
            raise ProtocolError(f"a frame of {count} buffers exceeds the limit of {self._max_buffers} (limits.tensors)")
        if count == 0 and payload:
            raise ProtocolError(f"malformed frame: no buffers, but a payload of {payload} bytes")
        self._start += HEADER_BYTES
        self._partial = _PartialFrame(kind, number, flags, (count, body, payload), self._slots)

    def _check_flags(self, flags: int, count: int, body: int) -> None:
        if flags not in (SLOTS, CONTROL) or self._slots is None:
            raise ProtocolError(f"unknown frame flags {flags:#06x}")
        if flags == CONTROL and (count or body > _MAX_CONTROL_BYTES):
            raise ProtocolError(f"malformed control frame: {count} buffers, {body} bytes")
        if flags == SLOTS and not count:
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
        table = 16 * count if flags & SLOTS else 8 * count
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
        if self._flags == CONTROL:
            assert self._slots is not None
            self._slots.control(self._kind, self._number, bytes(self._body))
            return None
        if self._flags:
            inline, slotted = iter(self._buffers), iter(self._slotted)
            self._buffers = [next(slotted if place else inline) for place in self._places]
        return Frame(self._kind, self._number, self._body, self._buffers)


def cut_frames_in_python(  # noqa: PLR0917 (as the native core takes them)
    frames: list[Frame], memory: bytearray, start: int, end: int, limit: int, most_buffers: int, /
) -> int:
    """Append the frames that are complete in ``memory`` from ``start`` on. Returns where the first of the others
    begins, which is incomplete, has flags, is over a limit, or is malformed.

    Args:
        frames: What to append to.
        memory: The bytes, and 8 more.
        start: Where the bytes begin.
        end: Where the bytes end.
        limit: How many bytes a frame may have.
        most_buffers: How many buffers a frame may have.
    """
    while end - start >= HEADER_BYTES:
        mark, kind, flags, several, body, number, payload, first = HEAD_OF_ONE.unpack_from(memory, start)
        at = start + HEADER_BYTES + 8 * several
        cut = at + body
        rest = cut + payload
        if mark != START or flags or rest > end or rest - start > limit or several > most_buffers:
            break
        buffers: list[Buffer] | None
        if several == 1 and first == payload:
            buffers = [memory[cut:rest]]
        else:
            buffers = _cut(memory, at - 8 * several, several, cut, payload) if several or payload else []
        if buffers is None:
            break
        frames.append(Frame(kind, number, memory[at:cut], buffers))
        start = rest
    return start


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


cut_frames: Callable[[list[Frame], bytearray, int, int, int, int], int] = cut_frames_in_python
if core is not None:
    core.set_frame(Frame)
    cut_frames = core.cut_frames
