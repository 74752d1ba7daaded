"""Each fault of the simulated network, and how workers react to it."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch

import backhaul as bh
from backhaul._options import Options
from backhaul._sim.cluster import SimCluster
from backhaul._sim.endpoints import SimEndpoint
from backhaul._sim.network import NetworkConditions, SimNetwork
from backhaul._sim.scheduler import Scheduler
from backhaul._transport.base import ChannelClosedError, ConnectTimeoutError, Lost, Received
from backhaul._wire.frames import Frame

OPTIONS = Options(timeout=5.0, connect_timeout=2.0, backward_timeout=10.0)


# Frames.


class Pair:
    """Two endpoints and a channel. It records frames as they arrive."""

    def __init__(self, scheduler: Scheduler, conditions: NetworkConditions) -> None:
        self.scheduler = scheduler
        self.network = SimNetwork(scheduler, conditions)
        self.here = self.network.endpoint(scheduler.new_process("here"))
        self.there = self.network.endpoint(scheduler.new_process("there"))
        self.came: list[tuple[str, int]] = []
        self.lost: list[str] = []
        for end in (self.here, self.there):
            scheduler.spawn(self._reader(end), name=f"{end.process.name}-reader", process=end.process)

    def _reader(self, end: SimEndpoint) -> Callable[[], None]:
        def read() -> None:
            while True:
                event = end.poll(None)
                if isinstance(event, Received):
                    self.came += [(end.process.name, frame.number) for frame in event.frames]
                    event.channel.release()
                elif isinstance(event, Lost):
                    self.lost.append(end.process.name)

        return read

    def pass_time(self, seconds: float) -> None:
        self.scheduler.wait("time to pass", seconds)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with Scheduler(3) as scheduler:
        yield Pair(scheduler, NetworkConditions(delay=0.01, silence_seconds=20.0))


def test_frames_of_one_channel_keep_their_order(pair: Pair) -> None:
    pair.network.conditions.slow = 0.3
    channel = pair.here.connect(pair.there.addresses[0], timeout=1e3)
    for number in range(100):
        channel.send(Frame(1, number))
    pair.pass_time(1e3)
    assert pair.came == [("there", number) for number in range(100)]


def test_frames_of_different_channels_overtake_each_other(pair: Pair) -> None:
    channels = [pair.here.connect(pair.there.addresses[0], timeout=10.0) for _ in range(20)]
    for number, channel in enumerate(channels):
        channel.send(Frame(1, number))
    pair.pass_time(10.0)
    numbers = [number for _, number in pair.came]
    assert numbers != sorted(numbers)
    assert sorted(numbers) == list(range(20))


def test_a_partition_holds_frames_until_it_heals(pair: Pair) -> None:
    channel = pair.here.connect(pair.there.addresses[0], timeout=10.0)
    pair.network.partitions.cut("here", "there")
    channel.send(Frame(1, 7))
    pair.pass_time(10.0)
    assert not pair.came
    pair.network.partitions.heal("here", "there")
    pair.pass_time(1.0)
    assert pair.came == [("there", 7)]


def test_a_partition_that_lasts_ends_the_channel_for_who_sends(pair: Pair) -> None:
    channel = pair.here.connect(pair.there.addresses[0], timeout=10.0)
    pair.network.partitions.cut("here", "there")
    channel.send(Frame(1, 7))
    pair.pass_time(30.0)
    assert pair.lost == ["here"]
    with pytest.raises(ChannelClosedError):
        channel.send(Frame(1, 8))


def test_one_direction_may_be_cut_alone(pair: Pair) -> None:
    channel = pair.here.connect(pair.there.addresses[0], timeout=10.0)
    channel.send(Frame(1, 1))
    pair.pass_time(1.0)
    (back,) = pair.there.channels
    pair.network.partitions.cut("here", "there")
    back.send(Frame(1, 2))
    channel.send(Frame(1, 3))
    pair.pass_time(1.0)
    assert pair.came == [("there", 1), ("here", 2)]


def test_connecting_through_a_partition_takes_too_long(pair: Pair) -> None:
    pair.network.partitions.cut("there", "here")
    with pytest.raises(ConnectTimeoutError):
        pair.here.connect(pair.there.addresses[0], timeout=5.0)
    pair.network.partitions.heal("there", "here")
    pair.pass_time(1.0)
    assert pair.lost == ["there"]  # it had accepted a connection that the other end does not use


def test_a_dropped_channel_loses_what_is_under_way(pair: Pair) -> None:
    channel = pair.here.connect(pair.there.addresses[0], timeout=10.0)
    channel.send(Frame(1, 1))
    pair.network.drop(pair.network.channels[0], near=0.0, far=5.0)
    pair.pass_time(1.0)
    assert (pair.came, pair.lost) == ([], ["here"])
    pair.pass_time(10.0)
    assert pair.lost == ["here", "there"]


def test_a_crash_closes_channels_and_a_silent_one_does_not(pair: Pair) -> None:
    channel = pair.here.connect(pair.there.addresses[0], timeout=10.0)
    pair.network.crash(pair.there.process, silent=True)
    pair.pass_time(100.0)
    assert not pair.lost
    channel.send(Frame(1, 1))
    pair.pass_time(100.0)
    assert pair.lost == ["here"]


def test_a_receiver_that_does_not_read_holds_its_sender_up() -> None:
    with Scheduler(3) as scheduler:
        network = SimNetwork(scheduler, NetworkConditions(capacity=1000.0))
        here, there = (network.endpoint(scheduler.new_process(name)) for name in ("here", "there"))
        channel = here.connect(there.addresses[0], timeout=10.0)
        channel.send(Frame(1, 1, bytes(900)))
        begun = scheduler.now
        channel.send(Frame(1, 2, bytes(900)), timeout=3.0)  # stops waiting for room, and sends the frame all the same
        assert scheduler.now >= begun + 3.0
        scheduler.wait("them", 1.0)
        event = there.poll(10.0)
        assert isinstance(event, Received)
        assert [frame.number for frame in event.frames] == [1, 2]


# Workers.


def step(to: str = "worker1") -> list[float]:
    weight = torch.ones(2, requires_grad=True)
    with bh.context() as ctx:
        ctx.backward(bh.rpc_sync(to, torch.mul, args=(weight, 2)).sum())
        return ctx.grads[weight].tolist()


def ask(to: str = "worker1") -> list[float]:
    return bh.rpc_sync(to, torch.ones, args=(2,)).tolist()


def nest(path: list[int]) -> int:
    """Call from each worker to the next."""
    return 1 + bh.rpc_sync(path[0], nest, args=(path[1:],)) if path else 0


@pytest.fixture
def cluster() -> Iterator[SimCluster]:
    with SimCluster(3, seed=5, options=OPTIONS, conditions=NetworkConditions(silence_seconds=4.0)) as cluster:
        yield cluster
        cluster.end_faults()
        cluster.sleep(30.0)
        cluster.collect()


def test_a_calm_cluster_leaves_nothing(cluster: SimCluster) -> None:
    for name in list(cluster.nodes):
        assert cluster.run(name, step).result() == [2.0, 2.0]
    assert cluster.run("worker0", lambda: nest([1, 2, 0, 1, 2])).result() == 5
    cluster.sleep(1.0)
    assert not cluster.leftovers()
    assert cluster.shutdown(graceful=True, timeout=10.0) == []


@pytest.mark.parametrize("silent", [False, True], ids=["crash", "silent crash"])
def test_a_worker_that_dies_under_a_call(cluster: SimCluster, silent: bool) -> None:
    program = cluster.run("worker0", lambda: nest([1, 2] * 100))
    cluster.sleep(0.05)
    cluster.crash("worker2", silent=silent)
    with pytest.raises((bh.PeerLostError, bh.CallTimeoutError)):
        program.result()
    assert cluster.run("worker0", step).result() == [2.0, 2.0]


def test_a_worker_that_comes_back(cluster: SimCluster) -> None:
    cluster.run("worker0", step).result()
    before = cluster.nodes["worker1"].worker.incarnation
    cluster.crash("worker1")
    cluster.sleep(1.0)
    with pytest.raises(bh.PeerLostError):
        cluster.run("worker0", step).result()
    cluster.start("worker1")
    assert cluster.nodes["worker1"].worker.incarnation != before
    assert cluster.run("worker0", step).result() == [2.0, 2.0]
    assert cluster.run("worker1", lambda: step("worker2")).result() == [2.0, 2.0]


def test_a_program_ends_with_its_worker(cluster: SimCluster) -> None:
    program = cluster.run("worker0", lambda: nest([1, 2] * 100))
    cluster.sleep(0.05)
    cluster.crash("worker0")
    assert program.ended
    with pytest.raises(RuntimeError, match="died"):
        program.result()
    assert cluster.run("worker1", lambda: ask("worker2")).result() == [1.0, 1.0]


def test_a_short_pause_is_only_slow(cluster: SimCluster) -> None:
    cluster.run("worker0", step).result()
    cluster.pause("worker1", 3.0)
    begun = cluster.scheduler.now
    assert cluster.run("worker0", step).result() == [2.0, 2.0]
    assert cluster.scheduler.now >= begun + 2.9


def test_a_long_pause_is_a_timeout(cluster: SimCluster) -> None:
    cluster.run("worker0", step).result()
    cluster.pause("worker1", 20.0)
    with pytest.raises(bh.CallTimeoutError):
        cluster.run("worker0", ask).result()


@pytest.mark.parametrize("ways", [("worker0", "worker1"), ("worker1", "worker0")])
def test_a_cut_is_noticed_by_who_waits(cluster: SimCluster, ways: tuple[str, str]) -> None:
    cluster.run("worker0", step).result()
    cluster.cut(*ways, 30.0)
    with pytest.raises((bh.PeerLostError, bh.CallTimeoutError)):
        cluster.run("worker0", ask).result()
    cluster.sleep(40.0)
    with contextlib.suppress(bh.PeerLostError):  # an idle end learns of the loss now
        cluster.run("worker0", ask).result()
    assert cluster.run("worker0", step).result() == [2.0, 2.0]


def test_channels_that_are_dropped_are_opened_again(cluster: SimCluster) -> None:
    ended: collections.Counter[str] = collections.Counter()
    for _ in range(20):
        program = cluster.run("worker0", step)
        cluster.sleep(0.0005)
        cluster.drop(0.0, 0.5)
        try:
            assert program.result() == [2.0, 2.0]
            ended["right"] += 1
        except bh.PeerLostError:
            ended["lost"] += 1
    assert ended["right"]
    assert ended["lost"]


def double_along(x: torch.Tensor, path: list[str]) -> torch.Tensor:
    return bh.rpc_sync(path[0], double_along, args=(x * 2, path[1:])) * 1 if path else x * 2


@pytest.mark.parametrize("near", [0.0, 0.5])
def test_channels_that_are_dropped_far_from_the_driver(cluster: SimCluster, near: float) -> None:
    """Whichever frame is lost, no worker has to wait for the deadline, and nothing is left."""
    x = torch.ones(2, requires_grad=True)

    def go_around() -> list[float]:
        with bh.context() as ctx:
            ctx.backward(double_along(x, ["worker1", "worker2", "worker0", "worker2"]).sum())
            return ctx.grads[x].tolist()

    ended: collections.Counter[str] = collections.Counter()
    cluster.run("worker0", go_around).result()
    for number in range(60):
        program = cluster.run("worker0", go_around)
        cluster.sleep(0.0001 * (number % 30))
        cluster.drop(near, 0.5 - near)
        begun = cluster.scheduler.now
        try:
            assert program.result() == [32.0, 32.0]
            ended["right"] += 1
        except bh.PeerLostError:
            ended["lost"] += 1
        assert cluster.scheduler.now < begun + 2.0
        cluster.sleep(1.0)
    assert ended["right"]
    assert ended["lost"]
    assert not cluster.leftovers()


def test_a_broken_send_fails_its_call(cluster: SimCluster) -> None:
    cluster.network.conditions.breaks = 1.0
    with pytest.raises(bh.PeerLostError):
        cluster.run("worker0", ask).result()


def test_a_joiner_is_admitted() -> None:
    with SimCluster(2, seed=5, options=OPTIONS) as cluster:
        cluster.start("late")
        assert cluster.run("late", lambda: step("worker1")).result() == [2.0, 2.0]
        assert cluster.run("worker1", lambda: step("late")).result() == [2.0, 2.0]
        assert cluster.shutdown(graceful=False, timeout=10.0) == []
