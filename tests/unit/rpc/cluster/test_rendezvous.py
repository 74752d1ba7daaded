"""A meeting has one deadline, and says who is late before it gives up."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import pytest
from torch.distributed import HashStore

from backhaul._rpc.cluster import rendezvous
from backhaul._rpc.cluster.membership_table import WorkerRecord
from backhaul._rpc.cluster.rendezvous import StoreRendezvous
from backhaul.errors import RendezvousError

LONG = 1e6  # seconds; no test takes so long


def record(rank: int) -> WorkerRecord:
    return WorkerRecord(rank, f"worker{rank}", "1", "here", ("unix:@x",), "", 1)


@pytest.mark.parametrize(
    ("rank", "step", "missing"),
    [
        (0, lambda meeting: meeting.exchange(record(0)), "2 of 3 did not come: ranks 1, 2"),
        (1, lambda meeting: meeting.agree_on_secret(None), "2 of 3 did not come: ranks 0, 2"),
    ],
)
def test_each_step_has_what_is_left_of_the_time(
    rank: int, step: Callable[[StoreRendezvous], object], missing: str
) -> None:
    meeting = StoreRendezvous(HashStore(), rank, 3, LONG, began=time.monotonic() - LONG)
    with pytest.raises(RendezvousError, match=f"waited 1e\\+06 s .*{missing}$"):
        step(meeting)


def test_one_that_came_and_did_not_go_on() -> None:
    store = HashStore()
    meetings = [StoreRendezvous(store, rank, 3, LONG, began=time.monotonic() - LONG) for rank in range(3)]
    with pytest.raises(RendezvousError, match="all came, but one of them has ended or hangs"):
        meetings[1].agree_on_secret(None)


def test_one_that_comes_late_is_named_and_then_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_NOTICE", 0.01)
    store, noted = HashStore(), list[str]()

    class Come(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            noted.append(record.getMessage())
            store.set("sign/1", "here")

    log, handler = logging.getLogger("backhaul"), Come()
    log.addHandler(handler)
    try:
        store.set("sign/0", "first")
        found = rendezvous.values_of(store, ["sign/0", "sign/1"], "sign", 2, LONG, time.monotonic())
    finally:
        log.removeHandler(handler)
    assert found == [b"first", b"here"]
    assert len(noted) == 1
    assert "1 of 2 did not come: ranks 1;" in noted[0]
