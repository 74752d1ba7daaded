"""References while channels are lost and workers restart: values that nobody can use are dropped, and errors name the
owner that is gone.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import backhaul as bh
from backhaul._options import Liveness, Options
from backhaul._sim.channel import SimChannel
from backhaul._sim.cluster import SimCluster
from backhaul._wire.frames import Frame
from backhaul._wire.messages import Kind

OPTIONS = Options(
    timeout=3.0, connect_timeout=1.5, liveness=Liveness(heartbeat_interval=1.0, suspect_after=2.0, lost_after=5.0)
)
SETTLED = 40.0  # seconds of virtual time

kept: list[Any] = []


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    kept.clear()


def keep(rref: Any) -> None:
    kept.append(rref)


def give_back() -> Any:
    return kept[0]


@contextmanager
def losing(cluster: SimCluster, meant: Callable[[SimChannel, Frame], bool]) -> Iterator[list[Frame]]:
    """Lose the first frame for which ``meant`` is true, with its channel."""
    send, lost = SimChannel.send, list[Frame]()

    def lossy(channel: SimChannel, frame: Frame, *, timeout: float | None = None) -> None:
        if not lost and meant(channel, frame):
            lost.append(frame)
            cluster.network.drop(channel, 0.0, 0.0)
        else:
            send(channel, frame, timeout=timeout)

    SimChannel.send = lossy  # type: ignore[method-assign]
    try:
        yield lost
    finally:
        SimChannel.send = send  # type: ignore[method-assign]


def settle(cluster: SimCluster) -> dict[tuple[str, str], int]:
    for _ in range(2):
        cluster.collect()
        cluster.sleep(SETTLED / 2)
    return cluster.leftovers()


def test_a_request_with_a_reference_that_is_lost_with_its_channel() -> None:
    def program() -> None:
        rref = bh.remote("worker1", dict)
        rref.to_here()
        with pytest.raises(bh.PeerLostError):
            bh.rpc_sync("worker2", keep, args=(rref,))

    def meant(channel: SimChannel, frame: Frame) -> bool:
        return frame.kind == Kind.REQUEST and b":keep" in bytes(frame.body)

    with SimCluster(3, seed=1, options=OPTIONS) as cluster, losing(cluster, meant) as lost:
        cluster.run("worker0", program).result()
        assert lost
        assert not settle(cluster)


@pytest.mark.parametrize("owner", ["worker1", "worker2"])
def test_a_reply_with_a_reference_that_is_lost_with_its_channel(owner: str) -> None:
    def program() -> None:
        bh.rpc_sync("worker1", keep, args=(bh.remote(owner, dict),))
        with pytest.raises(bh.PeerLostError):
            bh.rpc_sync("worker1", give_back)

    def meant(channel: SimChannel, frame: Frame) -> bool:
        return channel.source == "worker1" and frame.kind == Kind.REPLY and b"_arrive" in bytes(frame.body)

    with SimCluster(3, seed=1, options=OPTIONS) as cluster, losing(cluster, meant) as lost:
        cluster.run("worker0", program).result()
        assert lost
        kept.clear()
        assert not settle(cluster)


@pytest.mark.parametrize("victim", ["worker0", "worker1", "worker2"])
def test_who_made_held_or_owned_it_is_restarted(victim: str) -> None:
    """Later steps leave nothing behind either."""

    def pass_it() -> None:
        bh.rpc_sync("worker2", keep, args=(bh.remote("worker1", dict),))

    with SimCluster(4, seed=1, options=OPTIONS) as cluster:
        for _ in range(3):
            cluster.run("worker0", pass_it).result()
            kept.clear()
            cluster.run("worker0", pass_it).result()
            cluster.crash(victim)
            cluster.start(victim)
            kept.clear()
            cluster.sleep(1.0)
        cluster.run("worker0", pass_it).result()
        kept.clear()
        assert not settle(cluster)


def test_a_reference_whose_owner_is_restarted_on_its_way() -> None:
    """The new incarnation is never asked for a value of the old one."""
    with SimCluster(3, seed=1, options=OPTIONS) as cluster:
        cluster.run("worker0", lambda: keep(bh.remote("worker1", dict))).result()
        cluster.run("worker0", kept[0].to_here).result()
        cluster.crash("worker1")
        cluster.start("worker1")
        held = kept[0]
        for call in (held.to_here, held.rpc_sync().keys):
            with pytest.raises(bh.PeerLostError, match=r"value is gone.*'worker1' was restarted") as caught:
                cluster.run("worker0", call).result()
            assert caught.value.worker == "worker1"
        held._rrefs.held._orphans.clear()  # as on a worker that has not heard of the restart yet
        with pytest.raises(bh.PeerLostError, match=r"value is gone.*'worker1' was restarted"):
            cluster.run("worker0", held.to_here).result()
        with pytest.raises(bh.PeerLostError, match="'worker1' was restarted"):
            cluster.run("worker0", functools.partial(bh.rpc_sync, "worker2", look_at, args=(held,))).result()
        del held, caught, call
        kept.clear()
        assert not settle(cluster)


def look_at(rref: Any) -> Any:
    return rref.to_here()


def test_an_attempt_that_is_made_after_the_handle_is_gone() -> None:
    """The first attempt is late: it runs after the second one made the value and the handle was deleted."""
    late: list[Callable[[], None]] = []

    with SimCluster(2, seed=1, options=OPTIONS) as cluster:
        send = SimChannel.send

        def hold_back(channel: SimChannel, frame: Frame, *, timeout: float | None = None) -> None:
            if not late and frame.kind == Kind.REQUEST and b":create" in bytes(frame.body):
                late.append(lambda: send(channel, frame))
            else:
                send(channel, frame, timeout=timeout)

        def program() -> None:
            retry = bh.Retry(timeout=0.5, on=(bh.CallTimeoutError,), backoff=0.01)
            assert bh.remote("worker1", dict, retry=retry).to_here() == {}

        SimChannel.send = hold_back  # type: ignore[method-assign]
        try:
            cluster.run("worker0", program).result()
            assert late
            cluster.sleep(2.0)
            cluster.run("worker0", late[0]).result()
        finally:
            SimChannel.send = send  # type: ignore[method-assign]
        late.clear()
        assert not settle(cluster)


def test_a_value_that_is_made_by_the_one_who_took_the_place_of_its_owner(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(
        logging.ERROR, "backhaul"
    )  # log records would keep errors, and errors the references in their frames
    with SimCluster(2, seed=1, options=OPTIONS) as cluster:

        def program() -> Any:
            retry = bh.Retry(attempts=20, backoff=0.2, factor=1.0)
            rref = bh.remote("worker1", dict, timeout=30.0, retry=retry)
            assert rref._created is not None
            rref._created.wait()
            return rref.to_here(), rref.rpc_sync().__len__(), rref._identity[1]

        cluster.crash("worker1")
        found = cluster.run("worker0", program)
        cluster.sleep(0.5)
        node = cluster.start("worker1")
        assert found.result() == ({}, 0, node.worker.incarnation)
        assert not settle(cluster)


# References to values of the caller: their forks are lent.


class Value:
    """A value that shows whether it is there."""

    def says(self) -> str:
        return "here"


def lend(function: Callable[..., Any], **options: Any) -> weakref.ref[Value]:
    """Call worker1 with a reference to a value of this worker, and expect the call to fail."""
    value = Value()
    with pytest.raises(bh.BackhaulError):
        bh.rpc_sync("worker1", function, args=(bh.RRef(value),), **options)
    return weakref.ref(value)


def keep_and_wait(rref: Any) -> None:
    keep(rref)
    bh.current_worker().runtime.one_shot().wait(2.0)


def use_kept() -> str:
    return str(kept[0].rpc_sync().says())


@pytest.mark.parametrize("kind", [Kind.REQUEST, Kind.REPLY])
def test_a_lent_reference_whose_channel_is_lost(kind: Kind) -> None:
    """The value stays if the callee has the reference, and only then."""

    def meant(channel: SimChannel, frame: Frame) -> bool:
        if kind == Kind.REQUEST:
            return frame.kind == Kind.REQUEST and b":keep" in bytes(frame.body)
        return frame.kind == Kind.REPLY and channel.source == "worker1"

    with SimCluster(2, seed=1, options=OPTIONS) as cluster, losing(cluster, meant) as lost:
        value = cluster.run("worker0", functools.partial(lend, keep)).result()
        assert lost
        cluster.collect()
        cluster.sleep(SETTLED)
        assert (value() is not None) == bool(kept) == (kind == Kind.REPLY)
        if kept:
            assert cluster.run("worker1", use_kept).result() == "here"
        kept.clear()
        assert not settle(cluster)
        assert value() is None


@pytest.mark.parametrize("keeps", [True, False])
def test_a_lent_reference_in_a_call_that_takes_too_long(keeps: bool) -> None:
    with SimCluster(2, seed=1, options=OPTIONS) as cluster:
        value = cluster.run("worker0", functools.partial(lend, keep_and_wait, timeout=1.0)).result()
        if not keeps:
            kept.clear()
        cluster.sleep(SETTLED)
        if keeps:
            assert cluster.run("worker1", use_kept).result() == "here"
        kept.clear()
        assert not settle(cluster)
        assert value() is None


def test_a_lent_reference_of_a_callee_that_is_restarted() -> None:
    with SimCluster(2, seed=1, options=OPTIONS) as cluster:
        call = cluster.run("worker0", functools.partial(lend, keep_and_wait))
        cluster.sleep(0.5)
        cluster.crash("worker1")
        cluster.start("worker1")
        kept.clear()
        assert not settle(cluster)
        assert call.result()() is None


def test_a_lent_reference_of_a_caller_that_is_restarted() -> None:
    with SimCluster(2, seed=1, options=OPTIONS) as cluster:
        cluster.run("worker0", functools.partial(lend, keep_and_wait))
        cluster.sleep(0.5)
        cluster.crash("worker0")
        cluster.start("worker0")
        cluster.sleep(5.0)
        with pytest.raises(bh.PeerLostError, match="value is gone"):
            cluster.run("worker1", use_kept).result()
        kept.clear()
        assert not settle(cluster)
