"""A small training that the programs compare with the same training in one process."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import backhaul as bh

STEPS, SAVED_EVERY = 8, 3
PLACES = {"0": "worker1", "2": "worker2"}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(12, 6, generator=draw)
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def train_alone() -> dict[str, torch.Tensor]:
    model = make_model()
    optimizer = make_optimizer(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return model.state_dict()


def train_on_ray(cluster: bh.ray.RayCluster, before_backward: Callable[[int], None]) -> dict[str, Any]:
    """Train from the last checkpoint again after each loss of a worker. Returns weights, and the steps that were made.

    ``before_backward`` gets the number of each step between its forward and its backward.
    """
    checkpoint = save(0, make_model(), None)
    steps: list[int] = []
    while True:
        saved = torch.load(io.BytesIO(checkpoint))
        model = make_model()
        model.load_state_dict(saved["model"])
        try:
            model = bh.nn.split(model, PLACES)
            optimizer = make_optimizer(model)
            if saved["optimizer"] is not None:
                optimizer.load_state_dict(saved["optimizer"])
            for step in range(saved["step"], STEPS):
                steps.append(step)
                optimizer.zero_grad()
                loss = loss_of(model, step)
                before_backward(step)
                loss.backward()
                optimizer.step()
                if (step + 1) % SAVED_EVERY == 0:
                    checkpoint = save(step + 1, model, optimizer)
            return {"weights": model.state_dict(), "steps": steps}
        except bh.PeerLostError:
            cluster.wait_for()


def train_with_retries(before_backward: Callable[[int], None]) -> dict[str, torch.Tensor]:
    """The same training, in which ``retry_step`` makes a step again that has lost a worker."""
    model = bh.nn.split(make_model(), PLACES)
    optimizer = make_optimizer(model)

    def make_step(step: int) -> None:
        loss = loss_of(model, step)
        before_backward(step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for step in range(STEPS):
        bh.retry_step(make_step, (model, optimizer), (step,), wait=60.0)
    return model.state_dict()


def save(step: int, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> bytes:
    """A checkpoint, as a program writes it into a file. A ``state_dict`` alone goes on changing."""
    file = io.BytesIO()
    state = None if optimizer is None else optimizer.state_dict()
    torch.save({"step": step, "model": model.state_dict(), "optimizer": state}, file)
    return file.getvalue()


def difference(weights: dict[str, torch.Tensor]) -> float:
    """The largest difference of a weight to the training in one process."""
    wanted = train_alone()
    assert weights.keys() == wanted.keys()
    return max(float((weights[name] - value).abs().max()) for name, value in wanted.items())
