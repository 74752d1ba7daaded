"""Device memory between workers of one process: a copy is taken once, in stream order, or dropped."""

from __future__ import annotations

import pytest
import torch

from backhaul._devices import handover
from backhaul._devices.handover import Handover
from backhaul._devices.stream_order import StreamOrder
from backhaul.errors import ProtocolError
from tests.unit.devices.clocks import FakeCuda, RaceError, Threads
from tests.unit.devices.fake_ipc import FakeIpc


@pytest.fixture
def ipc() -> FakeIpc:
    return FakeIpc(FakeCuda())


@pytest.fixture
def ends(ipc: FakeIpc) -> Handover:
    return Handover(ipc, StreamOrder(ipc.cuda))


def lend(ends: Handover) -> tuple[int, int]:
    slot = ends.lend(torch.full((8,), 7, dtype=torch.uint8), 0, 0)
    assert slot is not None
    return slot


def test_what_is_taken_comes_after_what_was_given(ipc: FakeIpc, ends: Handover, threads: Threads) -> None:
    slot = lend(ends)
    (cell,) = ipc.cells.values()
    stream = threads.run("other", lambda: ipc.cuda.use(ipc.cuda.fresh(0)) or ipc.cuda.current(0))
    with pytest.raises(RaceError):
        cell.read_on(stream)
    made = threads.run("other", lambda: ends.borrow(slot, 8, 0))
    cell.read_on(stream)
    assert made.tolist() == [7] * 8


def test_it_is_taken_once_and_as_it_is(ends: Handover) -> None:
    slot = lend(ends)
    with pytest.raises(ProtocolError):
        ends.borrow((1, slot[1]), 8, 0)
    for nbytes, device in ((9, 0), (8, 1)):
        with pytest.raises(ProtocolError):
            ends.borrow(lend(ends), nbytes, device)
    slot = lend(ends)
    assert len(ends.borrow(slot, 8, 0)) == 8
    with pytest.raises(ProtocolError):
        ends.borrow(slot, 8, 0)
    assert not handover._handed


def test_what_nobody_takes_is_forgotten(ipc: FakeIpc, ends: Handover) -> None:
    ends.take_back([lend(ends)])
    ends.decline([lend(ends)])
    assert not handover._handed
    other = Handover(ipc, StreamOrder(ipc.cuda))
    mine, theirs = lend(ends), lend(other)
    ends.close()
    assert list(handover._handed) == [theirs[1]]
    assert mine != theirs
    other.close()
    assert not handover._handed
