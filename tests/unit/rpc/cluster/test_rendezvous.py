"""A rendezvous has one deadline, and names the ranks that are late before it gives up."""

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

LONG_SECONDS = 1e6  # no test takes that long


def record(rank: int) -> WorkerRecord:
    return WorkerRecord(rank, f"worker{rank}", "1", "here", ("unix:@x",), "", 1)


@pytest.mark.parametrize(
    ("rank", "step", "missing"),
    [
        (0, lambda found: found.exchange(record(0)), "2 of 3 did not come: ranks 1, 2"),
        (1, lambda found: found.agree_on_secret(None), "2 of 3 did not come: ranks 0, 2"),
    ],
)
def test_each_step_gets_the_time_that_is_left(
    rank: int, step: Callable[[StoreRendezvous], object], missing: str
) -> None:
    late = StoreRendezvous(HashStore(), rank, 3, LONG_SECONDS, began=time.monotonic() - LONG_SECONDS)
    with pytest.raises(RendezvousError, match=f"waited 1e\\+06 s .*{missing}$"):
        step(late)


def test_a_rank_that_came_and_then_hangs() -> None:
    store = HashStore()
    all_ranks = [
        StoreRendezvous(store, rank, 3, LONG_SECONDS, began=time.monotonic() - LONG_SECONDS) for rank in range(3)
    ]
    with pytest.raises(RendezvousError, match="all came, but one of them has ended or hangs"):
        all_ranks[1].agree_on_secret(None)


def test_a_late_rank_is_named_and_then_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_NOTICE_SECONDS", 0.01)
    store, noted = HashStore(), list[str]()

    class Come(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            noted.append(record.getMessage())
            store.set("sign/1", "here")

    log, handler = logging.getLogger("backhaul"), Come()
    log.addHandler(handler)
    try:
        store.set("sign/0", "first")
        found = rendezvous.values_of(store, ["sign/0", "sign/1"], "sign", 2, LONG_SECONDS, time.monotonic())
    finally:
        log.removeHandler(handler)
    assert found == [b"first", b"here"]
    assert len(noted) == 1
    assert "1 of 2 did not come: ranks 1;" in noted[0]
