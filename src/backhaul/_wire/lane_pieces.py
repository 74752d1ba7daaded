"""Large frames on several connections: how their payloads are cut, and put together again. Pure: no sockets, no
threads, no clock.

    piece   20 bytes   frame (8), offset (8), length (4)
            then so many bytes of the payload of that frame, from the offset on

The head of such a frame, which is a frame with the flag ``LANES`` and no payload, goes over the first connection of the
channel. The frames of each direction are counted there, from 1. So the head has no number of its own.

[Note: pieces on lanes] Offsets are multiples of ``GRAIN_BYTES``, and so are lengths, except that of the last piece.
Each grain comes once. Otherwise a peer could let bytes be missing: a frame would be complete by number of bytes, and
would show what was in the memory before. The numbers of the frames on one lane never fall. A piece of a frame whose
head has not come yet waits, and with it all that is behind it on its lane.
"""

from __future__ import annotations

import collections
import struct
from collections.abc import Sequence

from backhaul._wire.frames import Frame
from backhaul._wire.memory import Buffer, Recycler
from backhaul.errors import ProtocolError

PIECE_HEAD = struct.Struct("<QQI")
GRAIN_BYTES = 16 << 10
MAX_PIECE_BYTES = 512 << 10  # on a fast path, pieces of 1 MiB make an echo a third slower
_FIRST_PIECE_BYTES = 64 << 10


class PieceSize:
    """How large the next piece of a lane is: about what its connection takes at once.

    A piece belongs to its lane once it is cut. So the pieces of slow lanes must be small, or the other lanes would wait
    for them at the end of a frame.

    Attributes:
        nbytes: The size.
    """

    __slots__ = ("nbytes",)

    def __init__(self) -> None:
        self.nbytes = _FIRST_PIECE_BYTES

    def took(self, count: int, asked: int) -> None:
        """A connection has taken ``count`` of ``asked`` bytes."""
        if count < asked:
            self.nbytes = max(count // GRAIN_BYTES * GRAIN_BYTES, GRAIN_BYTES)
        else:
            self.nbytes = min(2 * self.nbytes, MAX_PIECE_BYTES)


class Cutter:
    """A payload that is sent in pieces.

    >>> cutter = Cutter(1, [b"x" * 20_000, b"y" * 10_000])
    >>> [len(part) for part in cutter.cut(16_384)], [len(part) for part in cutter.cut(16_384)]
    ([20, 16384], [20, 3616, 10000])

    Attributes:
        left: How many bytes are still to be cut.
    """

    def __init__(self, number: int, buffers: Sequence[Buffer]) -> None:
        self._number = number
        self._offset = 0
        self._buffers = collections.deque(memoryview(buffer).cast("B") for buffer in buffers if len(buffer))
        self.left = sum(map(len, self._buffers))

    def cut(self, most: int) -> list[Buffer]:
        """The head of the next piece, and its bytes: ``most`` at most, a multiple of ``GRAIN_BYTES``."""
        length = min(most, self.left)
        piece: list[Buffer] = [PIECE_HEAD.pack(self._number, self._offset, length)]
        self._offset += length
        self.left -= length
        while length:
            part = self._buffers.popleft()
            if len(part) > length:
                self._buffers.appendleft(part[length:])
                part = part[:length]
            piece.append(part)
            length -= len(part)
        return piece

    def rest(self) -> list[Buffer]:
        """What is still to be cut."""
        return list(self._buffers)

    def replace(self, memory: Buffer) -> None:
        """Go on with a copy of ``rest``."""
        self._buffers = collections.deque([memoryview(memory).cast("B")]) if len(memory) else collections.deque()


class _Assembly:
    """A frame of which the head has come, and some pieces."""

    def __init__(self, frame: Frame, lengths: Sequence[int], recycler: Recycler) -> None:
        self._frame = frame
        self._recycler = recycler
        self._starts: list[int] = []
        self.nbytes = 0
        for length in lengths:
            self._starts.append(self.nbytes)
            self.nbytes += length
        self._lengths = lengths
        self._blocks: list[Buffer | None] = [None if length else bytearray() for length in lengths]
        self._seen = bytearray(-(-self.nbytes // GRAIN_BYTES))  # for each grain, whether a piece has it
        self.left = self.nbytes

    def claim(self, offset: int, length: int) -> list[memoryview]:
        """The memory for a piece. Raises ``ProtocolError`` if the piece is not as [Note: pieces on lanes] says."""
        end = offset + length
        first, last = offset // GRAIN_BYTES, -(-end // GRAIN_BYTES)
        whole = not offset % GRAIN_BYTES and (not end % GRAIN_BYTES or end == self.nbytes)
        if not whole or not length or end > self.nbytes or self._seen.find(1, first, last) >= 0:
            raise ProtocolError(
                f"malformed piece of a large frame: bytes {offset} to {end} of {self.nbytes}, or one that came before"
            )
        self._seen[first:last] = b"\1" * (last - first)
        return self._memory(offset, end)

    def _memory(self, offset: int, end: int) -> list[memoryview]:
        views = []
        index = _last_not_after(self._starts, offset)
        while offset < end:
            if size := self._lengths[index]:
                block = self._blocks[index]
                if block is None:
                    block = self._blocks[index] = self._recycler.allocate(size)
                start = self._starts[index]
                stop = min(end, start + size)
                views.append(memoryview(block).cast("B")[offset - start : stop - start])
                offset = stop
            index += 1
        return views

    def finish(self) -> Frame:
        """The frame, once no bytes are left."""
        self._frame.buffers = [block if block is not None else bytearray() for block in self._blocks]
        return self._frame


def _last_not_after(starts: Sequence[int], offset: int) -> int:
    """The index of the last start that is not after ``offset``."""
    low, high = 0, len(starts)
    while high - low > 1:
        middle = (low + high) // 2
        if starts[middle] <= offset:
            low = middle
        else:
            high = middle
    return low


class Inbox:
    """The large frames of one direction, at their receiver. At most one is unfinished: until it is complete, nothing
    more is read of the first connection than what may overtake it.

    Attributes:
        blocked: Nothing that follows on the first connection may be delivered before the unfinished frame is complete.
    """

    def __init__(self, recycler: Recycler) -> None:
        self._recycler = recycler
        self._number = 0  # of the last frame whose head counts
        self._assembly: _Assembly | None = None
        self._next: _Assembly | None = None  # a frame whose head came before the unfinished frame was complete
        self.blocked = False

    @property
    def unfinished(self) -> bool:
        """Whether pieces are awaited."""
        return self._assembly is not None

    def announce(self, frame: Frame, lengths: Sequence[int]) -> None:
        """The head of a frame has come: the frame without its buffers, and their lengths."""
        coming = _Assembly(frame, lengths, self._recycler)
        if not coming.nbytes:
            raise ProtocolError("malformed frame: nothing of it is on other connections")
        if self._assembly is None:
            self._begin(coming)
        else:
            self._next, self.blocked = coming, True

    def _begin(self, assembly: _Assembly) -> None:
        self._assembly = assembly
        self._number += 1

    def end(self, number: int) -> None:
        """What follows must not overtake the frame with this number."""
        if not 0 < number <= self._number:
            raise ProtocolError(f"the end of large frame {number} came, but the last head was that of {self._number}")
        self.blocked = self._assembly is not None and number == self._number

    def claim(self, number: int, offset: int, length: int) -> list[memoryview] | None:
        """The memory for a piece. None if the head of its frame has not come yet."""
        if number > self._number:
            return None
        if self._assembly is None or number < self._number:
            raise ProtocolError(f"malformed piece of large frame {number}, which is complete")
        return self._assembly.claim(offset, length)

    def filled(self, length: int) -> Frame | None:
        """The memory of a piece is full. Returns the frame if it is complete now."""
        assembly = self._assembly
        assert assembly is not None
        assembly.left -= length
        if assembly.left:
            return None
        self._assembly, self.blocked = None, False
        if self._next is not None:
            coming, self._next = self._next, None
            self._begin(coming)
        return assembly.finish()


class PieceReader:
    """Turns the bytes of one lane into parts of frames. Put bytes into ``space`` and pass their number to ``fed``.

    Attributes:
        space: Memory for the next bytes. Empty if the lane waits for the head of a frame.
    """

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._head = memoryview(bytearray(PIECE_HEAD.size))
        self._views: list[memoryview] = []  # the memory for the rest of a piece; the first one is ``space``
        self._length = 0  # of the piece; 0: its head is being read
        self.space = self._head

    @property
    def midway(self) -> bool:
        """Whether part of a piece has been read."""
        return self._length > 0 or len(self.space) < PIECE_HEAD.size

    @property
    def waiting(self) -> bool:
        """Whether the lane waits for the head of a frame. Call ``go_on`` when one has come."""
        return not self.space

    def fed(self, count: int) -> Frame | None:
        """Account for ``count`` bytes written to ``space``. Returns the frame that they have completed."""
        self.space = self.space[count:]
        if self.space:
            return None
        if not self._length:
            self.go_on()
            return None
        del self._views[0]
        if self._views:
            self.space = self._views[0]
            return None
        length, self._length, self.space = self._length, 0, self._head
        return self._inbox.filled(length)

    def go_on(self) -> None:
        """The head of a piece is complete: read its bytes, if the head of its frame has come."""
        number, offset, length = PIECE_HEAD.unpack(self._head)
        if length > MAX_PIECE_BYTES:
            raise ProtocolError(f"malformed piece of a large frame: {length} bytes")
        views = self._inbox.claim(number, offset, length)
        if views is not None:
            self._length, self._views, self.space = length, views, views[0]
