"""Workers that are cut off or die without a word: calls to them fail fast, and they are found again. Virtual time."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest

import backhaul as bh
from backhaul._rpc.cluster.reconnecting import SHORT_SECONDS
from backhaul._sim.cluster import SimCluster


def seconds_of(call: Callable[[], object]) -> Callable[[], float]:
    """A program that runs ``call``, which must fail, and returns how long it took."""

    def program() -> float:
        now = bh.current_worker().runtime.now
        begun = now()
        with pytest.raises(bh.PeerLostError):
            call()
        return now() - begun

    return program


def add() -> int:
    return bh.rpc_sync("worker1", operator.add, args=(1, 2))  # type: ignore[no-any-return]


def cut(cluster: SimCluster) -> None:
    cluster.network.partitions.cut("worker0", "worker1")
    cluster.network.partitions.cut("worker1", "worker0")


def channel_of(cluster: SimCluster) -> object:
    return cluster.nodes["worker0"].peers.find("worker1").channel


def test_calls_to_a_worker_that_is_cut_off_fail_fast() -> None:
    with SimCluster(2, seed=3) as cluster:
        assert cluster.run("worker0", add).result() == 3
        cut(cluster)
        assert cluster.run("worker0", seconds_of(add)).result() < 11  # the failure detector gives it up
        for _ in range(5):
            assert cluster.run("worker0", seconds_of(add)).result() <= SHORT_SECONDS + 0.1
        cluster.network.partitions.heal_all()
        assert cluster.run("worker0", add).result() == 3


def test_the_background_finds_a_worker_again() -> None:
    with SimCluster(2, seed=4) as cluster:
        assert cluster.run("worker0", add).result() == 3
        cut(cluster)
        cluster.run("worker0", seconds_of(add)).result()
        cluster.run("worker0", seconds_of(add)).result()
        cluster.sleep(12.0)
        assert channel_of(cluster) is None
        cluster.network.partitions.heal_all()
        cluster.sleep(35.0)  # no call: the longest pause, and an attempt
        assert channel_of(cluster) is not None


def test_a_worker_that_calls_is_reachable_at_once() -> None:
    with SimCluster(2, seed=5) as cluster:
        assert cluster.run("worker0", add).result() == 3
        cut(cluster)
        cluster.run("worker0", seconds_of(add)).result()
        cluster.run("worker0", seconds_of(add)).result()
        cluster.network.partitions.heal_all()

        def call_back() -> int:
            return bh.rpc_sync("worker0", operator.add, args=(3, 4))  # type: ignore[no-any-return]

        assert cluster.run("worker1", call_back).result() == 7
        assert channel_of(cluster) is not None
        assert cluster.run("worker0", add).result() == 3


def test_a_worker_that_dies_silently_and_is_replaced() -> None:
    with SimCluster(2, seed=6) as cluster:
        assert cluster.run("worker0", add).result() == 3
        cluster.crash("worker1", silent=True)
        cluster.run("worker0", seconds_of(add)).result()
        assert cluster.run("worker0", seconds_of(add)).result() <= SHORT_SECONDS + 0.1
        cluster.start("worker1")
        assert cluster.run("worker0", add).result() == 3
