"""Turns a stream of bytes into frames; see ``frames`` for their form. Pure: no sockets, no threads.

The reader checks every size before it allocates memory. Large buffers are received directly into the memory that they
stay in.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from backhaul._native import core
from backhaul._wire.frames import (
    CONTROL,
    GAP_SIZE,
    HEAD_OF_ONE,
    HEADER,
    HEADER_BYTES,
    LANES,
    MAGIC,
    MAX_BUFFERS,
    MAX_GAP_BYTES,
    PIECE_BYTES,
    PIECES,
    SLOTS,
    START,
    VERSION,
    Frame,
    Lanes,
    Slots,
)
from backhaul._wire.memory import Buffer, Recycler
from backhaul._wire.partial_frame import PartialFrame
from backhaul.errors import ProtocolError

_MAX_CONTROL_BYTES = 64
_MAX_READ_BYTES = 1 << 20  # how much one system call may read, see ``FrameReader._make_space``


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
        self,
        limit: int,
        recycler: Recycler | None = None,
        slots: Slots | None = None,
        buffers: int = MAX_BUFFERS,
        lanes: Lanes | None = None,
    ) -> None:
        self._limit = limit
        self._max_buffers = buffers
        self._recycler = recycler or Recycler()
        self._slots = slots
        self._lanes = lanes
        # After the scratch memory follow 4 bytes of the size of a gap, and 8 bytes that stay empty: ``fed`` reads the
        # length of a first buffer there even if there is none.
        self._memory = bytearray(self.SCRATCH + 12)
        self._scratch = memoryview(self._memory)[: self.SCRATCH]
        self.space = self._scratch
        self._start = 0
        self._end = 0
        # A piece that is too large for the scratch memory is read directly into memory of its own.
        self._block: Buffer = b""
        self._large: memoryview | None = None
        self._filled = 0
        self._partial: PartialFrame | None = None  # the frame being read, once its header is complete
        # Of a frame in pieces: how many bytes there are until the next gap; and the size of the gap that is being read,
        # with the 4 bytes of its size. 0: none is.
        self._to_gap = self._gap = 0

    @property
    def midway(self) -> bool:
        """Whether part of a frame has been read."""
        return self._partial is not None or self._end > self._start

    @property
    def blocked(self) -> bool:
        """Whether a large frame has to be completed first: feed no bytes, and pass 0 to ``fed`` then."""
        return self._lanes is not None and self._lanes.blocked

    def close(self) -> None:
        """Release all slots, also those of an incomplete frame. No more bytes may follow."""
        self._slots = None
        if self._partial is not None:
            self._partial.close()

    def fed(self, count: int) -> list[Frame]:
        """Account for ``count`` bytes written to ``space``; return the frames that are complete now.

        ``cut_frames`` reads frames that are complete in memory, as small frames usually are. It leaves a frame that is
        incomplete, has flags, or is malformed to ``_read_header`` and ``_read_on``. The rest stays in
        memory while the reader is ``blocked``.
        """
        frames: list[Frame] = []
        memory = self._memory
        if self._partial is None:
            start, end = self._start, self._end + count
        elif self._read_on(count, frames):
            start, end = self._start, self._end
            if self.blocked:
                self._make_space()
                return frames
        else:
            self._make_space()
            return frames
        while end - start >= HEADER_BYTES:
            start = cut_frames(frames, memory, start, end, self._limit, self._max_buffers)
            if end - start < HEADER_BYTES:
                break
            self._start, self._end = start, end
            self._read_header()
            if not self._read_on(0, frames) or self.blocked:
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
        if self._gap:
            self.space = memoryview(self._memory)[self._end : self._gap]
            return
        if self._large is not None:
            most = min(self._to_gap or _MAX_READ_BYTES, _MAX_READ_BYTES)
            self.space = self._large[self._filled : self._filled + most]
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
        if partial.in_pieces:
            return self._read_pieces(partial, count, frames)
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
            if partial.in_pieces:
                self._to_gap = PIECE_BYTES
                return self._read_pieces(partial, 0, frames)
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

    def _read_pieces(self, partial: PartialFrame, count: int, frames: list[Frame]) -> bool:
        """Like ``_read_on``, for the payload of a frame in pieces. What has come with its head is less than a piece."""
        if self._gap:
            self._end += count
            if self._end < self._gap or not self._read_gap(frames):
                return False
        elif self._large is not None:
            self._advance(partial, count)
        while partial.missing:
            if not self._to_gap and partial.left:
                self._start, self._end, self._gap = 0, 0, GAP_SIZE.size
                return False
            if self._large is None:
                self._block = self._recycler.allocate(partial.missing[0])
                self._large = memoryview(self._block).cast("B")
                self._filled = 0
            if have := min(self._end - self._start, len(self._large) - self._filled):
                self._large[self._filled : self._filled + have] = self._scratch[self._start : self._start + have]
                self._start += have
                self._advance(partial, have)
            if self._filled < len(self._large):
                return False
            block, self._block, self._large = self._block, b"", None
            partial.add(block)
        self._to_gap, self._partial, self.space = 0, None, self._scratch[self._end :]
        frame = partial.finish()
        if frame is not None:
            frames.append(frame)
        return True

    def _advance(self, partial: PartialFrame, count: int) -> None:
        self._filled += count
        self._to_gap -= count
        partial.left -= count

    def _read_gap(self, frames: list[Frame]) -> bool:
        """Read the frames in a gap of which all bytes are there that are known to follow. Returns whether the gap is
        complete.
        """
        (size,) = GAP_SIZE.unpack_from(self._memory)
        if size > MAX_GAP_BYTES:
            raise ProtocolError(f"malformed frame: a gap of {size} bytes between its pieces")
        if self._end < GAP_SIZE.size + size:
            self._gap = GAP_SIZE.size + size
            return False
        outer = self._partial, self._block, self._large, self._filled
        self._partial, self._large, self._gap, self._start = None, None, 0, GAP_SIZE.size
        frames += self.fed(0)
        if self._partial is not None or self._start < self._end:
            raise ProtocolError("malformed frame: there is only a part of a frame between its pieces")
        self._partial, self._block, self._large, self._filled = outer
        self._start = self._end = 0
        self._to_gap = PIECE_BYTES
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
        self._partial = PartialFrame(kind, number, flags, (count, body, payload), self._slots or self._lanes)

    def _check_flags(self, flags: int, count: int, body: int) -> None:
        if not (
            flags == PIECES
            or (self._slots is not None and flags in (SLOTS, CONTROL, SLOTS | PIECES))
            or (self._lanes is not None and flags in (CONTROL, LANES))
        ):
            raise ProtocolError(f"unknown frame flags {flags:#06x}")
        if flags == CONTROL and (count or body > _MAX_CONTROL_BYTES):
            raise ProtocolError(f"malformed control frame: {count} buffers, {body} bytes")
        if flags & (SLOTS | LANES) and not count:
            raise ProtocolError("malformed frame: its flags are for buffers, but it has none")


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
    core.connect(frame=Frame)
    cut_frames = core.cut_frames
