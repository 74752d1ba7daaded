"""Regression tests for errors that random steps outside contexts found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import backhaul as bh
from backhaul._sim.cluster import SimCluster
from backhaul._sim.plain_steps import plain_leftovers
from tools.simulation.one_seed import SimulationSetting
from tools.simulation.run import run_seed

pytestmark = pytest.mark.filterwarnings("ignore:Using backward:UserWarning")


def cube(x: torch.Tensor) -> torch.Tensor:
    return x.pow(3)


def records(cluster: SimCluster, name: str) -> int:
    return cluster.nodes[name].worker.counters["num_plain_records"]()


def test_a_recorded_gradient_that_a_later_pass_adds_to() -> None:
    """Seed 1: the later pass replaced ``.grad`` by a copy, which had lost the graph of the earlier pass."""

    def differentiate(apply: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        apply(x).sum().backward(create_graph=True)
        recorded = x.grad
        assert recorded is not None
        (apply(x) * x).sum().backward()
        assert x.grad is recorded
        assert x.grad.grad_fn is not None
        apply(x).sum().backward(create_graph=True)
        found = torch.autograd.grad(torch.tanh(x.grad).sum(), x)
        total, x.grad = x.grad.detach(), None
        return [total, *found]

    with SimCluster(2, seed=1) as cluster:
        there = cluster.run("worker0", lambda: differentiate(lambda x: bh.rpc_sync("worker1", cube, args=(x,))))
        for found, expected in zip(there.result(), differentiate(cube), strict=True):
            torch.testing.assert_close(found, expected)


def test_records_of_messages_whose_death_was_told_to_a_lost_channel() -> None:
    """Seed 102: the worker asked which messages were gone on a thread that did not run as this worker, and the answer
    never came.
    """
    kept: list[torch.Tensor] = []

    def call() -> None:
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        kept.append(bh.rpc_sync("worker1", cube, args=(x,)))

    def go_back() -> list[float]:
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        y = bh.rpc_sync("worker1", cube, args=(x,))
        kept.pop().sum().backward()
        y.sum().backward()
        assert x.grad is not None
        return x.grad.tolist()

    with SimCluster(2, seed=1) as cluster:
        for _ in range(2):
            cluster.run("worker0", call).result()
        assert (records(cluster, "worker0"), records(cluster, "worker1")) == (2, 2)
        for channel in list(cluster.network.channels):  # frames that are sent from now on are lost
            cluster.network.drop(channel, 1.0, 1.0)
        kept.pop()
        cluster.sleep(0.5)
        assert (records(cluster, "worker0"), records(cluster, "worker1")) == (2, 2)
        cluster.sleep(5.0)
        assert (records(cluster, "worker0"), records(cluster, "worker1")) == (1, 1)
        assert cluster.run("worker0", go_back).result() == [3.0, 12.0]
        cluster.sleep(1.0)
        assert not plain_leftovers(cluster.nodes.values())


def test_a_death_that_is_told_to_a_channel_that_the_other_end_has_lost() -> None:
    """Seed 136: the receiver told the sender through a channel that only the sender knew to be lost."""

    def call(to: str) -> None:
        bh.rpc_sync(to, cube, args=(torch.ones(2, requires_grad=True),))

    with SimCluster(2, seed=1) as cluster:
        connecting = [cluster.run("worker0", lambda: call("worker1")), cluster.run("worker1", lambda: call("worker0"))]
        for program in connecting:
            program.result()
        cluster.sleep(1.0)
        used = cluster.nodes["worker0"].peers.find("worker1").channel
        (lost,) = [channel for channel in cluster.network.channels if channel is used]
        assert len(cluster.nodes["worker1"].peers.find("worker0").channels) == 2
        cluster.network.drop(lost, 5.0, 0.0)  # worker0 uses it for five seconds more
        cluster.sleep(0.5)
        cluster.run("worker1", lambda: call("worker0")).result()
        cluster.sleep(1.0)
        assert records(cluster, "worker1") == 0
        cluster.sleep(10.0)
        assert not plain_leftovers(cluster.nodes.values())


@pytest.mark.parametrize("seed", [430, 477, 483])
def test_records_of_messages_to_a_worker_that_has_said_farewell(seed: int) -> None:
    """A reply left between the farewell of its receiver and the loss of the channel."""
    verdict = run_seed(SimulationSetting(seed, workers=5, steps=4, faults=("leave",)))
    assert verdict.problems == []
