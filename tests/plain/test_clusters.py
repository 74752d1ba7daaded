"""Several clusters in one process: the workers of each go back through their own calls."""

from __future__ import annotations

import pytest
import torch

import backhaul as bh


def test_a_cluster_inside_another() -> None:
    x = torch.ones(2, requires_grad=True)
    with bh.cluster(["a0", "a1"]):
        y = bh.rpc_sync("a1", torch.exp, args=(x,))
        with bh.cluster(["b0", "b1"]):
            bh.rpc_sync("b1", torch.mul, args=(x, 3)).sum().backward()
            assert x.grad is not None
            assert x.grad.tolist() == [3.0, 3.0]
        y.sum().backward()
        bh.rpc_sync("a1", torch.mul, args=(x, 2)).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(2).exp() + 5)


def test_a_graph_that_outlives_its_cluster() -> None:
    x = torch.ones(2, requires_grad=True)
    with bh.cluster(2):
        y = bh.rpc_sync("worker1", torch.exp, args=(x,))
    with bh.cluster(2), pytest.raises(bh.BackhaulError, match="was shut down"):
        y.sum().backward()
    assert x.grad is None


def test_a_loss_of_two_workers_of_one_process() -> None:
    x = torch.ones(2, requires_grad=True)
    with bh.cluster(3) as workers:
        y = bh.rpc_sync("worker2", torch.exp, args=(x,))
        with workers[1]:
            z = bh.rpc_sync("worker2", torch.exp, args=(x,))
        with pytest.raises(bh.errors.ForeignGraphError, match="another worker of this process"):
            (y + z).sum().backward()
