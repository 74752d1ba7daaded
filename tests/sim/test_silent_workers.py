"""Workers that are cut off or die without a word: calls to them fail fast, and they are found again. Virtual time."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import pytest

import backhaul as bh
from backhaul._rpc.cluster.loss_news import LossNews
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


# Members without a channel to the worker hear of it.


def meet(cluster: SimCluster, *pairs: tuple[int, int]) -> None:
    """Open channels."""
    for one, other in pairs:
        call = functools.partial(bh.rpc_sync, f"worker{other}", operator.add, args=(1, 2))
        assert cluster.run(f"worker{one}", call).result() == 3


def lost_for(cluster: SimCluster, name: str) -> list[str]:
    return [node.worker.name for node in cluster.nodes.values() if node.peers.find(name).lost]


@pytest.mark.parametrize("silent", [0, 3], ids=["the leader", "another"])
def test_members_without_a_channel_learn_of_a_silent_worker(silent: int) -> None:
    """One worker notices. The others have never talked to the silent worker, and do not call it."""
    others = [number for number in range(4) if number != silent]
    with SimCluster(4, seed=7) as cluster:
        meet(cluster, (1, silent))
        gone: list[str] = []
        with cluster.nodes["worker2"].worker:
            bh.on_membership(lambda event: gone.append(event.worker.name) if event.kind == "lost" else None)
        cluster.crash(f"worker{silent}", silent=True)
        cluster.sleep(35.0)  # lost_after, one second to gather reports, and an attempt to connect for each
        assert lost_for(cluster, f"worker{silent}") == [f"worker{number}" for number in others]
        assert gone == [f"worker{silent}"]


def test_all_workers_of_a_large_host_go_silent() -> None:
    """More than a worker looks for at once."""
    silent = range(2, 22)
    with SimCluster(24, seed=10) as cluster:
        meet(cluster, *((1, number) for number in silent))
        for number in silent:
            cluster.crash(f"worker{number}", silent=True)
        cluster.sleep(120.0)  # three rounds of attempts to connect at the leader, and as many at the others
        left = ["worker0", "worker1", "worker22", "worker23"]
        assert {number: lost_for(cluster, f"worker{number}") for number in silent} == dict.fromkeys(silent, left)


def test_a_worker_that_only_one_member_cannot_reach_is_lost_for_nobody_else() -> None:
    with SimCluster(4, seed=8) as cluster:
        meet(cluster, (1, 3), (2, 3))
        cluster.network.partitions.cut("worker1", "worker3")
        cluster.network.partitions.cut("worker3", "worker1")
        cluster.sleep(60.0)
        assert lost_for(cluster, "worker3") == ["worker1"]
        cluster.network.partitions.heal_all()
        cluster.sleep(35.0)


def test_a_false_report_makes_nobody_lost() -> None:
    with SimCluster(4, seed=9) as cluster:
        incarnation = cluster.nodes["worker3"].worker.incarnation

        def lie() -> None:
            for name in ("worker0", "worker2"):
                for function in ("went_silent", "look_for"):
                    for claimed in (incarnation, "nobody", cluster.nodes[name].worker.incarnation):
                        bh.rpc_sync(name, f"backhaul._rpc.cluster.loss_news:{function}", args=(claimed,))

        cluster.run("worker1", lie).result()
        cluster.sleep(35.0)
        assert not lost_for(cluster, "worker3")
        assert not any(cluster.nodes["worker0"].worker.part(LossNews)._reporters)
