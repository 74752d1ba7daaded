"""Regression tests for errors that the simulation found."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable

import msgspec
import pytest
import torch

import backhaul as bh
from backhaul._autograd.messages import AutogradKind
from backhaul._rpc.calls.pending_call import Pending
from backhaul._rpc.node import join
from backhaul._sim.channel import SimChannel
from backhaul._sim.cluster import SimCluster, SimProgram
from backhaul._sim.network import NetworkConditions
from backhaul._transport.base import Channel, ChannelBrokenError
from backhaul._wire.frames import Frame
from backhaul._wire.messages import Hello, Kind, pack


def test_a_release_that_is_lost_with_its_channel() -> None:
    """Seeds 6 and 36: the driver dropped the context, but the worker never learned of it."""
    with SimCluster(2, seed=1) as cluster:
        send = SimChannel.send

        def lossy(channel: SimChannel, frame: Frame, *, timeout: float | None = None) -> None:
            if frame.kind == AutogradKind.RELEASE and channel.source == "worker0" and not lost:
                lost.append(frame)
                cluster.network.drop(channel, 0.0, 1.0)
            else:
                send(channel, frame, timeout=timeout)

        lost: list[Frame] = []
        SimChannel.send = lossy  # type: ignore[method-assign]
        try:
            cluster.run("worker0", step).result()
            cluster.sleep(5.0)
        finally:
            SimChannel.send = send  # type: ignore[method-assign]
        assert lost
        assert not cluster.leftovers()


def test_a_release_over_a_channel_that_only_the_other_end_has_lost() -> None:
    """Seed 71: the worker lost the channel and asked over another one long before the driver noticed."""

    def program() -> None:
        with bh.context():
            bh.rpc_sync("worker1", torch.mul, args=(torch.ones(2, requires_grad=True), 2))
            bh.current_worker().runtime.one_shot().wait(1.0)

    with SimCluster(2, seed=1) as cluster:
        going = cluster.run("worker0", program)
        cluster.sleep(0.5)
        (used,) = (channel for channel in cluster.network.channels if channel.source == "worker0")
        cluster.network.drop(used, 5.0, 0.0)
        going.result()
        cluster.sleep(10.0)
        assert not cluster.leftovers()


def test_a_connection_that_is_given_up_after_the_one_that_followed_it() -> None:
    """Seed 387: its loss made this worker drop the newer channel too, so the release of a context was never sent."""
    with SimCluster(2, seed=1) as cluster:
        cluster.run("worker0", step).result()
        peers = cluster.nodes["worker1"].peers
        peer = peers.find("worker0")
        (first,) = (channel for channel, _ in peers.connections.channels())
        endpoint = cluster.nodes["worker0"].worker.endpoint

        def connect_again() -> Channel:
            again = endpoint.connect(peers.own.record.addresses[0], timeout=1.0)
            record = pack(cluster.nodes["worker0"].peers.own.record)
            again.send(Frame(Kind.HELLO, 0, pack(Hello("worker1", peers.own.record.incarnation, record))))
            return again

        again = cluster.run("worker0", connect_again).result()
        cluster.sleep(1.0)
        assert peer.incoming is not first
        again.close()
        cluster.sleep(1.0)
        assert (peer.channel, peer.incoming, peer.lost) == (first, first, "")


def step() -> None:
    weight = torch.ones(2, requires_grad=True)
    with bh.context() as ctx:
        ctx.backward(bh.rpc_sync("worker1", torch.mul, args=(weight, 2)).sum())
        assert ctx.grads[weight].tolist() == [2.0, 2.0]


class Thing:
    """An object that weak references can refer to."""


def test_values_whose_references_die_together() -> None:
    """Seed 82: the last of the values stayed until another value was freed."""

    def program() -> list[weakref.ref[Thing]]:
        things = [Thing(), Thing(), Thing()]
        rrefs = [bh.RRef(thing) for thing in things]
        watched = [weakref.ref(thing) for thing in things]
        del things
        rrefs.clear()
        return watched

    with SimCluster(1, seed=1) as cluster:
        watched = cluster.run("worker0", program).result()
        cluster.sleep(1.0)
        gc.collect()
        assert [ref() for ref in watched] == [None] * 3


def test_a_channel_that_is_lost_while_a_call_is_being_sent() -> None:
    """Seed 230: the call failed twice, once because of the loss and once because of the failed send."""
    with SimCluster(2, seed=1) as cluster:
        agent = cluster.nodes["worker0"].client

        def break_down(pending: Pending, send: Callable[[], None]) -> None:
            assert pending.channel is not None
            pending.channel.close()
            cluster.sleep(1.0)  # others notice that first
            raise ChannelBrokenError("broken")

        def program() -> tuple[str | None, str | None]:
            future = bh.rpc_async("worker1", torch.ones, args=(1,))
            return failure(future.wait), failure(lambda: bh.rpc_sync("worker1", torch.ones, args=(1,)))

        def failure(call: Callable[[], object]) -> str | None:
            try:
                call()
            except bh.PeerLostError as error:
                return error.worker
            return None

        agent.outlet = break_down
        assert cluster.run("worker0", program).result() == ("worker1", "worker1")
        agent.outlet = None
        assert not agent.pending


def relay(value: bh.RRef[torch.Tensor]) -> torch.Tensor:
    return value.to_here(timeout=2.0)


def test_a_value_that_was_never_asked_for() -> None:
    """Seed 340: a worker passed a reference on, but the call that should have made its value was lost. The workers that
    asked for the value gave up, but its owner waited forever, and so did every worker that shut down.
    """
    with SimCluster(3, seed=1) as cluster:
        agent = cluster.nodes["worker0"].client

        def program() -> bool:
            agent.outlet = lambda pending, send: None
            rref = bh.remote("worker1", torch.ones, args=(1,), timeout=5.0)
            agent.outlet = None
            try:
                bh.rpc_sync("worker2", relay, args=(rref,))
            except bh.CallTimeoutError:
                return True
            return False

        assert cluster.run("worker0", program).result()
        cluster.sleep(10.0)
        cluster.collect()
        cluster.sleep(1.0)
        assert not cluster.leftovers()
        assert cluster.shutdown(graceful=True, timeout=10.0) == []


def wait_until_cancelled_and_ask() -> None:
    with contextlib.suppress(bh.CallCancelledError):
        bh.current_worker().runtime.one_shot().wait(2.0)
        rref = bh.remote("worker1", torch.ones, args=(1,))
        rref.to_here()


def test_a_value_that_is_asked_for_where_nothing_may_be_called_any_more() -> None:
    """Seed 48: a handler whose caller was lost asked its own worker for a value. The call failed at once. The value
    kept the error, the error kept its frames, and the frames kept the reference to the value: a cycle that stayed.
    """
    with SimCluster(2, seed=1) as cluster:
        cluster.run("worker0", lambda: bh.rpc_async("worker1", wait_until_cancelled_and_ask, timeout=0)).result()
        cluster.sleep(1.0)
        cluster.crash("worker0")
        cluster.sleep(5.0)
        cluster.collect()
        cluster.sleep(1.0)
        assert not cluster.leftovers()


unset: list[bh.Future[torch.Tensor]] = []


@bh.async_execution
def later() -> bh.Future[torch.Tensor]:
    unset.append(bh.Future())
    return unset[-1]


def fail() -> None:
    raise KeyError("it fails")


@pytest.mark.parametrize(
    "ask",
    [
        lambda rref: rref.to_here(),
        lambda rref: rref.local_value(),
        lambda rref: rref.backward(),
        lambda rref: rref._get_type(),
        lambda rref: rref._get_type(blocking=False).wait(),
        lambda rref: rref._ask().wait(),
        lambda rref: rref._ask(timeout=0).wait(),
        lambda rref: rref.rpc_sync().sum(),
        lambda rref: rref.remote().sum().to_here(),
        lambda rref: bh.rpc_sync("worker1", relay, args=(rref,)),
    ],
    ids=["here", "local_value", "backward", "type", "type_later", "ask", "ask_for_ever", "rpc_sync", "remote", "relay"],
)
@pytest.mark.parametrize("failing", [fail, later])
def test_a_value_that_could_not_be_made(failing: Callable[[], object], ask: Callable[[object], object]) -> None:
    """Its error kept the frames of the callers that asked for it, and these frames kept a reference to the value."""

    def program() -> None:
        rref = bh.remote("worker0", failing)
        if failing is later:
            bh.current_worker().runtime.one_shot().wait(1.0)
            unset.pop().set_exception(KeyError("it fails"))
        with pytest.raises(KeyError):
            ask(rref)

    with SimCluster(2, seed=1) as cluster:
        cluster.run("worker0", program).result()
        for _ in range(3):
            cluster.collect()
            cluster.sleep(1.0)
        assert not cluster.leftovers()


def test_a_worker_that_connects_again() -> None:
    """Seed 449: only one end knows that the first connection is dead. The other end uses the newer connection."""
    with SimCluster(2, seed=1, conditions=NetworkConditions(duplicates=1.0)) as cluster:
        cluster.run("worker0", lambda: bh.rpc_sync("worker1", torch.ones, args=(1,))).result()
        back = cluster.run("worker1", lambda: bh.rpc_sync("worker0", torch.ones, args=(1,), timeout=1.0))
        assert back.result().tolist() == [1.0]


def test_a_driver_that_has_come_back() -> None:
    """Seed 700: its first context had an id that other workers knew as released. They recorded nothing, and backward
    returned without their gradients.
    """
    with SimCluster(2, seed=1) as cluster:
        cluster.run("worker0", step).result()
        cluster.crash("worker0")
        cluster.sleep(1.0)
        cluster.start("worker0")
        cluster.run("worker0", step).result()


def test_a_reference_whose_value_is_lost() -> None:
    """Seed 25: the error of passing the reference on said that it cannot be sent, but not why."""
    with SimCluster(3, seed=1) as cluster:
        agent = cluster.nodes["worker0"].client

        def break_down(pending: Pending, send: Callable[[], None]) -> None:
            raise ChannelBrokenError("broken")

        def program() -> str | None:
            agent.outlet = break_down
            rref = bh.remote("worker1", torch.ones, args=(1,))
            agent.outlet = None
            try:
                bh.rpc_sync("worker2", relay, args=(rref,))
            except bh.PeerLostError as error:
                return error.worker
            return None

        assert cluster.run("worker0", program).result() == "worker1"


def pass_along(x: torch.Tensor, path: list[str]) -> torch.Tensor:
    return bh.rpc_sync(path[0], pass_along, args=(x * 2, path[1:])) if path else x * 2


def test_a_context_that_comes_after_its_end() -> None:
    """Seed 649: the driver crashed while a handler of one of its calls connected to another worker. The request of the
    handler then brought the context to a worker that did not know of its end.
    """

    def program() -> None:
        with bh.context():
            pass_along(torch.ones(2, requires_grad=True), ["worker1", "worker2"])

    with SimCluster(3, seed=1) as cluster:
        cluster.cut("worker1", "worker2", 1.0)
        cluster.run("worker0", program)
        cluster.sleep(0.5)
        assert ("worker1", "num_autograd_contexts") in cluster.leftovers()
        cluster.crash("worker0")
        cluster.sleep(30.0)
        assert not cluster.leftovers()


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("crashing", [("worker0",), ("worker0", "worker1"), ("worker1", "worker0")])
def test_contexts_of_a_driver_that_is_lost(crashing: tuple[str, ...], restarted: bool) -> None:
    """All workers drop them, also workers that never talked to the driver."""

    def program() -> None:
        x = torch.ones(2, requires_grad=True)
        with bh.context():
            pass_along(x, ["worker1", "worker2", "worker3"])
            gate = bh.current_worker().runtime.one_shot()
            gate.wait()

    with SimCluster(4, seed=1) as cluster:
        cluster.run("worker0", program)
        cluster.sleep(5.0)
        assert len(cluster.leftovers()) == 4
        for name in crashing:
            cluster.crash(name)
            cluster.sleep(0.5)
        if restarted:
            cluster.start("worker0")
        cluster.sleep(60.0)
        assert not cluster.leftovers()


def test_a_release_while_only_the_other_end_knows_of_a_loss() -> None:
    """Seed 107: the worker asked over a new channel to learn of the release, but the driver used the old channel."""

    def program() -> None:
        x = torch.ones(2, requires_grad=True)
        with bh.context():
            bh.rpc_sync("worker1", torch.mul, args=(x, 2))
            (channel,) = [channel for channel in cluster.network.channels if channel.source == "worker0"]
            cluster.network.drop(channel, 1.0, 0.0)
            bh.current_worker().runtime.one_shot().wait(0.5)

    with SimCluster(2, seed=1) as cluster:
        cluster.run("worker0", program).result()
        cluster.sleep(5.0)
        assert not cluster.leftovers()


def test_workers_that_join_at_the_same_time() -> None:
    """One of them contacted a worker that was just being replaced, and gave up."""
    with SimCluster(4, seed=5) as cluster:
        for _ in range(5):
            for name in ("worker1", "worker2", "worker3"):
                cluster.crash(name)
            coming = [cluster.spawn(functools.partial(cluster.start, name), name) for name in cluster_names(1, 4)]
            assert len(coming) == 3
            cluster.sleep(10.0)
            assert sorted(cluster.nodes) == list(cluster_names(0, 4))
        for name in cluster_names(1, 4):
            cluster.run("worker0", functools.partial(bh.rpc_sync, name, torch.ones, args=(1,))).result()
        assert cluster.shutdown(graceful=True, timeout=10.0) == []


def cluster_names(first: int, last: int) -> tuple[str, ...]:
    return tuple(f"worker{number}" for number in range(first, last))


def test_a_channel_whose_loss_is_reported_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed 2074: the leader refused a joiner that it did not know yet. The joiner learned of the refusal before it had
    finished connecting. It kept the channel, sent READY over it, and waited for an answer that never came.
    """
    send, lost = SimChannel.send, []

    def lossy(channel: SimChannel, frame: Frame, *, timeout: float | None = None) -> None:
        send(channel, frame, timeout=timeout)
        if frame.kind == Kind.HELLO and not lost:
            lost.append(channel)
            cluster.network.drop(channel, 0.0, 0.0)
            cluster.sleep(1.0)

    with SimCluster(2, seed=1) as cluster:
        monkeypatch.setattr(SimChannel, "send", lossy)
        call = functools.partial(bh.rpc_sync, "worker0", torch.ones, args=(1,))
        with pytest.raises(bh.PeerLostError):
            cluster.run("worker1", call).result()
        peer = cluster.nodes["worker1"].peers.find("worker0")
        assert lost
        assert (peer.channel, bool(peer.lost)) == (None, True)
        assert cluster.shutdown(graceful=True, timeout=10.0) == []


def test_a_refusal_after_which_the_other_end_has_closed_the_channel() -> None:
    """Seed 2074: the refusal and the close came at once. The reason of the loss was dropped: a joiner did not retry."""
    with SimCluster(2, seed=1) as cluster:
        cluster.run("worker1", lambda: bh.rpc_sync("worker0", torch.ones, args=(1,))).result()
        reasons: list[str] = []
        cluster.nodes["worker1"].peers.on_lost(lambda peer, channel, reason: reasons.append(reason))
        cluster.pause("worker1", 1.0)
        peers = cluster.nodes["worker0"].peers
        (channel,) = (channel for channel, _ in peers.connections.channels())
        cluster.run("worker0", lambda: peers.connections.refuse(channel, "worker1", "for a test")).result()
        cluster.sleep(2.0)
        assert reasons == ["refused: for a test"]


def test_a_joiner_that_loses_a_channel_while_it_contacts_a_member(monkeypatch: pytest.MonkeyPatch) -> None:
    """The joiner treated the member at the other end as lost, and the member never learned of the joiner."""
    send, lost = SimChannel.send, []

    def lossy(channel: SimChannel, frame: Frame, *, timeout: float | None = None) -> None:
        if frame.kind == Kind.HELLO and (channel.source, channel.target) == ("late", "worker1") and not lost:
            lost.append(channel)
            cluster.network.drop(channel, 0.0, 0.0)
        else:
            send(channel, frame, timeout=timeout)

    with SimCluster(3, seed=1) as cluster:
        monkeypatch.setattr(SimChannel, "send", lossy)
        cluster.start("late")
        assert lost
        assert [node.peers.find("late").record.id for node in cluster.nodes.values()] == [3] * 4


def test_a_replacement_that_not_all_workers_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed 197: the driver knew the replacement of a lost worker, but another worker that called it did not. That
    worker asked the driver again and again, without a pause and beyond its timeout.
    """

    send = SimChannel.send

    def lossy(channel: SimChannel, frame: Frame, *, timeout: float | None = None) -> None:
        if (channel.source, channel.target) == ("worker2", "worker1"):
            cluster.network.drop(channel, 0.0, 0.0)
        else:
            send(channel, frame, timeout=timeout)

    def program() -> float:
        with bh.context(replay=bh.Replay(timeout=5.0)):
            x = torch.ones(2, requires_grad=True)
            replaced.wait(60.0)
            began = cluster.scheduler.now
            with pytest.raises(bh.BackhaulError, match="worker2"):
                bh.rpc_sync("worker1", pass_along, args=(x, ["worker2"]), timeout=8.0)
            return cluster.scheduler.now - began

    with SimCluster(3, seed=1, options=bh.Options(connect_timeout=1.0)) as cluster:
        replaced = cluster.nodes["worker0"].worker.runtime.one_shot()
        going = cluster.run("worker0", program)
        cluster.sleep(1.0)
        cluster.crash("worker2")
        monkeypatch.setattr(SimChannel, "send", lossy)
        cluster.start("worker2")
        replaced.open()
        assert going.result() < 20.0
        assert cluster.network.sent < 500


@pytest.mark.parametrize("first", ["left", "right"])
def test_two_leaders_that_give_one_id_to_two_workers(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed 1409: a partitioned cluster has two leaders. When the halves are connected again, all members keep the same
    one of the two joiners and refuse the other. No member waits for the refused one, and it waits for no member.
    """
    sides = {"left": ["worker0", "worker1"], "right": ["worker2", "worker3"]}
    options = bh.Options(
        connect_timeout=1.0,
        timeout=5.0,
        liveness=bh.Liveness(heartbeat_interval=0.5, suspect_after=1.0, lost_after=2.0),
    )
    with SimCluster(4, seed=1, options=options) as cluster:
        monkeypatch.setattr(cluster.network.partitions, "reconnect", lambda name: None)  # it would end the partition
        for one in [*sides["left"], "left"]:
            for other in [*sides["right"], "right"]:
                cluster.cut(one, other, 1000.0)
                cluster.cut(other, one, 1000.0)
        everyone = cluster.nodes
        for side in (first, "left" if first == "right" else "right"):
            cluster.nodes = {name: everyone[name] for name in sides[side]}
            cluster.start(side)
            everyone = everyone | cluster.nodes
        cluster.nodes = everyone
        assert [everyone[side].peers.own.record.id for side in sides] == [4, 4]
        assert [everyone[side].peers.own.record.epoch for side in sides] == [1, 1]
        cluster.network.partitions.heal_all()
        for _ in range(3):
            for one in everyone:
                for other in everyone:
                    with contextlib.suppress(bh.BackhaulError):
                        cluster.run(one, functools.partial(bh.rpc_sync, other, torch.ones, args=(1,))).result()
            cluster.sleep(5.0)
        members = [everyone[name].peers.find(4).info.name for name in cluster_names(0, 4)]
        assert members in (["left"] * 4, ["right"] * 4)
        (loser,) = sides.keys() - set(members)
        with pytest.raises(bh.PeerLostError, match="refused"):
            cluster.run(loser, functools.partial(bh.rpc_sync, "worker0", torch.ones, args=(1,))).result()
        assert cluster.shutdown(graceful=True, timeout=10.0) == []


@pytest.mark.parametrize("silent", ["nobody reads there", "cut off", "died"])
def test_an_address_that_does_not_answer_keeps_nobody_from_joining(silent: str) -> None:
    """The joiner waited there until its timeout, although it had another address or would have got one."""
    options = bh.Options(rendezvous_timeout=60.0)
    with SimCluster(3, seed=1, options=options) as cluster:
        addresses = [node.worker.endpoint.addresses[0] for node in cluster.nodes.values()]
        record, endpoint, runtime = cluster._prepare("late")
        if silent == "nobody reads there":
            addresses[0] = cluster.network.endpoint(cluster.scheduler.new_process("silent")).addresses[0]
        elif silent == "cut off":
            cluster.cut("late", "worker1", 1000.0)
            del addresses[0]
        else:  # worker1 treats it as the leader until its heartbeats are missing
            cluster.run("worker1", lambda: bh.rpc_sync("worker0", torch.ones, args=(1,))).result()
            cluster.crash("worker0", silent=True)
            addresses = [addresses[1]]
        come = functools.partial(join, endpoint, record, addresses, options, runtime=runtime)
        node = SimProgram(cluster.scheduler, runtime, come).result()
        assert node.peers.own.record.id == 3
        node.worker.abandon()


def test_ids_of_joiners_that_take_long() -> None:
    """Seed 2074: the leader was paused after it had enrolled a joiner, and then gave the same id to another joiner."""
    with SimCluster(2, seed=1) as cluster:
        peers = cluster.nodes["worker0"].peers

        def enrol(name: str, incarnation: str) -> int:
            joiner = msgspec.structs.replace(peers.own.record, id=-1, name=name, incarnation=incarnation)
            enrolled = cluster.nodes["worker0"].admission.enroll(joiner)
            cluster.sleep(60.0)
            assert not isinstance(enrolled, str)
            return enrolled.id

        given = cluster.run("worker0", lambda: [enrol("late", "1"), enrol("other", "2"), enrol("late", "3")])
        assert given.result() == [2, 3, 2]


@pytest.mark.parametrize("near", [0.0, 2.0])
@pytest.mark.parametrize("source", ["worker0", "worker2"])
def test_a_channel_that_is_lost_during_a_graceful_shutdown(source: str, near: float) -> None:
    """The leader treated the worker at the other end as gone and let the others leave while that worker called them."""

    def work() -> None:
        for _ in range(10):
            bh.rpc_sync("worker1", torch.ones, args=(1,))
            bh.current_worker().runtime.one_shot().wait(1.0)

    with SimCluster(3, seed=1) as cluster:
        working = cluster.run("worker2", work)
        nodes = list(cluster.nodes.values())
        ending = [
            cluster.run(name, functools.partial(node.shutdown, graceful=True, timeout=30.0))
            for name, node in list(cluster.nodes.items())[:2]
        ]
        cluster.sleep(3.5)
        ends = {source, "worker0" if source == "worker2" else "worker2"}
        (used,) = [c for c in cluster.network.channels if c.source == source and {c.source, c.target} == ends]
        cluster.network.drop(used, near, 2.0 - near)
        working.result()
        cluster.run("worker2", functools.partial(nodes[2].shutdown, graceful=True, timeout=30.0)).result()
        for program in ending:
            program.result()
        assert cluster.scheduler.now < 15.0
