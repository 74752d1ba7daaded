"""A cluster that is split and meets again: what either part has missed, and whom both have let in."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import random

import pytest
import torch

import backhaul as bh
from backhaul._rpc.cluster.peers import Peers
from backhaul._sim.cluster import SimCluster

OPTIONS = bh.Options(connect_timeout=1.0, timeout=5.0, heartbeat_interval=0.5, suspect_after=1.0, lost_after=2.0)

bh.expose(torch.ones, name="ones")


def split(cluster: SimCluster, *sides: list[str]) -> None:
    """Let nothing get from one side to the other until ``heal_all``."""
    for one, other in itertools.permutations(sides, 2):
        for source, target in itertools.product(one, other):
            cluster.cut(source, target, 1000.0)


def start_beside(cluster: SimCluster, name: str, members: list[str]) -> None:
    """Start a worker that can ask only these."""
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
    """Nobody told those of them, and they did not notice: whom they do not know they cannot ask."""
    options = dataclasses.replace(OPTIONS, trusted=trusted)
    with SimCluster(3, seed=1, options=options) as cluster:
        monkeypatch.setattr(cluster.network.partitions, "reconnect", lambda name: None)  # which would end the split
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
        with pytest.raises(bh.UnknownWorkerError, match="has left"):
            call(cluster, "worker2", "worker1")
        assert cluster.shutdown(graceful=True, timeout=10.0) == []


@pytest.mark.parametrize("trusted", [True, False])
def test_members_that_were_replaced_on_both_sides_of_a_split(trusted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the two that came neither had heard of the other."""
    options = dataclasses.replace(OPTIONS, trusted=trusted)
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
        lives = {name: node.peers.own.record.incarnation for name, node in cluster.nodes.items()}
        for node in cluster.nodes.values():
            assert {peer.info.name: peer.record.incarnation for peer in node.peers} == lives
        call(cluster, "worker1", "worker3")
        assert cluster.shutdown(graceful=True, timeout=10.0) == []


def test_a_channel_that_is_lost_before_two_have_compared() -> None:
    """To open another would be to meet once more, and so on for ever where one of them is refused."""
    with SimCluster(2, seed=1, options=bh.Options(heartbeat_interval=0.0)) as cluster:
        call(cluster, "worker1", "worker0")
        cluster.network.drop(cluster.network.channels[0], 0.0, 0.0)
        cluster.sleep(1.0)
        peers, sent = cluster.nodes["worker1"].peers, cluster.network.sent
        cluster.run("worker1", lambda: peers.regained(peers.find("worker0"))).result()
        cluster.sleep(60.0)
        assert cluster.network.sent == sent


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize("first", ["left", "right"])
def test_two_leaders_that_give_one_id_to_two_workers_where_not_everyone_is_believed(
    first: str, trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each half kept its own if that of the first was the earlier: the leader, once they had met, did not let the later
    one in, and the others did not put the earlier one in its place.
    """
    sides = {"left": ["worker0", "worker1"], "right": ["worker2", "worker3"]}
    monkeypatch.setattr(Peers, "_bound", trusted)  # as if there were certificates
    with SimCluster(4, seed=1, options=dataclasses.replace(OPTIONS, trusted=trusted)) as cluster:
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
    """Let everybody call everybody, and hear what comes of it."""
    for one, other in itertools.permutations(cluster.nodes, 2):
        with contextlib.suppress(bh.BackhaulError):
            call(cluster, one, other)
    cluster.sleep(10.0)


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("ends", [("worker0", "worker2"), ("worker2", "worker0")])
def test_a_leader_that_was_cut_off_learns_who_left(
    ends: tuple[str, str], known: bool, trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without trust it believed nobody; and with trust not of one to which it had never had a channel."""
    with SimCluster(3, seed=1, options=dataclasses.replace(OPTIONS, trusted=trusted)) as cluster:
        monkeypatch.setattr(cluster.network.partitions, "reconnect", lambda name: None)  # which would end the split
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
        with pytest.raises(bh.UnknownWorkerError, match="has left"):
            call(cluster, "worker0", "worker1")
        assert cluster.shutdown(graceful=True, timeout=10.0) == []


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize("noticed", [True, False])
def test_a_member_that_only_the_leaver_cannot_reach_is_told_by_others(
    noticed: bool, trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It loses no other channel, so that nobody compares anything with it."""
    with SimCluster(3, seed=1, options=dataclasses.replace(OPTIONS, trusted=trusted)) as cluster:
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
def test_newcomers_pass_on_who_had_left_before_they_came(trusted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who knew are gone themselves when the leader comes back."""
    with SimCluster(3, seed=1, options=dataclasses.replace(OPTIONS, trusted=trusted)) as cluster:
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
def test_members_that_see_different_leaders_do_not_each_drop_the_others_newcomer(
    trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each followed the leader that it saw just then, and what it had dropped it refused for ever."""
    monkeypatch.setattr(Peers, "_bound", trusted)  # as if there were certificates
    with SimCluster(4, seed=1, options=dataclasses.replace(OPTIONS, trusted=trusted)) as cluster:
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
            for newcomer, member in (("right", "worker2"), ("left", "worker3")):
                with contextlib.suppress(bh.BackhaulError):
                    call(cluster, newcomer, member)
                cluster.sleep(5.0)
        cluster.network.partitions.heal_all()
        meet(cluster)
        meet(cluster)
        assert [cluster.nodes[f"worker{n}"].peers.find(4).info.name for n in range(4)] == ["left"] * 4
        for n in range(4):
            call(cluster, "left", f"worker{n}")
        assert cluster.shutdown(graceful=True, timeout=10.0) == []


@pytest.mark.parametrize("trusted", [True, False])
def test_a_leader_that_was_cut_off_lets_in_one_that_was_restarted(
    trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had never had a channel to the one before, had not noticed its loss, and had nobody to ask."""
    with SimCluster(3, seed=1, options=dataclasses.replace(OPTIONS, trusted=trusted)) as cluster:
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
        lives = {name: node.peers.own.record.incarnation for name, node in cluster.nodes.items()}
        for node in cluster.nodes.values():
            assert {peer.info.name: peer.record.incarnation for peer in node.peers} == lives
        assert cluster.shutdown(graceful=True, timeout=10.0) == []


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_all_know_who_is_there_once_they_have_met_again(
    seed: int, trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster is split in ways drawn from the seed. Meanwhile some leave, others come, some of them under the name
    or the id of one that has left, and others are restarted, on one side or the other.
    """
    draw = random.Random(seed)
    with SimCluster(5, seed=seed, options=dataclasses.replace(OPTIONS, trusted=trusted)) as cluster:
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
            lives = {name: node.peers.own.record.incarnation for name, node in cluster.nodes.items()}
            for node in cluster.nodes.values():
                assert {peer.info.name: peer.record.incarnation for peer in node.peers} == lives
        assert cluster.shutdown(graceful=True, timeout=30.0) == []
