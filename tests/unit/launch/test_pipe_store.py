"""The store of a launch, without workers."""

from __future__ import annotations

import multiprocessing.connection
import pickle
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import Pipe

import pytest
from torch.distributed import DistStoreError  # type: ignore[attr-defined]

from backhaul._launch.pipe_store import PipeStore, Table
from backhaul._rpc.cluster.addressing import AddressOffer
from backhaul._rpc.cluster.membership_table import WorkerRecord
from backhaul._rpc.cluster.rendezvous import StoreRendezvous
from backhaul.errors import RendezvousError


@contextmanager
def stores(count: int) -> Iterator[list[PipeStore]]:
    """The stores of ``count`` workers, and a parent that serves them until all pipes are closed."""
    pairs = [Pipe() for _ in range(count)]
    ours = [pair[0] for pair in pairs]

    def serve() -> None:
        table, left = Table(), list(ours)
        while left:
            for pipe in multiprocessing.connection.wait(left):
                assert isinstance(pipe, multiprocessing.connection.Connection)
                try:
                    table.serve(pipe, pickle.loads(pipe.recv_bytes()))
                except (EOFError, OSError):  # OSError: it left an answer unread
                    left.remove(pipe)

    parent = threading.Thread(target=serve)
    parent.start()
    try:
        yield [PipeStore(pair[1]) for pair in pairs]
    finally:
        for _, theirs in pairs:
            theirs.close()
        parent.join()
        for pipe in ours:
            pipe.close()


def offer(rank: int, name: str) -> AddressOffer:
    return AddressOffer(WorkerRecord(rank, name, "1", "here", ("unix:@x",), "", 1))


def test_a_wait_returns_when_all_keys_are_there() -> None:
    with stores(2) as (first, second):
        second.set("b", "2")
        second.check(["b"])  # it is there
        assert not first.check(["a", "b"])
        asking = threading.Thread(target=lambda: found.extend(first.multi_get(["a", "b"])))
        found: list[bytes] = []
        asking.start()
        second.set("a", b"1")
        asking.join()
        assert found == [b"1", b"2"]
        assert [first.add("n", 2), second.add("n", 3)] == [2, 5]


def test_everyone_meets_twice() -> None:
    with stores(3) as all_stores:
        for _ in range(2):
            rendezvous = [StoreRendezvous(store, rank, 3, 30.0) for rank, store in enumerate(all_stores)]
            secrets: list[bytes] = []
            found: list[list[AddressOffer]] = []

            def meet(rank: int, at: StoreRendezvous, secrets: list[bytes], found: list[list[AddressOffer]]) -> None:
                secrets.append(at.agree_on_secret(None))
                found.append(at.exchange(offer(rank, f"worker{rank}")))

            threads = [threading.Thread(target=meet, args=(r, m, secrets, found)) for r, m in enumerate(rendezvous)]
            with ExitStack() as ends:
                for thread in threads:
                    thread.start()
                    ends.callback(thread.join)
            assert found == [[offer(rank, f"worker{rank}") for rank in range(3)]] * 3
            assert len(set(secrets)) == 1


def test_missing_ranks_are_named_and_late_answers_are_ignored() -> None:
    with stores(3) as (first, second, _):
        second.set("backhaul/1/arrival/1", "here")
        with pytest.raises(RendezvousError, match=r"waited 0.05 s .*: 1 of 3 did not come: ranks 2"):
            StoreRendezvous(first, 0, 3, 0.05).exchange(offer(0, "worker0"))
        second.set("backhaul/1/arrival/2", "late")
        assert first.multi_get(["backhaul/1/arrival/1"]) == [b"here"]


def test_a_parent_that_is_gone() -> None:
    ours, theirs = Pipe()
    store = PipeStore(theirs)
    ours.close()
    with pytest.raises(DistStoreError, match="gone"):
        store.set("a", "1")
    with pytest.raises(DistStoreError, match="gone"):
        store.multi_get(["a"])
    theirs.close()
