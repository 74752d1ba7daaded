"""A cluster that is partitioned and heals: what each part missed, and which workers it admitted meanwhile."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import random

import pytest
import torch

import backhaul as bh
from backhaul._rpc.cluster.certificate_names import CertificateNames
from backhaul._sim.cluster import SimCluster

OPTIONS = bh.Options(
    connect_timeout=1.0, timeout=5.0, liveness=bh.Liveness(heartbeat_interval=0.5, suspect_after=1.0, lost_after=2.0)
)

bh.expose(torch.ones, name="ones")


def split(cluster: SimCluster, *sides: list[str]) -> None:
    """Cut all connections between the sides until ``heal_all``."""
    for one, other in itertools.permutations(sides, 2):
        for source, target in itertools.product(one, other):
            cluster.cut(source, target, 1000.0)


def start_beside(cluster: SimCluster, name: str, members: list[str]) -> None:
    """Start a worker that knows the addresses of these members only."""
    everyone = cluster.nodes
    cluster.nodes = {member: everyone[member] for member in members}
    cluster.start(name)
    cluster.nodes = everyone | cluster.nodes


def call(cluster: SimCluster, source: str, target: str) -> None:
    cluster.run(source, functools.partial(bh.rpc_sync, target, "ones", args=(1,))).result()


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize("ends", [("worker0", "worker2"), ("worker2", "worker0")])
def test_members_that_came_and_went_while_others_were_cut_off(
    ends: tuple[str, str], trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The members that were cut off did not hear of them: a member cannot ask a worker that it does not know."""
    options = dataclasses.replace(OPTIONS, security=dataclasses.replace(OPTIONS.security, trusted=trusted))
    with SimCluster(3, seed=1, options=options) as cluster:
        monkeypatch.setattr(cluster.network.partitions, "reconnect", lambda name: None)  # a return would end it
        call(cluster, "worker0", "worker2")
        call(cluster, "worker1", "worker2")
        split(cluster, ["worker0", "worker1", "late"], ["worker2"])
        cluster.sleep(5.0)
        start_beside(cluster, "late", ["worker0", "worker1"])
        cluster.leave("worker1", timeout=10.0)
        cluster.network.partitions.heal_all()
        call(cluster, *ends)
        cluster.sleep(5.0)
        assert [peer.info.name for peer in cluster.nodes["worker2"].peers] == ["worker0", "worker2", "late"]
        call(cluster, "worker2", "late")
        with pytest.raises(bh.errors.UnknownWorkerError, match="has left"):
            call(cluster, "worker2", "worker1")
        assert cluster.shutdown(graceful=True, timeout=10.0) == []


@pytest.mark.parametrize("trusted", [True, False])
def test_members_replaced_on_both_sides_of_a_partition(trusted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of the two new workers had heard of the other."""
    options = dataclasses.replace(OPTIONS, security=dataclasses.replace(OPTIONS.security, trusted=trusted))
    with SimCluster(4, seed=1, options=options) as cluster:
        monkeypatch.setattr(cluster.network.partitions, "reconnect", lambda name: None)
        for one, other in itertools.permutations(cluster.nodes, 2):
            call(cluster, one, other)
        split(cluster, ["worker0", "worker1"], ["worker2", "worker3"])
        cluster.sleep(5.0)
        for victim, member in (("worker1", "worker0"), ("worker3", "worker2")):
            cluster.crash(victim)
            start_beside(cluster, victim, [member])
        cluster.network.partitions.heal_all()
        call(cluster, "worker2", "worker0")
        cluster.sleep(10.0)
        incarnations = {name: node.peers.own.record.incarnation for name, node in cluster.nodes.items()}
        for node in cluster.nodes.values():
            assert {peer.info.name: peer.record.incarnation for peer in node.peers} == incarnations
        call(cluster, "worker1", "worker3")
        assert cluster.shutdown(graceful=True, timeout=10.0) == []


def test_a_channel_that_is_lost_before_two_members_have_compared() -> None:
    """Opening another channel would start another comparison, and so on forever if one of the two is refused."""
    with SimCluster(2, seed=1, options=bh.Options(liveness=bh.Liveness(heartbeat_interval=0.0))) as cluster:
        call(cluster, "worker1", "worker0")
        cluster.network.drop(cluster.network.channels[0], 0.0, 0.0)
        cluster.sleep(1.0)
        node, sent = cluster.nodes["worker1"], cluster.network.sent
        cluster.run("worker1", lambda: node.partition_healing.compare_with(node.peers.find("worker0"))).result()
        cluster.sleep(60.0)
        assert cluster.network.sent == sent


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize("first", ["left", "right"])
def test_two_leaders_that_give_one_id_to_two_workers_where_only_the_leader_is_believed(
    first: str, trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, each half kept its own worker if the one that the leader had enrolled was the earlier: after the partition
    the leader did not admit the later one, and the others did not replace it by the earlier one.
    """
    sides = {"left": ["worker0", "worker1"], "right": ["worker2", "worker3"]}
    monkeypatch.setattr(CertificateNames, "bound", trusted)  # as if there were certificates
    with SimCluster(
        4, seed=1, options=dataclasses.replace(OPTIONS, security=dataclasses.replace(OPTIONS.security, trusted=trusted))
    ) as cluster:
        monkeypatch.setattr(cluster.network.partitions, "reconnect", lambda name: None)
        split(cluster, *([*members, side] for side, members in sides.items()))
        for side in (first, "left" if first == "right" else "right"):
            start_beside(cluster, side, sides[side])
        assert [cluster.nodes[side].peers.own.record.id for side in sides] == [4, 4]
        cluster.network.partitions.heal_all()
        for one, other in itertools.permutations(cluster.nodes, 2):
            with contextlib.suppress(bh.BackhaulError):
                call(cluster, one, other)
        cluster.sleep(10.0)
        assert [cluster.nodes[f"worker{n}"].peers.find(4).info.name for n in range(4)] == ["left"] * 4
        for n in range(4):
            call(cluster, "left", f"worker{n}")
            with pytest.raises(bh.PeerLostError, match="refused"):
                call(cluster, "right", f"worker{n}")
        assert cluster.shutdown(graceful=True, timeout=10.0) == []


def members_of(cluster: SimCluster, name: str) -> list[str]:
    return [peer.info.name for peer in cluster.nodes[name].peers]


def meet(cluster: SimCluster) -> None:
    """Let every worker call every other one, and wait until all members have compared."""
    for one, other in itertools.permutations(cluster.nodes, 2):
        with contextlib.suppress(bh.BackhaulError):
            call(cluster, one, other)
    cluster.sleep(10.0)


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("ends", [("worker0", "worker2"), ("worker2", "worker0")])
def test_a_leader_that_was_cut_off_learns_which_members_left(
    ends: tuple[str, str], known: bool, trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, it believed no member without trust; and with trust, not about a worker to which it never had a channel."""
    with SimCluster(
        3, seed=1, options=dataclasses.replace(OPTIONS, security=dataclasses.replace(OPTIONS.security, trusted=trusted))
    ) as cluster:
        monkeypatch.setattr(cluster.network.partitions, "reconnect", lambda name: None)  # a return would end it
        call(cluster, "worker0", "worker2")
        if known:
            call(cluster, "worker0", "worker1")
        split(cluster, ["worker0"], ["worker1", "worker2"])
        cluster.sleep(5.0)
        cluster.leave("worker1", timeout=10.0)
        assert members_of(cluster, "worker2") == ["worker0", "worker2"]
        cluster.network.partitions.heal_all()
        call(cluster, *ends)
        cluster.sleep(5.0)
        assert members_of(cluster, "worker0") == ["worker0", "worker2"]
        with pytest.raises(bh.errors.UnknownWorkerError, match="has left"):
            call(cluster, "worker0", "worker1")
        assert cluster.shutdown(graceful=True, timeout=10.0) == []


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize("noticed", [True, False])
def test_a_member_that_only_the_leaving_worker_cannot_reach_is_told_by_others(
    noticed: bool, trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It loses no other channel, so no member compares with it."""
    with SimCluster(
        3, seed=1, options=dataclasses.replace(OPTIONS, security=dataclasses.replace(OPTIONS.security, trusted=trusted))
    ) as cluster:
        monkeypatch.setattr(cluster.network.partitions, "reconnect", lambda name: None)
        for one, other in itertools.combinations(cluster.nodes, 2):
            call(cluster, one, other)
        split(cluster, ["worker0"], ["worker1"])
        if noticed:
            cluster.sleep(5.0)
        cluster.leave("worker1", timeout=10.0)
        cluster.sleep(5.0)
        assert members_of(cluster, "worker0") == members_of(cluster, "worker2") == ["worker0", "worker2"]
        assert cluster.shutdown(graceful=True, timeout=10.0) == []


@pytest.mark.parametrize("trusted", [True, False])
def test_joiners_pass_on_which_members_left_before_they_came(trusted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The members that heard it first are gone when the leader is back."""
    with SimCluster(
        3, seed=1, options=dataclasses.replace(OPTIONS, security=dataclasses.replace(OPTIONS.security, trusted=trusted))
    ) as cluster:
        monkeypatch.setattr(cluster.network.partitions, "reconnect", lambda name: None)
        call(cluster, "worker0", "worker2")
        call(cluster, "worker1", "worker2")
        split(cluster, ["worker0"], ["worker1", "worker2", "late"])
        cluster.sleep(5.0)
        cluster.leave("worker1", timeout=10.0)
        start_beside(cluster, "late", ["worker2"])
        cluster.leave("worker2", timeout=10.0)
        cluster.network.partitions.heal_all()
        call(cluster, "late", "worker0")
        cluster.sleep(5.0)
        assert sorted(members_of(cluster, "worker0")) == sorted(members_of(cluster, "late")) == ["late", "worker0"]
        assert cluster.shutdown(graceful=True, timeout=10.0) == []


@pytest.mark.parametrize("trusted", [True, False])
def test_members_that_see_different_leaders_do_not_each_drop_the_other_joiner(
    trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, each member followed the leader that it saw at that moment, and refused the dropped joiner forever."""
    monkeypatch.setattr(CertificateNames, "bound", trusted)  # as if there were certificates
    with SimCluster(
        4, seed=1, options=dataclasses.replace(OPTIONS, security=dataclasses.replace(OPTIONS.security, trusted=trusted))
    ) as cluster:
        monkeypatch.setattr(cluster.network.partitions, "reconnect", lambda name: None)
        left, right = ["worker0", "worker2"], ["worker1", "worker3"]
        split(cluster, [*left, "left"], [*right, "right"])
        start_beside(cluster, "left", left)
        start_beside(cluster, "right", right)
        assert [cluster.nodes[side].peers.own.record.id for side in ("left", "right")] == [4, 4]
        cluster.network.partitions.heal_all()
        split(cluster, ["worker0"], ["worker1", "worker2", "right"])  # worker2 sees worker1 as the leader
        split(cluster, ["worker1"], ["worker3", "left"])  # and worker3 sees worker0
        cluster.sleep(5.0)
        for _ in range(2):
            for joiner, member in (("right", "worker2"), ("left", "worker3")):
                with contextlib.suppress(bh.BackhaulError):
                    call(cluster, joiner, member)
                cluster.sleep(5.0)
        cluster.network.partitions.heal_all()
        meet(cluster)
        meet(cluster)
        assert [cluster.nodes[f"worker{n}"].peers.find(4).info.name for n in range(4)] == ["left"] * 4
        for n in range(4):
            call(cluster, "left", f"worker{n}")
        assert cluster.shutdown(graceful=True, timeout=10.0) == []


@pytest.mark.parametrize("trusted", [True, False])
def test_a_leader_that_was_cut_off_admits_a_restarted_worker(trusted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It never had a channel to the earlier incarnation, had not noticed its loss, and had no member to ask."""
    with SimCluster(
        3, seed=1, options=dataclasses.replace(OPTIONS, security=dataclasses.replace(OPTIONS.security, trusted=trusted))
    ) as cluster:
        monkeypatch.setattr(cluster.network.partitions, "reconnect", lambda name: None)
        call(cluster, "worker0", "worker2")
        call(cluster, "worker1", "worker2")
        split(cluster, ["worker0"], ["worker1", "worker2"])
        cluster.sleep(5.0)
        cluster.crash("worker1")
        start_beside(cluster, "worker1", ["worker2"])
        cluster.network.partitions.heal_all()
        with contextlib.suppress(bh.PeerLostError):
            call(cluster, "worker1", "worker0")
        cluster.sleep(5.0)
        call(cluster, "worker1", "worker0")
        incarnations = {name: node.peers.own.record.incarnation for name, node in cluster.nodes.items()}
        for node in cluster.nodes.values():
            assert {peer.info.name: peer.record.incarnation for peer in node.peers} == incarnations
        assert cluster.shutdown(graceful=True, timeout=10.0) == []


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_all_members_agree_after_partitions(seed: int, trusted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seed decides how the cluster is partitioned. Meanwhile some workers leave, others join, some with the name or
    the id of a worker that has left, and others are restarted, on either side.
    """
    draw = random.Random(seed)
    with SimCluster(
        5,
        seed=seed,
        options=dataclasses.replace(OPTIONS, security=dataclasses.replace(OPTIONS.security, trusted=trusted)),
    ) as cluster:
        monkeypatch.setattr(cluster.network.partitions, "reconnect", lambda name: None)
        for _ in range(3):
            for one, other in itertools.combinations(cluster.nodes, 2):
                if draw.random() < 0.5:
                    call(cluster, one, other)
            names = draw.sample(sorted(cluster.nodes), len(cluster.nodes))
            cut = draw.randrange(1, len(names))
            sides = [names[:cut], names[cut:]]
            comes = draw.choice([f"worker{n}" for n in range(9) if f"worker{n}" not in names])
            split(cluster, [*sides[0], comes], sides[1])
            if draw.random() < 0.5:
                cluster.sleep(5.0)
            for side in sides:
                if len(side) > 1 and draw.random() < 0.7:
                    cluster.leave(side.pop(), timeout=10.0)
            start_beside(cluster, comes, sides[0])
            for side in sides:
                if len(side) > 1 and draw.random() < 0.5:
                    cluster.crash(side[0])
                    start_beside(cluster, side[0], side[1:])
            cluster.network.partitions.heal_all()
            for _ in range(3):
                meet(cluster)
            incarnations = {name: node.peers.own.record.incarnation for name, node in cluster.nodes.items()}
            for node in cluster.nodes.values():
                assert {peer.info.name: peer.record.incarnation for peer in node.peers} == incarnations
        assert cluster.shutdown(graceful=True, timeout=30.0) == []
