"""What a cluster costs grows with the number of its workers, and not with the square: idle, joins and departures.
Frames are counted, in virtual time.
"""

from __future__ import annotations

import functools

import pytest

import backhaul as bh
from backhaul._options import Liveness, Options
from backhaul._rpc.cluster import enrollment, leaving
from backhaul._sim.cluster import SimCluster
from tools.simulation.many_workers import ManyWorkers, ready, together

PATIENCE = 60.0


def test_many_workers_join_train_lose_some_and_go_on() -> None:
    run = ManyWorkers(48, seed=1)
    run.run()
    assert [phase.workers for phase in run.phases] == [48, 48, 48, 48, 43, 43, 43, 38]


def call_all(size: int) -> None:
    for number in range(size):
        bh.rpc_sync(f"worker{number}", ready)


@pytest.mark.parametrize("shape", ["mesh", "star"])
def test_an_idle_cluster_sends_no_more_frames_the_larger_it_is(shape: str) -> None:
    options = Options(liveness=Liveness(quiet_above=4))

    def frames(size: int) -> int:
        with SimCluster(size, seed=1, options=options) as cluster:
            callers = range(size) if shape == "mesh" else [0]
            for caller in [cluster.run(f"worker{n}", functools.partial(call_all, size)) for n in callers]:
                caller.result()
            cluster.sleep(70.0)
            before = cluster.network.sent
            cluster.sleep(60.0)
            assert not any(peer.suspicion or peer.lost for node in cluster.nodes.values() for peer in node.peers)
            return cluster.network.sent - before

    small, large = frames(8), frames(24)
    assert small > 100
    assert large < 1.5 * small


def test_the_frames_of_a_join_do_not_grow_with_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enrollment, "_NEIGHBORS", 4)

    def frames_of_one(size: int) -> float:
        with SimCluster(1, seed=3) as cluster:
            together(cluster, [functools.partial(cluster.start, f"worker{n}") for n in range(1, size)])
            sent = cluster.network.sent
            assert all(len(list(node.peers)) == size for node in cluster.nodes.values())
            return sent / size

    assert frames_of_one(160) < 1.4 * frames_of_one(80)


def test_members_hear_of_many_departures_in_few_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving, "_MAX_TOLD", 4)

    def frames_of_one(size: int) -> float:
        goers = [f"worker{n}" for n in range(1, size, 2)]
        with SimCluster(size, seed=3) as cluster:
            cluster.run("worker0", functools.partial(call_all, size)).result()
            before = cluster.network.sent
            together(cluster, [functools.partial(cluster.leave, name, timeout=PATIENCE) for name in goers])
            cluster.sleep(1.0)
            assert all(len(list(node.peers)) == size - len(goers) for node in cluster.nodes.values())
            return (cluster.network.sent - before) / len(goers)

    assert frames_of_one(60) < 1.5 * frames_of_one(20)


def test_a_joiner_that_does_not_come_is_lost() -> None:
    """The members have admitted it on the word of the leader. Another worker can have its name."""
    with SimCluster(3, seed=1) as cluster:
        cluster.run("worker0", functools.partial(call_all, 3)).result()
        leader = cluster.nodes["worker0"]
        ghost = leader.admission.enroll(cluster._prepare("ghost")[0])
        assert not isinstance(ghost, str)
        part = leader.worker.part(enrollment.Enrollment)
        assert cluster.run("worker0", lambda: part._tell_members([ghost])).result() == set()
        cluster.run("worker0", lambda: part._check_arrival([ghost])).result()
        for name in ("worker1", "worker2"):
            (peer,) = [peer for peer in cluster.nodes[name].peers if peer.info.name == "ghost"]
            assert "has not come" in peer.lost
        cluster.sleep(30.0)
        cluster.start("ghost")
        for node in cluster.nodes.values():
            (peer,) = [peer for peer in node.peers if peer.info.name == "ghost"]
            assert not peer.lost
