"""Frames arrive intact however the stream is split, and a frame with a wrong size makes the reader allocate nothing."""

from __future__ import annotations

import ctypes
import random
import struct

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from backhaul._wire.frame_reader import FrameReader
from backhaul._wire.frames import GAP, MAX_BUFFERS, Frame, control_frame, fill_gap
from backhaul._wire.memory import Buffer, Recycler
from backhaul.errors import ProtocolError

from .trip import LIMIT, feed, wire_of

HALF = FrameReader.SCRATCH // 2


class CountingRecycler(Recycler):
    """A recycler that records what was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def allocate(self, size: int) -> Buffer:
        self.sizes.append(size)
        return super().allocate(size)


def noise(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def header(
    *,
    magic: bytes = b"BkHl",
    version: int = 1,
    kind: int = 3,
    flags: int = 0,
    count: int = 0,
    body: int = 0,
    number: int = 0,
    payload: int = 0,
) -> bytes:
    """The header as docs/protocol.md describes it."""
    return struct.pack("<4sBBHIIQQ", magic, version, kind, flags, count, body, number, payload)


def content(frame: Frame) -> tuple[int, int, bytes, list[bytes]]:
    return frame.kind, frame.number, bytes(frame.body), [bytes(buffer) for buffer in frame.buffers]


small_blobs = st.binary(max_size=100)
blobs = st.one_of(
    small_blobs,
    st.integers(1000, HALF).map(noise),
    st.sampled_from([HALF - 33, HALF - 1, HALF, HALF + 1, 2 * HALF - 1, 2 * HALF, 2 * HALF + 1, 200_000]).map(noise),
)


def frames_of(blobs: st.SearchStrategy[bytes]) -> st.SearchStrategy[Frame]:
    return st.builds(Frame, st.integers(0, 255), st.integers(0, (1 << 64) - 1), blobs, st.lists(blobs, max_size=4))


frames, small_frames = frames_of(blobs), frames_of(small_blobs)


def test_the_wire_form_is_the_documented_one() -> None:
    frame = Frame(7, 0x0102030405060708, b"body", [b"first", b"", b"second"])
    expected = (
        b"BkHl\x01\x07\x00\x00"
        b"\x03\x00\x00\x00"
        b"\x04\x00\x00\x00"
        b"\x08\x07\x06\x05\x04\x03\x02\x01"
        b"\x0b\x00\x00\x00\x00\x00\x00\x00"
        b"\x05\x00\x00\x00\x00\x00\x00\x00"
        b"\x00\x00\x00\x00\x00\x00\x00\x00"
        b"\x06\x00\x00\x00\x00\x00\x00\x00"
        b"body"
        b"first"
        b"second"
    )
    assert wire_of(frame) == expected
    assert frame.nbytes == len(expected)


# Frames in pieces.

MIB = 1 << 20


def in_pieces(frame: Frame, fillings: list[list[Frame]]) -> bytes:
    """The frame as docs/protocol.md describes it, with these frames in its gaps."""
    lengths = [len(buffer) for buffer in frame.buffers]
    payload = b"".join(bytes(buffer) for buffer in frame.buffers)
    wire = header(
        kind=frame.kind, flags=4, count=len(lengths), body=len(frame.body), number=frame.number, payload=len(payload)
    )
    wire += struct.pack(f"<{len(lengths)}Q", *lengths) + bytes(frame.body)
    for index, start in enumerate(range(0, len(payload), MIB)):
        if start:
            gap = wire_of(*(fillings[index - 1] if index <= len(fillings) else ()))
            wire += struct.pack("<I", len(gap)) + gap
        wire += payload[start : start + MIB]
    return wire


LARGE = [
    [noise(3 * MIB + 5)],
    [noise(MIB), noise(MIB)],
    [noise(MIB + 1)],
    [b"", noise(MIB - 1), b"", noise(1), noise(1), b""],
    [noise(300_000 + size) for size in range(9)],
    [noise(100), noise(2 * MIB), noise(100)],
]


@pytest.mark.parametrize("buffers", LARGE, ids=lambda buffers: str(sum(map(len, buffers))))
def test_a_large_payload_is_written_in_pieces(buffers: list[bytes]) -> None:
    frame = Frame(7, 5, b"body", buffers)
    assert wire_of(frame) == in_pieces(frame, [])
    parts = frame.parts()
    assert sum(part is GAP for part in parts) == (sum(map(len, buffers)) - 1) // MIB


def test_a_payload_of_one_piece_has_no_gap() -> None:
    assert wire_of(Frame(3, 1, b"", [noise(MIB)])) == header(count=1, number=1, payload=MIB) + struct.pack(
        "<Q", MIB
    ) + noise(MIB)


@given(
    st.sampled_from(LARGE),
    st.lists(st.lists(small_frames, max_size=3), max_size=4),
    blobs,
    st.lists(st.sampled_from([1, 3, 4, 5, 1000, 65_000, MIB, MIB + 1, 2 * MIB]), min_size=1, max_size=4),
)
@settings(max_examples=40)
@example(LARGE[0], [[Frame(3, 2, noise((1 << 16) - 32))], [Frame(3, 3), Frame(3, 4)]], b"", [2 * MIB])
def test_frames_in_gaps_come_before_the_large_frame(
    buffers: list[bytes], fillings: list[list[Frame]], body: bytes, sizes: list[int]
) -> None:
    if min(sizes) < 1000:
        sizes = [*sizes, MIB]
    large, last = Frame(9, 1 << 40, body, buffers), Frame(3, 77, b"last", [b"of all"])
    fillings = fillings[: (sum(map(len, buffers)) - 1) // MIB]
    reader = FrameReader(LIMIT)
    received = feed(reader, in_pieces(large, fillings) + wire_of(last), sizes)
    expected = [frame for filling in fillings for frame in filling]
    assert list(map(content, received)) == list(map(content, [*expected, large, last]))
    assert not reader.midway


@given(st.lists(small_frames, max_size=4))
@settings(max_examples=20)
def test_a_writer_fills_gaps(frames: list[Frame]) -> None:
    gap = b"".join(bytes(part) for part in fill_gap([wire_of(frame) for frame in frames]))
    assert gap == struct.pack("<I", len(wire_of(*frames))) + wire_of(*frames)


def test_frames_in_a_gap_are_there_before_the_rest_of_the_large_frame() -> None:
    wire = in_pieces(Frame(3, 1, b"", [noise(2 * MIB)]), [[Frame(3, 2, b"small")]])
    reader = FrameReader(LIMIT)
    assert [frame.number for frame in feed(reader, wire[:-MIB])] == [2]
    assert reader.midway
    assert [frame.number for frame in feed(reader, wire[-MIB:])] == [1]


class SlotOfXs:
    """Slots of a channel: one, which contains as many x as wanted."""

    def __init__(self) -> None:
        self.controls: list[int] = []

    def resolve(self, place: int, size: int) -> Buffer:
        assert place == 5
        return b"x" * size

    def control(self, kind: int, number: int, body: bytes) -> None:
        self.controls.append(number)


def test_a_frame_in_pieces_may_have_slots_and_gaps_may_have_control_frames() -> None:
    slots = SlotOfXs()
    large = Frame(3, 1, b"body", [b"x" * 3 * MIB, noise(MIB + 1), b"x" * 10, noise(7)])
    small = Frame(3, 2, b"", [b"x" * 100])
    parts = large.parts([5, 0, 5, 0])
    assert [len(part) for part in parts[1:]] == [MIB, 4, 1, 7]
    parts[2:3] = fill_gap([control_frame(3, 12), b"".join(small.parts([5]))])
    wire = b"".join(bytes(part) for part in parts)
    received = feed(FrameReader(LIMIT, slots=slots), wire)
    assert list(map(content, received)) == list(map(content, [small, large]))
    assert slots.controls == [12]
    assert large.parts([5, 5, 5, 5])[1:] == []


@pytest.mark.parametrize(
    ("gap", "filling"),
    [
        ((1 << 16) + 1, b""),
        ((1 << 32) - 1, b""),
        (31, wire_of(Frame(3, 2))[:-1]),
        (33, wire_of(Frame(3, 2)) + b"B"),
        (40, wire_of(Frame(3, 2)) + b"nonsense"),
        (100, header(body=1000).ljust(100)),
        (100, header(count=1, payload=1 << 19).ljust(100)),
        (32, header(flags=4, count=1, payload=1 << 30)),
        (48, header(flags=4, count=1, payload=2 * MIB) + struct.pack("<Q", 2 * MIB) + bytes(8)),
    ],
)
def test_a_gap_without_whole_frames_is_refused(gap: int, filling: bytes) -> None:
    wire = in_pieces(Frame(3, 1, b"", [noise(2 * MIB)]), [])
    wire = wire[: -MIB - 4] + struct.pack("<I", gap) + filling
    recycler = CountingRecycler()
    with pytest.raises(ProtocolError):
        feed(FrameReader(LIMIT, recycler), wire)
    assert sum(recycler.sizes) <= 4 * MIB


@pytest.mark.parametrize(
    "bad",
    [
        header(flags=4),
        header(flags=4, count=1, payload=8) + struct.pack("<Q", 8),
        header(flags=4, count=1, payload=MIB) + struct.pack("<Q", MIB),
        header(flags=5, count=1, payload=2 * MIB),
        header(flags=6),
        header(flags=8),
    ],
)
def test_pieces_that_nobody_needs_are_refused(bad: bytes) -> None:
    recycler = CountingRecycler()
    with pytest.raises(ProtocolError):
        feed(FrameReader(LIMIT, recycler), bad)
    assert recycler.sizes == []


def test_the_wire_form_without_buffers_has_no_table() -> None:
    assert wire_of(Frame(3, 9, b"xyz")) == header(number=9, body=3) + b"xyz"


def test_buffers_are_written_uncopied() -> None:
    buffers = [bytearray(10_000), memoryview(bytearray(20))]
    written = Frame(3, 1, b"", buffers).parts()
    assert written[-2] is buffers[0]
    assert written[-1] is buffers[1]


def test_a_frame_with_small_buffers_is_one_piece() -> None:
    assert Frame(3, 1, b"body", [memoryview(b"small")]).parts() == [
        header(count=1, body=4, number=1, payload=5) + struct.pack("<Q", 5) + b"bodysmall"
    ]
    assert Frame(3, 1, b"body", [b"two", memoryview(b"small"), b""]).parts() == [
        header(count=3, body=4, number=1, payload=8) + struct.pack("<3Q", 3, 5, 0) + b"bodytwosmall"
    ]
    large = bytearray(1 << 16)
    head, written = Frame(3, 1, b"body", [large]).parts()
    assert written is large
    assert head == header(count=1, body=4, number=1, payload=1 << 16) + struct.pack("<Q", 1 << 16) + b"body"


def test_a_copied_frame_is_the_same_on_memory_of_its_own() -> None:
    source = [bytearray(noise(50)), bytearray(noise(200_000)), bytearray()]
    before = content(Frame(3, 4, b"body", source))
    copy = Frame(3, 4, b"body", source).copied(Recycler())
    for buffer in source:
        buffer[:] = bytes(len(buffer))
    assert content(copy) == before


def test_a_large_frame_is_copied_without_the_interpreters_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """``ctypes`` lets go of it."""
    move, moved = ctypes.memmove, []

    def count(target: int, source: int, size: int) -> None:
        moved.append(size)
        move(target, source, size)

    monkeypatch.setattr(ctypes, "memmove", count)
    sent = Frame(3, 4, b"body", [noise(1 << 20), memoryview(noise(1 << 20))[1:]])
    assert content(sent.copied(Recycler())) == content(sent)
    assert moved == [1 << 20, (1 << 20) - 1]


@given(st.lists(frames, max_size=4), st.lists(st.integers(1, 3 * HALF), min_size=1, max_size=8))
@example([Frame(1, 0, noise(2 * HALF - 32)), Frame(2, 0, b"next")], [2 * HALF])
@example([Frame(1, 0, noise(2 * HALF - 10))], [2 * HALF])
@example([Frame(1, 0, b"", [b""] * 3)], [1])
@example([Frame(1, 0, noise(40_000)), Frame(2, 0, noise(30_000))], [2 * HALF])
@example([Frame(1)], [32])
def test_any_split_gives_the_frames_back(sent: list[Frame], sizes: list[int]) -> None:
    received = feed(FrameReader(LIMIT), wire_of(*sent), sizes)
    assert [content(frame) for frame in received] == [content(frame) for frame in sent]


@given(st.lists(small_frames, min_size=1, max_size=6), st.integers(0, 300))
def test_whole_frames_are_read_as_frames_in_pieces_are(sent: list[Frame], lost: int) -> None:
    wire = wire_of(*sent)[: -lost or None]
    whole, split = FrameReader(LIMIT), FrameReader(LIMIT)
    at_once, by_and_by = feed(whole, wire), feed(split, wire, [1])
    assert list(map(content, at_once)) == list(map(content, by_and_by))
    assert whole.midway is split.midway
    assert all(type(buffer) is bytearray for frame in at_once for buffer in (frame.body, *frame.buffers))


@given(
    small_frames,
    st.lists(st.tuples(st.integers(0, 79), st.sampled_from([0, 1, 2, 3, 8, 127, 255])), min_size=1, max_size=3),
    st.integers(100, 1000),
)
@settings(max_examples=300)
def test_a_damaged_frame_is_refused_whole_as_it_is_in_pieces(
    frame: Frame, damages: list[tuple[int, int]], limit: int
) -> None:
    wire = bytearray(wire_of(Frame(3, 1, b"before"), frame, Frame(3, 2, b"behind", [b"it"])))
    for place, value in damages:
        wire[min(38 + place, len(wire) - 1)] = value
    outcomes = []
    for sizes in ([1 << 20], [1]):
        recycler = CountingRecycler()
        reader = FrameReader(limit, recycler)
        try:
            outcome: object = (list(map(content, feed(reader, bytes(wire), sizes))), reader.midway)
        except ProtocolError as error:
            outcome = str(error)
        outcomes.append(outcome)
        assert not any(size > limit for size in recycler.sizes)
    assert outcomes[0] == outcomes[1]


def test_a_frame_at_the_very_end_of_the_scratch() -> None:
    filler = Frame(3, 1, bytes(HALF - 32))
    for last in (Frame(3, 2, noise(HALF - 32)), Frame(3, 2, noise(HALF - 64)), Frame(3, 2, noise(HALF - 72))):
        sent = [filler, last, Frame(3, 3), Frame(3, 4, b"", [b"next"])]
        received = feed(FrameReader(LIMIT), wire_of(*sent), [2 * HALF])
        assert [content(frame) for frame in received] == [content(frame) for frame in sent]


@given(st.lists(small_frames, min_size=1, max_size=4))
@settings(max_examples=50)
def test_a_byte_at_a_time(sent: list[Frame]) -> None:
    received = feed(FrameReader(LIMIT), wire_of(*sent), [1])
    assert [content(frame) for frame in received] == [content(frame) for frame in sent]


@given(st.integers(1, 2000), st.integers(0, 100), st.integers(1, 5000))
@settings(max_examples=20)
def test_many_small_buffers(count: int, size: int, chunk: int) -> None:
    sent = Frame(3, 1, b"body", [bytes([n % 256]) * size for n in range(count)])
    (received,) = feed(FrameReader(LIMIT), wire_of(sent), [chunk])
    assert content(received) == content(sent)


def test_what_was_read_can_be_written_and_later_frames_do_not_touch_it() -> None:
    reader = FrameReader(LIMIT)
    (first,) = feed(reader, wire_of(Frame(3, 1, noise(40_000), [noise(300), noise(150_000)])))
    for buffer in first.buffers:
        memoryview(buffer).cast("B")[:3] = b"abc"
    before = content(first)
    feed(reader, wire_of(*(Frame(3, 2, b"\xff" * 40_000, [b"\xff" * 300, b"\xff" * 150_000]) for _ in range(3))))
    assert content(first) == before


def test_large_buffers_come_from_the_recycler() -> None:
    recycler = CountingRecycler()
    (frame,) = feed(FrameReader(LIMIT, recycler), wire_of(Frame(3, 1, b"", [noise(1 << 20)])))
    assert recycler.sizes == [1 << 20]
    assert bytes(frame.buffers[0]) == noise(1 << 20)


@given(st.lists(small_frames, min_size=1, max_size=3))
@settings(max_examples=30)
def test_midway_between_the_first_and_the_last_byte_of_a_frame(sent: list[Frame]) -> None:
    reader = FrameReader(LIMIT)
    assert not reader.midway
    for frame in sent:
        wire = wire_of(frame)
        for index in range(len(wire)):
            complete = feed(reader, wire[index : index + 1])
            last = index == len(wire) - 1
            assert reader.midway is not last
            assert len(complete) == last


def test_midway_inside_a_large_buffer() -> None:
    reader = FrameReader(LIMIT)
    wire = wire_of(Frame(3, 1, b"", [noise(1 << 20)]))
    assert feed(reader, wire[:-1]) == []
    assert reader.midway
    assert len(feed(reader, wire[-1:])) == 1
    assert not reader.midway


@pytest.mark.parametrize(
    "bad",
    [
        header(magic=b"HTTP"),
        header(version=0),
        header(version=2),
        header(flags=1),
        header(flags=0x8000),
        header(payload=1),
        header(count=MAX_BUFFERS + 1),
        header(count=(1 << 32) - 1, payload=5),
    ],
    ids=["magic", "old", "new", "flag", "high flag", "payload without buffers", "too many", "far too many"],
)
def test_a_bad_header_is_refused_as_soon_as_it_is_there(bad: bytes) -> None:
    recycler = CountingRecycler()
    reader = FrameReader(1 << 62, recycler)
    assert feed(reader, bad[:-1]) == []
    with pytest.raises(ProtocolError):
        feed(reader, bad[-1:])
    assert recycler.sizes == []


@pytest.mark.parametrize(
    "claim",
    [
        {"body": (1 << 32) - 1},
        {"count": 1, "payload": 1 << 40},
        {"count": 1, "payload": (1 << 64) - 1},
        {"count": MAX_BUFFERS},
        {"body": (1 << 16) - 32 + 1},
        {"count": 1, "payload": (1 << 16) - 32 - 8 + 1},
        {"count": 1, "body": 100, "payload": (1 << 16) - 32 - 8 - 100 + 1},
    ],
)
def test_a_claim_beyond_the_limit_allocates_nothing(claim: dict[str, int]) -> None:
    recycler = CountingRecycler()
    with pytest.raises(ProtocolError):
        feed(FrameReader(1 << 16, recycler), header(**claim))
    assert recycler.sizes == []


@pytest.mark.parametrize("size", [0, 40_000])
def test_the_number_of_buffers_may_be_limited(size: int) -> None:
    wire = wire_of(Frame(3, 1, bytes(size), [b""] * 9))
    assert len(feed(FrameReader(LIMIT, buffers=9), wire)) == 1
    recycler = CountingRecycler()
    with pytest.raises(ProtocolError, match=r"limits\.tensors"):
        feed(FrameReader(LIMIT, recycler, buffers=8), wire)
    assert recycler.sizes == []


@pytest.mark.parametrize(
    "frame", [Frame(3, 1, noise(1000 - 32)), Frame(3, 1, b"", [noise(460), noise(492)]), Frame(3, 1, b"", [b""] * 121)]
)
def test_the_limit_itself_is_allowed(frame: Frame) -> None:
    assert frame.nbytes == 1000
    (received,) = feed(FrameReader(1000), wire_of(frame))
    assert content(received) == content(frame)
    with pytest.raises(ProtocolError):
        feed(FrameReader(999), wire_of(frame))


@pytest.mark.parametrize(
    ("lengths", "payload"),
    [
        ([5], 4),
        ([5], 6),
        ([1 << 40], 8),
        ([3, 3], 7),
        ([(1 << 64) - 1, 11], 10),  # the sum is right modulo 2**64
        ([0, 0], 1),
    ],
)
def test_a_table_that_does_not_add_up_is_refused_before_the_buffers(lengths: list[int], payload: int) -> None:
    recycler = CountingRecycler()
    wire = header(count=len(lengths), payload=payload) + struct.pack(f"<{len(lengths)}Q", *lengths)
    with pytest.raises(ProtocolError):
        feed(FrameReader(LIMIT, recycler), wire)
    assert recycler.sizes == []


@given(st.binary(min_size=32, max_size=200), st.integers(1, 200))
def test_garbage_is_refused(garbage: bytes, chunk: int) -> None:
    if garbage.startswith(b"BkHl"):
        garbage = b"!" + garbage[1:]
    with pytest.raises(ProtocolError):
        feed(FrameReader(LIMIT), garbage, [chunk])
