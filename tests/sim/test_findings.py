"""What simulation has found, each case by itself."""

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
from backhaul._rpc.calls.client import Pending
from backhaul._rpc.cluster.joining import join
from backhaul._sim.channel import SimChannel
from backhaul._sim.cluster import SimCluster, SimProgram
from backhaul._sim.network import NetworkConditions
from backhaul._transport.base import Channel, ChannelBrokenError
from backhaul._wire.frames import Frame
from backhaul._wire.messages import Hello, Kind, pack


def test_a_release_that_is_lost_with_its_channel() -> None:
    """Seeds 6 and 36: the driver has forgotten the context, and nobody told the worker."""
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


def test_a_release_into_a_channel_that_only_the_other_knows_to_be_lost() -> None:
    """Seed 71: the worker had lost the channel, and asked over another, long before the driver noticed."""

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
    """Seed 387: its loss made this worker forget the other channel too, so that the end of a context was not told."""
    with SimCluster(2, seed=1) as cluster:
        cluster.run("worker0", step).result()
        peers = cluster.nodes["worker1"].peers
        peer = peers.find("worker0")
        (first,) = (channel for channel, _ in peers.channels())
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
    """Can be watched."""


def test_values_whose_references_die_together() -> None:
    """Seed 82: the last of them stayed as long as nothing else died."""

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
    """Seed 230: the call failed twice, once for the loss and once for the sending."""
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
    """Seed 340: a reference was passed on, but the call that was to make its value got lost. Whoever asked for the
    value gave up, its owner waited for ever, and with it everyone who shut down.
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
    """Seed 48: a handler whose caller was lost asked its own worker for a value. The call failed at once; its error was
    kept with the value, and by way of the frames it had gone through kept the reference to the value, and so itself.
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
    """Its error collected the frames of those who asked for it, or made it fail, with their reference to the value."""

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
    """Seed 449: the first connection is dead, but only one end knows it. The other uses the newer one."""
    with SimCluster(2, seed=1, conditions=NetworkConditions(duplicates=1.0)) as cluster:
        cluster.run("worker0", lambda: bh.rpc_sync("worker1", torch.ones, args=(1,))).result()
        back = cluster.run("worker1", lambda: bh.rpc_sync("worker0", torch.ones, args=(1,), timeout=1.0))
        assert back.result().tolist() == [1.0]


def test_a_driver_that_has_come_back() -> None:
    """Seed 700: its first context had the id of one that others remembered as released, so they recorded nothing, and
    backward returned without their gradients.
    """
    with SimCluster(2, seed=1) as cluster:
        cluster.run("worker0", step).result()
        cluster.crash("worker0")
        cluster.sleep(1.0)
        cluster.start("worker0")
        cluster.run("worker0", step).result()


def test_a_reference_whose_value_is_lost() -> None:
    """Seed 25: passing it on said that it cannot be sent, and not why."""
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
    """Seed 649: the driver crashed while a handler of its was connecting to another worker; what it sent there then
    brought the context to one that had no reason to doubt it.
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
    """Everybody forgets them, also those who knew of them through others alone."""

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
    """Seed 107: the worker had asked, through a new channel, to be told of its end; the driver used the old."""

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
    """One found that the place of another to which it showed itself was just being taken, and gave up."""
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


def test_a_channel_whose_loss_is_told_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed 2074: a newcomer was refused by the leader, which had not heard of it yet, and learnt that before it had
    done with connecting. It kept that channel, said through it that it was ready to end, and waited for the answer.
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
    """Seed 2074: both came at once, and why the channel was lost was forgotten: a newcomer did not ask again."""
    with SimCluster(2, seed=1) as cluster:
        cluster.run("worker1", lambda: bh.rpc_sync("worker0", torch.ones, args=(1,))).result()
        reasons: list[str] = []
        cluster.nodes["worker1"].peers.on_lost(lambda peer, channel, reason: reasons.append(reason))
        cluster.pause("worker1", 1.0)
        peers = cluster.nodes["worker0"].peers
        (channel,) = (channel for channel, _ in peers.channels())
        cluster.run("worker0", lambda: peers.refuse(channel, "worker1", "for a test")).result()
        cluster.sleep(2.0)
        assert reasons == ["refused: for a test"]


def test_a_newcomer_that_loses_a_channel_while_it_shows_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """It took the member at the other end for lost, and that never heard of it."""
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


def test_a_successor_that_not_everybody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed 197: the driver knew who had taken the place of a lost worker, and another that called it did not. That
    asked the driver again and again, without a pause, and whatever its time was.
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
    """Seed 1409: a cluster that is split has two leaders. When its halves meet again one of the newcomers counts, the
    same one everywhere; the other is refused, and nobody waits for it, nor it for others.
    """
    sides = {"left": ["worker0", "worker1"], "right": ["worker2", "worker3"]}
    options = bh.Options(connect_timeout=1.0, timeout=5.0, heartbeat_interval=0.5, suspect_after=1.0, lost_after=2.0)
    with SimCluster(4, seed=1, options=options) as cluster:
        monkeypatch.setattr(cluster.network.partitions, "reconnect", lambda name: None)  # which would end the split
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
    """The newcomer waited there for all of its time, though it had another address, or would have been told one."""
    options = bh.Options(rendezvous_timeout=60.0)
    with SimCluster(3, seed=1, options=options) as cluster:
        addresses = [node.worker.endpoint.addresses[0] for node in cluster.nodes.values()]
        record, endpoint, runtime = cluster._prepare("late")
        if silent == "nobody reads there":
            addresses[0] = cluster.network.endpoint(cluster.scheduler.new_process("silent")).addresses[0]
        elif silent == "cut off":
            cluster.cut("late", "worker1", 1000.0)
            del addresses[0]
        else:  # worker1 takes it for the leader until it misses its heartbeats
            cluster.run("worker1", lambda: bh.rpc_sync("worker0", torch.ones, args=(1,))).result()
            cluster.crash("worker0", silent=True)
            addresses = [addresses[1]]
        come = functools.partial(join, endpoint, record, addresses, options, runtime=runtime)
        node = SimProgram(cluster.scheduler, runtime, come).result()
        assert node.peers.own.record.id == 3
        node.worker.abandon()


def test_ids_of_newcomers_that_take_long() -> None:
    """Seed 2074: the leader was stopped after it had enrolled one, and then gave that one's id to another."""
    with SimCluster(2, seed=1) as cluster:
        peers = cluster.nodes["worker0"].peers

        def enrol(name: str, incarnation: str) -> int:
            newcomer = msgspec.structs.replace(peers.own.record, id=-1, name=name, incarnation=incarnation)
            enrolled = peers.enrol(newcomer)
            cluster.sleep(60.0)
            assert not isinstance(enrolled, str)
            return enrolled.id

        given = cluster.run("worker0", lambda: [enrol("late", "1"), enrol("other", "2"), enrol("late", "3")])
        assert given.result() == [2, 3, 2]


@pytest.mark.parametrize("near", [0.0, 2.0])
@pytest.mark.parametrize("home", ["worker0", "worker2"])
def test_a_channel_that_is_lost_while_some_wait_for_all_to_be_done(home: str, near: float) -> None:
    """The leader took the worker at the other end for gone, and let the others go while that was still calling them."""

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
        ends = {home, "worker0" if home == "worker2" else "worker2"}
        (used,) = [c for c in cluster.network.channels if c.source == home and {c.source, c.target} == ends]
        cluster.network.drop(used, near, 2.0 - near)
        working.result()
        cluster.run("worker2", functools.partial(nodes[2].shutdown, graceful=True, timeout=30.0)).result()
        for program in ending:
            program.result()
        assert cluster.scheduler.now < 15.0
