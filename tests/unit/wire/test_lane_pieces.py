"""Pieces of large frames: any interleaving of them gives the frames back, and what no sender cuts is refused."""

from __future__ import annotations

import collections
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul._wire.frames import Frame
from backhaul._wire.lane_pieces import GRAIN_BYTES, MAX_PIECE_BYTES, PIECE_HEAD, Cutter, Inbox, PieceReader, PieceSize
from backhaul._wire.memory import Recycler
from backhaul.errors import ProtocolError


def frame_of(sizes: list[int], seed: int) -> Frame:
    draw = random.Random(seed)
    return Frame(3, seed, b"body", [draw.randbytes(size) for size in sizes])


def announce(inbox: Inbox, frame: Frame) -> None:
    inbox.announce(Frame(frame.kind, frame.number, frame.body), [len(buffer) for buffer in frame.buffers])


def read(reader: PieceReader, data: bytearray, most: int) -> Frame | None:
    """What a lane makes of its next bytes, which are taken away."""
    count = min(most, len(reader.space), len(data))
    reader.space[:count] = data[:count]
    del data[:count]
    return reader.fed(count) if count else None


def same(came: Frame, sent: Frame) -> bool:
    return (came.kind, came.number, bytes(came.body), [bytes(each) for each in came.buffers]) == (
        sent.kind,
        sent.number,
        bytes(sent.body),
        [bytes(each) for each in sent.buffers],
    )


SIZES = st.lists(
    st.one_of(st.integers(0, 50), st.integers(GRAIN_BYTES - 1, GRAIN_BYTES + 1), st.integers(0, 5 * GRAIN_BYTES)),
    min_size=1,
    max_size=6,
).filter(any)


class Receiver:
    """The receiving end of a channel with lanes, fed step by step."""

    def __init__(self, lanes: int) -> None:
        self.inbox = Inbox(Recycler())
        self.readers = [PieceReader(self.inbox) for _ in range(lanes)]
        self.wires = [bytearray() for _ in range(lanes)]  # what the connections hold
        self.came: list[Frame] = []

    def read_lane(self, index: int, most: int) -> None:
        frame = read(self.readers[index], self.wires[index], most)
        if frame is not None:
            self.came.append(frame)
            self.resume()

    def resume(self) -> None:
        for reader in self.readers:
            if reader.waiting:
                reader.go_on()

    def announce(self, frame: Frame) -> None:
        announce(self.inbox, frame)
        self.resume()


@given(st.lists(SIZES, min_size=1, max_size=4), st.integers(1, 5), st.randoms(use_true_random=False))
def test_any_interleaving_gives_the_frames_back(shapes: list[list[int]], lanes: int, draw: random.Random) -> None:
    """Lanes take pieces of any size, and are read in any order. The first connection may be late, and an END too."""
    sent = [frame_of(sizes, number) for number, sizes in enumerate(shapes, 1)]
    first = [("head", frame) for frame in sent]
    for frame in sent:
        first.insert(draw.randint(first.index(("head", frame)) + 1, len(first)), ("end", frame))
    waiting = collections.deque(first)
    cutters = collections.deque(Cutter(frame.number, frame.buffers) for frame in sent)
    receiver = Receiver(lanes)
    while len(receiver.came) < len(sent) or waiting:
        step = draw.choice(("cut", "first", "read", "read"))
        if step == "cut" and cutters:
            piece = cutters[0].cut(draw.choice((1, 2, 3, 64)) * GRAIN_BYTES)
            draw.choice(receiver.wires).extend(b"".join(piece))
            if not cutters[0].left:
                cutters.popleft()
        elif step == "read":
            receiver.read_lane(draw.randrange(lanes), draw.choice((1, 20, 5000, 1 << 20)))
        elif step == "first" and waiting and not receiver.inbox.blocked:
            what, frame = waiting.popleft()
            if what == "head":
                receiver.announce(frame)
            else:
                receiver.inbox.end(frame.number)
                assert receiver.inbox.blocked == (frame.number > len(receiver.came))
    assert all(same(*pair) for pair in zip(receiver.came, sent, strict=True))
    assert not receiver.inbox.unfinished
    assert not any(reader.midway for reader in receiver.readers)


@given(st.integers(0, 6), st.integers(1, 6))
def test_what_is_cut_covers_the_payload_once(whole: int, most: int) -> None:
    frame = frame_of([whole * GRAIN_BYTES, 7], 1)
    cutter, offset = Cutter(9, frame.buffers), 0
    while cutter.left:
        head, *parts = cutter.cut(most * GRAIN_BYTES)
        length = sum(map(len, parts))
        assert PIECE_HEAD.unpack(head) == (9, offset, length)
        assert 0 < length <= most * GRAIN_BYTES
        offset += length
    assert offset == whole * GRAIN_BYTES + 7


def test_a_copy_of_the_rest_takes_its_place() -> None:
    (buffer,) = frame_of([3 * GRAIN_BYTES], 1).buffers
    cutter = Cutter(1, [buffer])
    cutter.cut(GRAIN_BYTES)
    cutter.replace(b"".join(cutter.rest()))
    head, *parts = cutter.cut(MAX_PIECE_BYTES)
    assert PIECE_HEAD.unpack(head) == (1, GRAIN_BYTES, 2 * GRAIN_BYTES)
    assert b"".join(parts) == bytes(buffer)[GRAIN_BYTES:]


G = GRAIN_BYTES


@pytest.mark.parametrize(
    ("number", "offset", "length"),
    [
        (1, 1, G),  # not where a grain begins
        (1, 0, 5),  # ends inside a grain, but not at the end of the frame
        (1, 0, 0),
        (1, 4 * G, G),  # beyond the frame
        (1, 3 * G, 2 * G),
        (1, (1 << 64) - G, G),
        (1, 0, MAX_PIECE_BYTES + G),
        (1, G, G),  # came before
        (1, 0, 2 * G),
        (0, 0, G),
    ],
)
def test_pieces_that_no_sender_cuts(number: int, offset: int, length: int) -> None:
    receiver = Receiver(1)
    receiver.announce(frame_of([3 * G, G - 9], 1))
    assert receiver.inbox.claim(1, G, G) is not None
    receiver.wires[0] += PIECE_HEAD.pack(number, offset, length)
    with pytest.raises(ProtocolError):
        receiver.read_lane(0, 1 << 20)


def test_a_piece_of_a_frame_that_is_complete() -> None:
    receiver = Receiver(1)
    receiver.announce(frame_of([5], 1))
    receiver.wires[0] += PIECE_HEAD.pack(1, 0, 5) + b"hello" + PIECE_HEAD.pack(1, 0, 5)
    for _ in range(2):
        receiver.read_lane(0, 1 << 20)
    assert [bytes(frame.buffers[0]) for frame in receiver.came] == [b"hello"]
    with pytest.raises(ProtocolError):
        receiver.read_lane(0, 1 << 20)


@pytest.mark.parametrize("number", [0, 2, 1 << 63])
def test_the_end_of_a_frame_without_a_head(number: int) -> None:
    receiver = Receiver(1)
    receiver.announce(frame_of([5], 1))
    with pytest.raises(ProtocolError):
        receiver.inbox.end(number)


def test_a_head_without_bytes() -> None:
    with pytest.raises(ProtocolError):
        announce(Inbox(Recycler()), Frame(3, 1, b"", [b"", b""]))


def test_a_peer_that_announces_much_and_sends_nothing_gets_no_memory() -> None:
    given: list[int] = []

    class Counting(Recycler):
        def allocate(self, size: int) -> bytearray:
            given.append(size)
            return bytearray(size)

    inbox = Inbox(Counting())
    inbox.announce(Frame(3), [1 << 20] * 1000)
    assert given == []
    assert inbox.claim(1, 1 << 20, GRAIN_BYTES) is not None
    assert given == [1 << 20]


def test_the_size_of_pieces_follows_what_a_connection_takes() -> None:
    size = PieceSize()
    for _ in range(20):
        size.took(size.nbytes, size.nbytes)
    assert size.nbytes == MAX_PIECE_BYTES
    size.took(100_000, size.nbytes)
    assert size.nbytes == 100_000 // GRAIN_BYTES * GRAIN_BYTES
    size.took(0, size.nbytes)
    assert size.nbytes == GRAIN_BYTES
