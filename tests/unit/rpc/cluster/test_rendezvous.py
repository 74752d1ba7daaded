"""A rendezvous has one deadline, and names the ranks that are late before it gives up."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from backhaul._rpc.cluster import rendezvous
from backhaul._rpc.cluster.addressing import AddressOffer
from backhaul._rpc.cluster.membership_table import WorkerRecord
from backhaul._rpc.cluster.rendezvous import StoreRendezvous
from backhaul.errors import RendezvousError

LONG_SECONDS = 1e6  # no test takes that long


def offer(rank: int) -> AddressOffer:
    return AddressOffer(WorkerRecord(rank, f"worker{rank}", "1", "here", ("unix:@x",), "", 1))


def late(store: HashStore, rank: int) -> StoreRendezvous:
    """Its time is over."""
    return StoreRendezvous(store, rank, 3, LONG_SECONDS, began=time.monotonic() - LONG_SECONDS)


@pytest.mark.parametrize(
    ("rank", "step", "missing"),
    [
        (0, lambda found: found.exchange(offer(0)), "2 of 3 did not come: ranks 1, 2"),
        (1, lambda found: found.agree_on_secret(None), "2 of 3 did not come: ranks 0, 2"),
        (1, lambda found: found.exchange(offer(1)), "2 of 3 did not come: ranks 0, 2"),
        (1, lambda found: found.addresses("here"), "no cluster has started at this store"),
    ],
)
def test_each_step_gets_the_time_that_is_left(
    rank: int, step: Callable[[StoreRendezvous], object], missing: str
) -> None:
    with pytest.raises(RendezvousError, match=f"waited 1e\\+06 s .*{missing}$"):
        step(late(HashStore(), rank))


def test_a_rank_0_that_came_and_then_hangs() -> None:
    store = HashStore()
    for rank in (0, 1):
        with pytest.raises(RendezvousError, match="did not come"):
            late(store, rank).exchange(offer(rank))
    with pytest.raises(RendezvousError, match="all came, but one of them has ended or hangs"):
        late(store, 2).exchange(offer(2))


def test_a_late_rank_is_named_and_then_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_NOTICE_SECONDS", 0.01)
    store, noted, threads = HashStore(), list[str](), ThreadPoolExecutor(1)

    class Come(logging.Handler):
        def emit(self, logged: logging.LogRecord) -> None:
            if "ranks 1;" not in logged.getMessage():  # rank 1 waits for rank 0 to read
                return
            noted.append(logged.getMessage())
            found.append(threads.submit(StoreRendezvous(store, 1, 2, LONG_SECONDS).exchange, offer(1)))

    found: list[Future[list[AddressOffer]]] = []
    log, handler = logging.getLogger("backhaul"), Come()
    log.addHandler(handler)
    try:
        with threads:
            assert StoreRendezvous(store, 0, 2, LONG_SECONDS).exchange(offer(0)) == [offer(0), offer(1)]
    finally:
        log.removeHandler(handler)
    assert found[0].result() == [offer(0), offer(1)]
    assert len(noted) == 1
    assert "1 of 2 did not come" in noted[0]


def test_a_store_that_does_not_answer() -> None:
    """As TCP stores while their server hangs."""
    over = threading.Event()

    class Hanging(HashStore):
        def add(self, key: str, amount: int) -> int:
            over.wait(60)
            return 0

    try:
        for step in (lambda found: found.addresses("here"), lambda found: found.exchange(offer(1))):
            with pytest.raises(RendezvousError, match="does not answer"):
                step(StoreRendezvous(Hanging(), 1, 2, 0.01))
    finally:
        over.set()


def test_ranks_of_different_sizes() -> None:
    store = HashStore()
    with ThreadPoolExecutor(2) as threads:
        met = [
            threads.submit(StoreRendezvous(store, rank, 2 + rank, LONG_SECONDS).exchange, offer(rank))
            for rank in (0, 1)
        ]
        for each in met:
            with pytest.raises(RendezvousError, match=r"rank 0 .* world_size=2, and rank 1 with world_size=3"):
                each.result()


def test_a_joiner_without_the_secret_that_others_were_given() -> None:
    with pytest.raises(RendezvousError, match="BACKHAUL_SECRET"):
        StoreRendezvous(HashStore(), 1, 2, LONG_SECONDS).find_secret(None)


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        method = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(RendezvousError, match="MASTER_PORT"):
            rendezvous.store_at(method, 0, 2, LONG_SECONDS)
