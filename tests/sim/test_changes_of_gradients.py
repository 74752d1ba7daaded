"""Changes of gradients that are under way when their channel breaks; both workers live."""

from __future__ import annotations

import pytest
import torch

import backhaul as bh
from backhaul._sim.cluster import SimCluster


@pytest.mark.parametrize("near", [0.0, 0.5])
def test_cleared_gradients_are_cleared_although_a_channel_breaks(near: float) -> None:
    """They were taken for cleared, and the next pass added to them: found by the simulation of ``retry_step``."""
    with SimCluster(2, seed=1, options=bh.Options(timeout=5.0, connect_timeout=2.0)) as cluster:

        def program() -> list[float]:
            layer = bh.nn.RemoteModule("worker1", torch.nn.Linear, (1, 1))
            optimizer = torch.optim.SGD(layer.parameters())
            layer(torch.ones(3, 1)).sum().backward()
            optimizer.zero_grad()
            for channel in cluster.network.channels:
                cluster.network.drop(channel, near, near)
            layer.state_dict()  # sends the changes first
            layer(torch.ones(3, 1)).sum().backward()
            return [parameter.grad.item() for parameter in layer.parameters()]

        assert cluster.run("worker0", program).result() == [3.0, 3.0]
