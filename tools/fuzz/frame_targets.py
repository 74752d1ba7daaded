"""Fuzz targets that read frames."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from backhaul._transport.shm import host_memory
from backhaul._transport.shm.slots import Budget
from backhaul._wire.codec import encode
from backhaul._wire.frame_reader import FrameReader
from backhaul._wire.frames import PIECE_BYTES, Frame, control_frame, fill_gap
from backhaul._wire.lane_pieces import GRAIN_BYTES, Cutter, Inbox, PieceReader
from backhaul._wire.memory import Buffer
from backhaul._wire.messages import Hello, Kind, Request, pack
from backhaul.errors import ProtocolError
from tools.fuzz.target import LIMIT_BYTES, FindingError, LimitedRecycler, Target, sample_values


def sample_frames() -> list[Frame]:
    """Frames of all kinds of values."""
    found = [
        Frame(Kind.HELLO, 0, pack(Hello("attacked", "2", b"nobody"))),
        Frame(Kind.REPLY, 12, b"nothing", [bytes(300), b"", bytes(70)]),
        Frame(Kind.REPLY, 12, b"", [bytes(40_000)]),
        Frame(Kind.READY),
    ]
    for values in sample_values():
        encoded = encode(values, names=["value"] * len(values))
        body = pack(Request("operator:add", encoded.payload))
        found.append(Frame(Kind.REQUEST, 7, body, [bytes(buffer) for buffer in encoded.buffers]))
    return found


class FrameTarget(Target):
    """``FrameReader``. The bytes come in pieces, whose size the last byte of the input determines."""

    name = "frames"

    def seeds(self) -> list[bytes]:
        wires = [b"".join(bytes(part) for part in frame.parts()) for frame in sample_frames()]
        return [*wires, b"".join(wires[:4]), b"".join(wires[3:8])]

    def take(self, data: bytes) -> object:
        return self._read(FrameReader(LIMIT_BYTES, LimitedRecycler()), data)

    def _read(self, reader: FrameReader, data: bytes, *, before: int = 0) -> int:
        piece = (len(data), 1 << 16, 33, 7)[(data[-1] if data else 0) & 3] or 1
        count, held = 0, 0
        for start in range(0, len(data), piece):
            rest = data[start : start + piece]
            while rest:
                space = reader.space
                if not space:
                    raise FindingError("the reader offers no memory for more bytes")
                fits = min(len(space), len(rest))
                space[:fits] = rest[:fits]
                for frame in reader.fed(fits):
                    count += 1
                    held += len(frame.body) + sum(map(len, frame.buffers))
                rest = rest[fits:]
        if held > before + len(data):
            raise FindingError(f"an input of {before + len(data)} bytes became frames of {held} bytes")
        return count


class GapTarget(FrameTarget):
    """The gap between two pieces of a large frame, and what follows."""

    name = "gaps"
    _LAST_BYTES = 100  # of the large frame, after the gap

    def seeds(self) -> list[bytes]:
        wires = [b"".join(bytes(part) for part in frame.parts()) for frame in sample_frames()]
        fillings = [[], wires[:1], wires[:2], wires[2:3], wires[3:6]]
        last = bytes(self._LAST_BYTES)
        return [b"".join([*fill_gap(filling), last, *wires[3:4]]) for filling in fillings]

    def take(self, data: bytes) -> object:
        recycler = LimitedRecycler()
        recycler.limit_bytes = 2 * LIMIT_BYTES
        reader = FrameReader(2 * LIMIT_BYTES, recycler)
        head, *_ = Frame(Kind.REPLY, 12, b"body", [bytes(PIECE_BYTES + self._LAST_BYTES)]).parts()
        reader.space[: len(head)] = head
        reader.fed(len(head))
        left = PIECE_BYTES
        while left:  # the content does not matter
            count = min(len(reader.space), left)
            reader.fed(count)
            left -= count
        return self._read(reader, data, before=len(head) + PIECE_BYTES)


class _FakeSlots:
    """The slots of a channel without a peer. Places 1 to 8 exist."""

    def __init__(self) -> None:
        self._borrower = host_memory.HostBorrower(0)
        self._lender = host_memory.HostLender(Budget(0))

    def resolve(self, place: int, size: int) -> Buffer:
        if not 0 < place <= 8 or size > 4096:
            return self._borrower.borrow(place, size)
        return bytearray(size)

    def control(self, kind: int, number: int, body: bytes) -> None:
        if kind == host_memory.OFFER:
            self._borrower.offered(number, body)
        elif kind == host_memory.RETIRE:
            self._borrower.retired(number)
        elif kind == host_memory.ANSWER:
            self._lender.answered(number, body)
        else:
            raise ProtocolError(f"unexpected control frame of kind {kind}")


class _LimitedSlotRecycler(LimitedRecycler):
    """Allows twice the memory, because the table of a frame with slots is twice as long as that of one without."""

    limit_bytes = 2 * LIMIT_BYTES


class SlotTarget(FrameTarget):
    """Frames with slots, and control frames."""

    name = "slots"

    def seeds(self) -> list[bytes]:
        offer = struct.pack("<iIQ16s", 5, 2, 4096, b"cookie")
        controls = [
            control_frame(host_memory.OFFER, 1, offer),
            control_frame(host_memory.ANSWER, 1, b"\1"),
            control_frame(host_memory.RETIRE, 1),
        ]
        slotted = Frame(Kind.REPLY, 3, b"body", [bytes(100), bytes(10), bytes(200)]).parts([1, 0, 2])
        wire = b"".join(bytes(part) for part in slotted)
        return [*controls, b"".join(controls), wire, controls[0] + wire]

    def take(self, data: bytes) -> object:
        reader = FrameReader(LIMIT_BYTES, _LimitedSlotRecycler(), _FakeSlots())
        try:
            return self._read_slotted(reader, data)
        finally:
            reader.close()

    def _read_slotted(self, reader: FrameReader, data: bytes) -> int:
        space, count = reader.space, 0
        fits = min(len(space), len(data))
        space[:fits] = data[:fits]
        for frame in reader.fed(fits):
            count += 1 + len(frame.buffers)
        return count


def _pieces_of(cutter: Cutter, most: int) -> Iterator[Buffer]:
    while cutter.left:
        yield from cutter.cut(most)


class LaneTarget(Target):
    """A lane with pieces of two frames, of which the heads have come."""

    name = "lanes"
    _SIZES = (3 * GRAIN_BYTES, 0, 100)

    def seeds(self) -> list[bytes]:
        wires = []
        for most in (GRAIN_BYTES, 4 * GRAIN_BYTES):
            cutters = [Cutter(number, [bytes(size) for size in self._SIZES]) for number in (1, 2)]
            wires.append(b"".join(bytes(part) for each in cutters for part in _pieces_of(each, most)))
        return wires

    def take(self, data: bytes) -> object:
        inbox = Inbox(LimitedRecycler())
        inbox.announce(Frame(Kind.REPLY), self._SIZES)
        inbox.announce(Frame(Kind.REPLY), self._SIZES)
        reader, rest, held = PieceReader(inbox), data, 0
        while rest and not reader.waiting:
            fits = min(len(reader.space), len(rest))
            reader.space[:fits] = rest[:fits]
            frame = reader.fed(fits)
            held += 0 if frame is None else sum(map(len, frame.buffers))
            rest = rest[fits:]
        if held > len(data):
            raise FindingError(f"an input of {len(data)} bytes became frames of {held} bytes")
        return held
