"""Regression tests for errors that random steps outside contexts found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import backhaul as bh
from backhaul._sim.cluster import SimCluster

pytestmark = pytest.mark.filterwarnings("ignore:Using backward:UserWarning")


def cube(x: torch.Tensor) -> torch.Tensor:
    return x.pow(3)


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
