"""Both ends of shared device memory within one process: tensors in, tensors out, in the right order on their streams,
and what a peer must not do.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from backhaul._devices import borrowing, deferred_free, lending, pages, process_identity
from backhaul._devices.backend import HANDLE_BYTES
from backhaul._devices.borrowing import DeviceBorrower
from backhaul._devices.lending import SMALL_BYTES, DeviceLender
from backhaul._devices.segment_messages import Item, Offer, Retire, SegmentReply, SegmentUpdate
from backhaul._devices.stream_order import StreamOrder
from backhaul._transport.shm.slots import Budget
from backhaul._wire.device_link import Slot
from backhaul._wire.messages import pack, unpack
from backhaul.errors import ProtocolError
from tests.unit.devices.clocks import FakeCuda, RaceError, Threads
from tests.unit.devices.fake_ipc import FakeIpc

MIB = 1 << 20


def free_deferred() -> None:
    deferred_free.free_deferred()  # the receiver closes what the sender frees next
    deferred_free.free_deferred()


DEVICES = ("X", "Y")


class Line:
    """A lender and a borrower that exchange their messages. Each has a ``StreamOrder`` like a process of its own."""

    def __init__(self, limit: int = 256 * MIB, there: tuple[str, ...] = DEVICES) -> None:
        self.time = 0.0
        self.cuda = FakeCuda(2)
        self.ipc = FakeIpc(self.cuda)
        self.budgets = [Budget(limit), Budget(limit), Budget(limit)]  # the last is the host's
        self.sender, self.receiver = StreamOrder(self.cuda), StreamOrder(self.cuda)
        self.lender = DeviceLender(
            self.ipc, self.sender.slot_order, DEVICES, self.budgets.__getitem__, lambda: self.time
        )
        self.borrower = DeviceBorrower(self.ipc, self.receiver.slot_order, there)
        self.told: list[str] = []

    def tell(self) -> None:
        while self.lender.news:
            self._tell(self.lender.news.popleft())

    def _tell(self, item: Item) -> None:
        (item,) = unpack(pack(SegmentUpdate((item,))), SegmentUpdate).items
        self.told.append(type(item).__name__)
        if isinstance(item, Offer):
            self.borrower.check(item)
            self._tell(self.borrower.open(item))
        elif isinstance(item, SegmentReply):
            self.lender.answered(item)
        else:
            self.borrower.retired(item.number)

    def lend(self, nbytes: int, fill: int = 1, device: int = 0) -> Slot | None:
        slot = self.lender.lend(torch.full((nbytes,), fill, dtype=torch.uint8), device)
        self.tell()
        return slot

    def warm(self, nbytes: int, device: int = 0) -> None:
        assert self.lend(nbytes, device=device) is None
        assert self.lend(nbytes, device=device) is None
        slot = self.lend(nbytes, device=device)
        assert slot is not None
        self.lender.take_back([slot])

    def close(self) -> None:
        self.lender.close()
        self.borrower.close()
        self.cuda.finish()
        free_deferred()


@pytest.fixture
def line() -> Iterator[Line]:
    made = Line()
    yield made
    made.close()
    assert [budget.used for budget in made.budgets] == [0, 0, 0]
    assert not made.ipc.there_now, "everything is closed in the end"


@pytest.fixture(params=[64, 4 * SMALL_BYTES], ids=["host", "device"])
def size(request: pytest.FixtureRequest) -> int:
    """Bytes of a tensor. The size decides whether its slot lies on the host or on the device."""
    found: int = request.param
    return found


class TestLending:
    def test_after_the_second_miss_there_are_slots(self, line: Line) -> None:
        assert line.lend(64) is None
        assert line.told == []
        assert line.lend(64) is None
        assert line.told == ["Offer", "SegmentReply"]
        assert line.lend(64) == (1, 0)
        assert line.lend(64) == (1, 1)
        assert line.lender.lent == 2
        assert line.lender.bytes_lent == 128
        line.lender.take_back([(1, 0), (1, 1)])
        assert line.lender.lent == 0

    def test_bytes_arrive(self, line: Line) -> None:
        line.warm(100)
        slot = line.lend(100, 7)
        assert slot is not None
        made = line.borrower.borrow(slot, 100, 0)
        assert made.tolist() == [7] * 100
        assert made.untyped_storage().nbytes() == 100
        assert line.lender.lent == 1
        view = made[3:5]
        del made
        assert line.lender.lent == 1
        del view
        assert line.lender.lent == 0

    def test_each_device_has_its_own(self, line: Line) -> None:
        line.warm(100, device=0)
        line.warm(100, device=1)
        slot = line.lend(100, 7, device=1)
        assert slot is not None
        with pytest.raises(ProtocolError):
            line.borrower.borrow(slot, 100, 0)
        assert line.borrower.borrow(slot, 100, 1)[0] == 7

    def test_large_and_small(self, line: Line) -> None:
        for nbytes in (1, 5000, 12288, MIB, 9 * MIB):
            line.warm(nbytes)
            slot = line.lend(nbytes, 3)
            assert slot is not None
            assert line.borrower.borrow(slot, nbytes, 0).sum() == 3 * nbytes

    def test_when_all_are_lent_there_is_another_segment(self, line: Line) -> None:
        line.warm(MIB)
        slots = [line.lend(MIB) for _ in range(20)]
        assert None in slots
        assert len({slot[0] for slot in slots if slot is not None}) > 1
        line.lender.take_back([slot for slot in slots if slot is not None])

    def test_no_more_than_the_budget(self) -> None:
        line = Line(limit=MIB)
        assert [line.lend(2 * MIB) for _ in range(5)] == [None] * 5
        assert line.told == []
        line.close()

    def test_without_memory_it_is_staged(self, line: Line) -> None:
        line.ipc.no_memory = True
        assert [line.lend(MIB) for _ in range(4)] == [None] * 4
        line.ipc.no_memory = False
        assert line.lend(MIB) is None, "not asked again at once: that empties torch's cache"
        line.lender.trim()
        assert line.lend(MIB) is None
        assert line.lend(MIB) is not None
        line.lender.take_back([(1, 0)])

    def test_memory_is_asked_for_again_though_nobody_trims(self, line: Line) -> None:
        line.ipc.no_memory = True
        assert [line.lend(MIB) for _ in range(4)] == [None] * 4
        line.ipc.no_memory = False
        line.time = 11.0
        assert line.lend(MIB) is None
        slot = line.lend(MIB)
        assert slot is not None
        line.lender.take_back([slot])

    def test_a_copy_that_fails_gives_the_slot_back(self, line: Line) -> None:
        line.warm(64)
        line.ipc.breaks = True
        with pytest.raises(RuntimeError, match="illegal memory access"):
            line.lend(64)
        assert line.lender.lent == 0


class TestOrder:
    def test_who_reads_comes_after_who_wrote(self, line: Line, size: int, threads: Threads) -> None:
        line.warm(size)
        threads.run("sender", line.sender.enter)
        threads.run("receiver", line.receiver.enter)
        slot = threads.run("sender", lambda: line.lend(size))
        cell = line.ipc.cells[next(reversed(line.ipc.cells))]
        with pytest.raises(RaceError):
            threads.run("receiver", cell.read)
        held = threads.run("receiver", lambda: line.borrower.borrow(slot, size, 0))
        threads.run("receiver", cell.read)
        del held

    def test_who_writes_again_comes_after_who_read(self, line: Line, size: int, threads: Threads) -> None:
        line.warm(size)
        for name in ("one", "two"):
            threads.run(name, line.sender.enter)
        for name in ("a", "b", "c"):
            threads.run(name, line.receiver.enter)
        for sender in ("one", "two", "one"):
            slot = threads.run(sender, lambda: line.lend(size))
            assert slot == (1, 0)
            box = [threads.run("a", lambda slot=slot: line.borrower.borrow(slot, size, 0))]
            cell = line.ipc.cells[next(iter(line.ipc.cells))]
            threads.run("a", cell.read)
            mark = threads.run("a", line.receiver.mark)
            threads.run("b", lambda mark=mark: line.receiver.join(mark))
            threads.run("b", cell.read)
            threads.run("c", box.clear)  # another thread drops the last reference
            assert line.lender.lent == 0

    def test_from_one_device_to_another(self, line: Line, size: int, threads: Threads) -> None:
        line.warm(size, device=1)
        threads.run("sender", line.sender.enter)
        threads.run("receiver", line.receiver.enter)
        for fill in range(3):
            flat = torch.full((size,), fill, dtype=torch.uint8)
            slot = threads.run("sender", lambda flat=flat: line.lender.lend(flat, 1, 0))
            assert slot == (1, 0)
            cell = line.ipc.cells[next(iter(line.ipc.cells))]
            box = [threads.run("receiver", lambda slot=slot: line.borrower.borrow(slot, size, 1))]
            assert box[0].tolist() == [fill] * size
            threads.run("receiver", lambda cell=cell: cell.read_on(line.cuda.current(1)))
            threads.run("receiver", box.clear)

    def test_without_done_that_would_be_found(
        self, line: Line, size: int, threads: Threads, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        line.warm(size)
        threads.run("receiver", line.receiver.enter)
        slot = line.lend(size)
        assert slot is not None
        monkeypatch.setattr(line.cuda, "record", lambda event, stream: None)
        held = threads.run("receiver", lambda: line.borrower.borrow(slot, size, 0))
        threads.run("receiver", line.ipc.cells[next(iter(line.ipc.cells))].read)
        del held
        with pytest.raises(RaceError):
            line.lend(size)

    def test_what_was_taken_back_is_still_being_written(self, line: Line, size: int, threads: Threads) -> None:
        line.warm(size)
        for name in ("one", "two"):
            threads.run(name, line.sender.enter)
            slot = threads.run(name, lambda: line.lend(size))
            line.lender.take_back([slot])

    def test_the_host_waits_for_nothing(self, line: Line, size: int) -> None:
        line.warm(size)
        for _ in range(5):
            slot = line.lend(size)
            assert slot is not None
            line.borrower.borrow(slot, size, 0)
        assert not line.cuda.done, "nothing was ever done"


class TestTheHost:
    def test_copies_what_it_can_reach_when_nothing_is_under_way(self, line: Line) -> None:
        line.warm(64)
        line.cuda.finish()
        slot = line.lend(64, 3)
        assert slot is not None
        got = line.borrower.borrow(slot, 64, 0)
        assert line.ipc.on_host_count == 0, "what is lent was not in host memory"
        line.cuda.finish()
        back = line.lender.lend(got, 0)
        assert back is not None
        assert line.ipc.on_host_count == 1
        again = line.borrower.borrow(back, 64, 0)
        assert again.tolist() == [3] * 64
        third = line.lender.lend(again, 0)
        assert line.ipc.on_host_count == 1, "the receiver's stream reads it"
        assert third is not None
        line.lender.take_back([third])

    def test_copies_into_no_slot_that_is_still_read(self, line: Line, threads: Threads) -> None:
        line.warm(64)
        line.cuda.finish()
        slots = [line.lend(64, number) for number in range(2)]
        held = [line.borrower.borrow(slot, 64, 0) for slot in slots if slot is not None]
        line.cuda.finish()
        threads.run("receiver", line.receiver.enter)
        cell = line.ipc.cells[next(iter(line.ipc.cells))]
        threads.run("receiver", cell.read)
        source = held.pop()
        del held[:]
        assert line.lender.lend(source, 0) == (1, 0)
        assert line.ipc.on_host_count == 0
        line.lender.take_back([(1, 0)])


class TestEnds:
    def test_slots_that_were_named_in_a_message_which_was_lost(self, line: Line, size: int) -> None:
        line.warm(size)
        assert line.lend(size) is not None
        line.lender.close()
        line.cuda.finish()
        free_deferred()
        assert line.ipc.there_now, "the receiver may still read the message"
        line.borrower.close()
        free_deferred()
        assert not line.ipc.there_now

    def test_a_receiver_that_was_killed(self, line: Line, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        line.warm(size)
        slot = line.lend(size)
        assert slot is not None
        held = line.borrower.borrow(slot, size, 0)
        line.borrower._segments.clear()  # without telling the sender
        line.lender.close()
        line.cuda.finish()
        free_deferred()
        there = line.ipc.there_now
        monkeypatch.setattr(lending, "has_ended", lambda process, _: process == os.getpid())
        free_deferred()
        assert line.ipc.there_now < there
        del held

    def test_a_sender_that_was_killed(
        self, line: Line, size: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        line.warm(size)
        slot = line.lend(size)
        assert slot is not None
        held = line.borrower.borrow(slot, size, 0)
        ready = [flag for flag in line.ipc.flags.values() if not flag.query()]
        assert len(ready) == 1
        line.borrower.close()
        free_deferred()
        assert not ready[0].query()
        monkeypatch.setattr(borrowing, "has_ended", lambda process, _: process == os.getpid())
        free_deferred()
        assert ready[0].query(), "whoever waits for it goes on"
        assert "before 1 tensors" in caplog.text
        del held
        line.cuda.finish()
        line.lender.close()
        free_deferred()
        assert not line.ipc.there_now

    def test_what_such_a_sender_has_not_computed_cannot_be_borrowed(
        self, line: Line, size: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        line.warm(size)
        slots = [line.lend(size), line.lend(size)]
        assert slots == [(1, 0), (1, 1)]
        held = line.borrower.borrow((1, 0), size, 0)
        line.borrower._segments[1].pages.force_ready()
        with pytest.raises(ProtocolError, match="has ended before"):
            line.borrower.borrow((1, 1), size, 0)
        line.lender.take_back([(1, 1)])
        del held

    def test_both_ends_have_the_other_watched(self, line: Line, size: int) -> None:
        line.warm(size)
        count = len(line.borrower._segments[1].taken)
        assert {watch.process for watch in line.ipc.watches} == {os.getpid()}
        spans = [watch.span for watch in line.ipc.watches]
        assert sorted(spans) == [pages.span_of_ready(count), pages.span_of_done(count)]
        line.close()
        assert not line.ipc.watches

    def test_a_channel_that_is_lost_while_a_segment_is_being_opened(
        self, line: Line, size: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pin = line.ipc.pin

        def lose(*args: Any) -> Any:
            line.borrower.close()
            return pin(*args)

        line.lender.lend(torch.zeros(size, dtype=torch.uint8), 0)
        line.lender.lend(torch.zeros(size, dtype=torch.uint8), 0)
        monkeypatch.setattr(line.ipc, "pin", lose)
        line.tell()
        assert not line.borrower._segments
        line.lender.close()
        free_deferred()
        assert not line.ipc.there_now

    def test_memory_is_not_freed_while_the_receiver_has_it_open(self, line: Line) -> None:
        line.warm(MIB)
        line.lender.close()
        line.cuda.finish()
        free_deferred()
        there = line.ipc.there_now
        assert there == 4, "pages and memory, at both ends"
        line.borrower.close()
        deferred_free.free_deferred()
        assert line.ipc.there_now == 2, "the receiver's go first"
        deferred_free.free_deferred()
        assert line.ipc.there_now == 0

    def test_processes_that_have_ended(self) -> None:
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        life = process_identity.identity_of(process.pid)
        assert not process_identity.has_ended(process.pid, life)
        assert process_identity.has_ended(process.pid, life - 1), "another had its number before"
        assert process.stdin is not None
        process.stdin.close()
        deadline = time.monotonic() + 60
        # Nobody has waited for the process yet: it is a zombie.
        while not process_identity.has_ended(process.pid, life) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert process_identity.has_ended(process.pid, life)
        process.wait()
        assert process_identity.has_ended(process.pid, life)
        assert not process_identity.has_ended(os.getpid(), process_identity.identity_of(os.getpid()))

    def test_a_lost_channel_forgets_everything(self, line: Line, size: int) -> None:
        line.warm(size)
        slot = line.lend(size, 5)
        assert slot is not None
        held = line.borrower.borrow(slot, size, 0)
        line.lender.close()
        line.borrower.close()
        assert line.lend(size) is None
        assert held.tolist() == [5] * size
        line.cuda.finish()
        free_deferred()
        assert line.ipc.there_now
        with pytest.raises(ProtocolError):
            line.borrower.borrow((1, 1), size, 0)
        del held
        line.cuda.finish()
        free_deferred()
        assert not line.ipc.there_now

    def test_memory_stays_while_the_device_may_use_it(self, line: Line, size: int, threads: Threads) -> None:
        line.warm(size)
        threads.run("receiver", line.receiver.enter)
        slot = line.lend(size)
        assert slot is not None
        held = threads.run("receiver", lambda: line.borrower.borrow(slot, size, 0))
        threads.run("receiver", line.ipc.cells[next(iter(line.ipc.cells))].read)
        line.lender.close()
        line.borrower.close()
        del held
        free_deferred()
        assert line.ipc.there_now
        line.cuda.finish()
        free_deferred()
        assert not line.ipc.there_now

    def test_unused_segments_are_retired(self, line: Line) -> None:
        line.warm(32 * MIB)
        assert line.lender.nbytes
        line.time = 100.0
        line.lender.trim()
        line.tell()
        assert line.told[-1] == "Retire"
        assert line.lender.nbytes == 0
        assert line.budgets[0].used == 32 * MIB, "the receiver has not closed it"
        line.cuda.finish()
        free_deferred()
        assert line.budgets[0].used == 0
        assert line.lend(64) is None

    def test_a_segment_in_use_is_not(self, line: Line) -> None:
        line.warm(32 * MIB)
        slot = line.lend(32 * MIB)
        assert slot is not None
        held = line.borrower.borrow(slot, 1, 0)
        line.time = 100.0
        assert line.lender.trim()
        assert not line.lender.news
        del held
        line.lender.trim()
        assert line.lender.news

    def test_no_descriptor_is_left(self, line: Line) -> None:
        before = len(os.listdir("/proc/self/fd"))
        for nbytes in (64, MIB):
            line.warm(nbytes)
        assert len(os.listdir("/proc/self/fd")) == before
        line.lender.lend(torch.zeros(9 * MIB, dtype=torch.uint8), 0)
        line.lender.lend(torch.zeros(9 * MIB, dtype=torch.uint8), 0)
        line.lender.close()
        assert len(os.listdir("/proc/self/fd")) == before

    def test_a_device_that_cannot_write_flags(self, line: Line) -> None:
        line.cuda.no_flags = True
        assert [line.lend(size) for size in (64, MIB) for _ in range(4)] == [None] * 8
        assert line.told == []

    @pytest.mark.parametrize("why", ["cannot open", "another device", "another process"])
    def test_a_peer_that_refuses_is_not_asked_again(self, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
        line = Line(there=("Z",) if why == "another device" else DEVICES)
        line.ipc.refuse = why == "cannot open"
        if why == "another process":
            monkeypatch.setattr(os, "getpid", lambda: 2**22 + 1)
        assert [line.lend(64) for _ in range(4)] == [None] * 4
        assert [line.lend(MIB) for _ in range(4)] == [None] * 4
        assert line.told == ["Offer", "SegmentReply"]
        assert line.budgets[0].used == 0
        line.close()


def offer(**changes: object) -> Offer:
    made = Offer(1, "X", 4096, 2, bytes(HANDLE_BYTES), os.getpid(), 0, bytes(16))
    return msgspec.structs.replace(made, **changes)


class TestWhatAPeerSays:
    @pytest.mark.parametrize(
        "changes",
        [
            {"number": 0},
            {"number": 1 << 31},
            {"slot_bytes": 0},
            {"slot_bytes": -4096},
            {"slot_bytes": 100},
            {"slot_bytes": 1 << 60},
            {"count": 0},
            {"count": 65},
            {"cookie": b""},
            {"memory": b"short"},
        ],
    )
    def test_offers(self, line: Line, changes: dict[str, object]) -> None:
        with pytest.raises(ProtocolError):
            line.borrower.check(offer(**changes))

    @pytest.mark.parametrize("changes", [{"process": 0}, {"process": -1}, {"descriptor": -1}, {"descriptor": 0}])
    def test_offers_that_are_refused(self, line: Line, changes: dict[str, object]) -> None:
        assert line.borrower.open(offer(**changes)) == SegmentReply(1)

    def test_answers(self, line: Line) -> None:
        for answer in (SegmentReply(1), SegmentReply(7, True)):
            with pytest.raises(ProtocolError):
                line.lender.answered(answer)
        line.lender.lend(torch.zeros(64, dtype=torch.uint8), 0)
        line.lender.lend(torch.zeros(64, dtype=torch.uint8), 0)
        with pytest.raises(ProtocolError):
            line.lender.answered(SegmentReply(1, True))  # and has not opened it

    def test_slots(self, line: Line) -> None:
        line.warm(64)
        slot = line.lend(64)
        assert slot == (1, 0)
        for number, index, nbytes in ((2, 0, 64), (1, 99, 64), (1, -1, 64), (1, 1, 64), (1, 0, 0), (1, 0, 4097)):
            with pytest.raises(ProtocolError):
                line.borrower.borrow((number, index), nbytes, 0)
        held = line.borrower.borrow(slot, 64, 0)
        with pytest.raises(ProtocolError):
            line.borrower.borrow(slot, 64, 0)
        line.borrower.decline([slot, (9, 0), (1, 99)])
        assert line.lender.lent == 1, "what is in use stays so"
        del held

    def test_retired(self, line: Line) -> None:
        with pytest.raises(ProtocolError):
            line.borrower.retired(4)

    def test_news(self) -> None:
        with pytest.raises(ProtocolError):
            unpack(msgspec.msgpack.encode([[["offer", 1]]]), SegmentUpdate)
        assert unpack(pack(SegmentUpdate((Retire(3),))), SegmentUpdate) == SegmentUpdate((Retire(3),))

    def test_a_message_that_nobody_reads(self, line: Line) -> None:
        line.warm(64)
        slot = line.lend(64)
        assert slot is not None
        line.borrower.decline([slot])
        assert line.lender.lent == 0
        assert line.lend(64) == slot, "after what was written there"
        line.lender.take_back([slot])
