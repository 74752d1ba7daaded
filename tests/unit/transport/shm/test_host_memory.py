"""Both ends of shared host memory in one process: buffers in, buffers out, and what a peer must not do."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import mmap
import os
import random
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backhaul._transport.shm import host_memory, leases
from backhaul._transport.shm.host_memory import THRESHOLD, HostBorrower, HostLender
from backhaul._transport.shm.slots import Budget
from backhaul._wire.frame_reader import FrameReader
from backhaul._wire.frames import HEADER, MAGIC, VERSION, Frame, control_frame
from backhaul.errors import ProtocolError
from tests.unit.wire.trip import feed

MIB = 1 << 20
LENGTHS = [0, 1, 100, THRESHOLD, THRESHOLD + 1, 1 << 63]
PLACES = [0, 1, 1 << 32, 1 << 32 | 1, 1 << 32 | 4, 2 << 32, (1 << 64) - 1]


class Line:
    """A lender and a borrower that exchange their control frames."""

    def __init__(self, limit: int = 256 * MIB, process: int | None = None, frame_limit: int = 1 << 30) -> None:
        self.budget = Budget(limit)
        self.lender = HostLender(self.budget)
        self.borrower = HostBorrower(os.getpid() if process is None else process)
        self.reader = FrameReader(frame_limit, slots=self)
        self.back = FrameReader(1 << 30, slots=self)
        self.told: list[int] = []

    def resolve(self, place: int, size: int) -> Any:
        return self.borrower.borrow(place, size)

    def control(self, kind: int, number: int, body: bytes) -> None:
        self.told.append(kind)
        if kind == host_memory.OFFER:
            feed(self.back, self.borrower.offered(number, body))
        elif kind == host_memory.ANSWER:
            self.lender.answered(number, body)
        else:
            self.borrower.retired(number)

    def carry(self, *buffers: Any) -> list[Any]:
        """Send a frame with these buffers; return what arrives."""
        places = self.lender.lend(buffers)
        wire = b"".join(bytes(part) for part in Frame(3, 7, b"body", buffers).parts(places))
        self.tell()
        (frame,) = feed(self.reader, wire)
        assert (frame.kind, frame.number, bytes(frame.body)) == (3, 7, b"body")
        return list(frame.buffers)

    def tell(self) -> None:
        while self.lender.news:
            assert feed(self.reader, self.lender.news.popleft()) == []

    def warm(self, size: int) -> None:
        """Send often enough for slots of that size."""
        for _ in range(3):
            self.carry(bytes(size))
        assert self.lender.lent == 0

    def close(self) -> None:
        self.lender.close()
        self.borrower.close()


@pytest.fixture
def line() -> Iterator[Line]:
    made = Line()
    yield made
    made.close()
    assert made.budget.used == 0


def noise(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def test_large_buffers_lie_in_slots_and_small_ones_do_not(line: Line) -> None:
    line.warm(THRESHOLD + 1)
    before = line.lender.bytes_lent
    sent = [noise(THRESHOLD - 1, 1), noise(THRESHOLD, 2), b"", noise(THRESHOLD + 1, 3), b"x"]
    came = line.carry(*sent)
    assert [bytes(buffer) for buffer in came] == sent
    assert line.lender.lent == 2
    assert line.lender.bytes_lent - before == 2 * THRESHOLD + 1


def test_a_slot_comes_back_when_the_last_tensor_on_it_dies(line: Line) -> None:
    line.warm(MIB)
    (buffer,) = line.carry(noise(MIB))
    tensor = torch.frombuffer(buffer, dtype=torch.float32)
    view = tensor[5:].view(torch.int32)
    other = memoryview(buffer)[3:]
    del buffer, tensor
    assert line.lender.lent == 1
    assert bytes(other) == noise(MIB)[3:]
    del view
    assert line.lender.lent == 1
    del other
    gc.collect()
    assert line.lender.lent == 0


def test_what_came_is_writable_aligned_and_nobody_elses(line: Line) -> None:
    line.warm(MIB)
    source = bytearray(noise(MIB))
    (first,) = line.carry(source)
    (second,) = line.carry(source)
    source[:] = bytes(MIB)
    first[:] = noise(MIB, 1)
    assert bytes(second) == noise(MIB)
    assert ctypes.addressof(first) % 64 == 0
    del first
    (third,) = line.carry(noise(MIB, 2))
    assert bytes(third) == noise(MIB, 2)
    assert bytes(second) == noise(MIB)


def as_ctypes(content: bytes) -> Any:
    return (ctypes.c_ubyte * len(content)).from_buffer_copy(content)


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview, as_ctypes])
@pytest.mark.parametrize("size", [THRESHOLD, 3 * MIB + 1])
def test_every_kind_of_memory_can_be_sent(line: Line, make: Any, size: int) -> None:
    line.warm(size)
    content = noise(size)
    (came,) = line.carry(make(content))
    assert line.lender.lent == 1
    assert bytes(came) == content


def test_slots_come_back_from_any_thread_in_any_order(line: Line) -> None:
    line.warm(THRESHOLD)
    held = []
    for seed in range(300):
        held += line.carry(noise(THRESHOLD, seed))
    assert [bytes(buffer) for buffer in held] == [noise(THRESHOLD, seed) for seed in range(300)]
    assert line.lender.lent > 200
    random.Random(0).shuffle(held)
    shares = [held[n::3] for n in range(3)]
    held.clear()
    threads = [threading.Thread(target=share.clear) for share in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert line.lender.lent == 0


def test_beyond_the_ceiling_buffers_go_inline() -> None:
    line = Line(limit=10 * MIB)
    held = []
    for seed in range(20):
        held += line.carry(noise(MIB, seed))
    assert 0 < line.lender.lent < 10
    assert line.budget.used <= 10 * MIB
    assert [bytes(buffer) for buffer in held] == [noise(MIB, seed) for seed in range(20)]
    del held
    assert line.lender.lent == 0
    line.close()


def test_what_came_outlives_its_channel(line: Line) -> None:
    line.warm(MIB)
    (buffer,) = line.carry(noise(MIB))
    line.close()
    gc.collect()
    assert bytes(buffer) == noise(MIB)
    del buffer  # gives back a slot that nobody wants any more


def test_no_descriptor_is_kept(line: Line) -> None:
    before = set(os.listdir("/proc/self/fd"))
    line.warm(MIB)
    line.warm(THRESHOLD)
    assert set(os.listdir("/proc/self/fd")) == before
    line.lender.lend([bytes(8 * MIB)])
    line.lender.lend([bytes(8 * MIB)])  # offered, and never answered
    assert len(os.listdir("/proc/self/fd")) > len(before)
    line.close()
    assert set(os.listdir("/proc/self/fd")) == before


def test_unused_segments_go_at_both_ends(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    line.warm(32 * MIB)
    (held,) = line.carry(noise(32 * MIB))
    monkeypatch.setattr("backhaul._transport.shm.slots._UNUSED_SECONDS", 0.0)
    assert line.lender.trim()
    assert line.lender.lent == 1
    del held
    assert not line.lender.trim()
    line.tell()
    assert line.told[-1] == host_memory.RETIRE
    assert line.budget.used == 0
    assert line.borrower._segments == {}
    line.warm(32 * MIB)
    assert line.budget.used


def test_a_receiver_that_cannot_map_is_left_alone(line: Line) -> None:
    line.borrower = HostBorrower(0)
    for seed in range(5):
        assert bytes(*line.carry(noise(MIB, seed))) == noise(MIB, seed)
    assert line.told == [host_memory.OFFER, host_memory.ANSWER]
    assert line.budget.used == 0


def test_frames_with_slots_keep_to_the_limit(line: Line) -> None:
    small = Line(frame_limit=2 * MIB)
    small.warm(2 * MIB - 32 - 8 - 4)
    assert small.lender.bytes_lent
    with pytest.raises(ProtocolError, match="exceeds the limit"):
        small.carry(bytes(2 * MIB - 32 - 8 - 4 + 1))
    small.close()


def test_without_memory_there_is_none(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise OSError("no more")

    monkeypatch.setattr(os, "memfd_create", refuse)
    line.warm(MIB)
    assert line.lender.bytes_lent == 0
    assert line.budget.used == 0


def test_a_channel_that_is_lost_while_memory_is_allocated(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    create, before = line.lender._memory.create, set(os.listdir("/proc/self/fd"))

    def lose(*args: Any) -> Any:
        made = create(*args)
        line.lender._closed = True  # ``close`` did not wait for the lock any longer
        return made

    monkeypatch.setattr(line.lender._memory, "create", lose)
    line.lender.lend([bytes(MIB)])
    line.lender.lend([bytes(MIB)])
    assert not line.lender.news
    assert line.budget.used == 0
    assert set(os.listdir("/proc/self/fd")) == before


# What a peer must not do.


@given(place=st.integers(1, (1 << 64) - 1), size=st.integers(0, 1 << 40))
def test_places_that_do_not_exist_are_refused(place: int, size: int) -> None:
    line = Line()
    line.warm(MIB)
    with pytest.raises(ProtocolError):
        line.borrower.borrow(place, size)
    for odd in (1 << 32, 1 << 32 | 3, 1 << 32 | 4, 1 << 32 | (1 << 32) - 1):
        with pytest.raises(ProtocolError):  # none is lent
            line.borrower.borrow(odd, MIB)
    line.close()


def test_a_slot_is_borrowed_once(line: Line) -> None:
    line.warm(MIB)
    (place,) = line.lender.lend([bytes(MIB)]) or ()
    held = line.borrower.borrow(place, MIB)
    with pytest.raises(ProtocolError):
        line.borrower.borrow(place, MIB)
    del held
    with pytest.raises(ProtocolError):  # it is free now
        line.borrower.borrow(place, MIB)


@pytest.mark.parametrize("size", [0, MIB + 1, 1 << 63])
def test_no_more_than_a_slot_is_borrowed(line: Line, size: int) -> None:
    line.warm(MIB)
    (place,) = line.lender.lend([bytes(MIB)]) or ()
    with pytest.raises(ProtocolError):
        line.borrower.borrow(place, size)


offer = struct.Struct("<iIQ16s")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        bytes(31),
        bytes(33),
        offer.pack(0, 0, 4096, bytes(16)),
        offer.pack(0, 65, 4096, bytes(16)),
        offer.pack(0, 1, 0, bytes(16)),
        offer.pack(0, 1, 4097, bytes(16)),
        offer.pack(0, 64, 1 << 40, bytes(16)),
        offer.pack(0, 1, (1 << 64) - 4096, bytes(16)),
    ],
)
def test_impossible_offers_are_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        HostBorrower(os.getpid()).offered(1, body)


@pytest.mark.parametrize("number", [0, 1 << 31, (1 << 64) - 1])
def test_impossible_segment_numbers_are_refused(number: int) -> None:
    with pytest.raises(ProtocolError):
        HostBorrower(os.getpid()).offered(number, offer.pack(0, 1, 4096, bytes(16)))


@pytest.mark.parametrize("wrong", ["missing", "negative", "size", "seals", "cookie", "pipe", "directory"])
def test_what_is_no_segment_is_not_mapped(wrong: str, tmp_path: Any) -> None:
    cookie, size, ends = bytes(range(16)), 8192, []
    if wrong == "pipe":
        ends = list(os.pipe())
    elif wrong == "directory":
        ends = [os.open(tmp_path, os.O_RDONLY)]
    else:
        ends = [os.memfd_create("test", os.MFD_ALLOW_SEALING)]
        os.ftruncate(ends[0], size + (wrong == "size"))
        os.pwrite(ends[0], cookie if wrong != "cookie" else bytes(16), 0)
        if wrong != "seals":
            fcntl.fcntl(ends[0], fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    try:
        fd = {"missing": 1 << 20, "negative": -1}.get(wrong, ends[0])
        answer = HostBorrower(os.getpid()).offered(1, offer.pack(fd, 1, 4096, cookie))
        assert answer == control_frame(host_memory.ANSWER, 1, b"\0")
    finally:
        for end in ends:
            os.close(end)


def test_a_segment_number_is_used_once(line: Line) -> None:
    line.warm(MIB)
    with pytest.raises(ProtocolError):
        line.borrower.offered(1, offer.pack(0, 1, 4096, bytes(16)))
    line.borrower.retired(1)
    with pytest.raises(ProtocolError):
        line.borrower.retired(1)


@pytest.mark.parametrize(("number", "body"), [(1, b""), (1, b"\2"), (1, b"\1\1"), (2, b"\1"), (0, b"\0")])
def test_answers_to_no_offer_are_refused(line: Line, number: int, body: bytes) -> None:
    line.lender.lend([bytes(MIB)])
    line.lender.lend([bytes(MIB)])
    assert line.lender.news
    with pytest.raises(ProtocolError):
        line.lender.answered(number, body)


@pytest.mark.parametrize("busy", [False, True])
def test_an_answer_that_comes_twice_counts_once(line: Line, busy: bool) -> None:
    line.lender.lend([bytes(MIB)])
    line.lender.lend([bytes(MIB)])
    if busy:  # another thread holds the lock: answers are queued
        with line.lender._lock:
            line.tell()
            line.lender.answered(1, b"\0")
    else:
        line.tell()
        with pytest.raises(ProtocolError):
            line.lender.answered(1, b"\0")
    (buffer,) = line.carry(noise(MIB))
    assert line.lender.lent == 1
    assert bytes(buffer) == noise(MIB)


def test_a_segment_cannot_be_cut_short(line: Line) -> None:
    """A process that reads beyond the end of a mapped file is killed."""
    line.lender.lend([bytes(MIB)])
    line.lender.lend([bytes(MIB)])
    (segment,) = line.lender._segments.values()
    fd = segment.memory._descriptor
    for size in (0, 1 << 30):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)


@given(
    flags=st.integers(0, 3),
    kind=st.integers(0, 5),
    number=st.integers(0, 3),
    body=st.one_of(st.binary(max_size=70), st.builds(offer.pack, *[st.integers(0, 9)] * 3, st.binary())),
    table=st.lists(st.tuples(st.sampled_from(LENGTHS), st.sampled_from(PLACES)), max_size=4),
    chunk=st.integers(1, 300),
)
def test_frames_of_a_peer_gone_mad_are_refused_or_read(
    flags: int, kind: int, number: int, body: bytes, table: list[tuple[int, int]], chunk: int
) -> None:
    line = Line()
    line.warm(THRESHOLD)
    places = line.lender.lend([noise(THRESHOLD)])
    lengths = [length for length, _ in table]
    payload = sum(lengths) % (1 << 64)
    wire = HEADER.pack(MAGIC, VERSION, kind, flags, len(table), len(body), number, payload)
    wire += struct.pack(f"<{len(table)}Q", *lengths)
    if flags & 1:
        wire += struct.pack(f"<{len(table)}Q", *(place for _, place in table))
    try:
        assert [list(map(len, frame.buffers)) for frame in feed(line.reader, wire + body, [chunk])] in ([], [lengths])
    except ProtocolError:
        pass
    line.reader.close()  # with what it has read of a frame
    line.lender.take_back(places)
    assert line.lender.lent == 0
    line.close()


# Forks.


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_memory_of_its_own(line: Line) -> None:
    line.warm(MIB)
    (buffer,) = line.carry(noise(MIB))
    anonymous = mmap.mmap(-1, 2)
    child = os.fork()
    if not child:  # no way out of here but _exit: this is pytest's process too
        try:
            fine = bytes(buffer) == noise(MIB)
            buffer[0] = (buffer[0] + 1) % 256
            anonymous[0] = fine
            before = bytes(buffer)
            while not anonymous[1]:
                pass
            anonymous[0] = fine and bytes(buffer) == before
            del buffer
        finally:
            os._exit(0)
    try:
        assert bytes(buffer) == noise(MIB), "the child's change shows here"
        del buffer
        assert line.lender.lent == 0
        (again,) = line.carry(noise(MIB, 1))
    finally:
        anonymous[1] = 1
        os.waitpid(child, 0)
    assert anonymous[0] == 1, "the child saw others' bytes"
    assert line.lender.lent == 1, "the child gave back what is its parent's"
    assert bytes(again) == noise(MIB, 1)
    anonymous.close()


def test_what_ends_during_a_fork_comes_back_after_it(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    line.warm(MIB)
    held = line.carry(noise(MIB))
    leases.fork_guard.before()
    held.clear()
    assert line.lender.lent == 1
    monkeypatch.setattr(leases, "_FORK_SECONDS", 0.0)
    leases.fork_guard.in_parent()
    assert line.lender.lent == 0
