"""How many frames modules and optimizers take: one request and one reply to each worker, and operation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn, optim

import backhaul as bh

from ..frames import Frames, frames  # noqa: F401

BACKWARD = {"GRADIENT", "REPORT", "RELEASE"}


def model(workers: int) -> tuple[list[bh.nn.RemoteModule], torch.Tensor]:
    return [bh.nn.RemoteModule(f"worker{worker + 1}", nn.Linear, (3, 3)) for worker in range(workers)], torch.ones(3)


@torch.no_grad()
def forward(workers: int) -> Callable[[], object]:
    (module,), x = model(workers)
    return torch.no_grad()(lambda: module(x))


def step_of_context(workers: int) -> Callable[[], object]:
    modules, x = model(workers)
    parameters = [each for module in modules for each in module.remote_parameters()]
    optimizer = bh.optim.DistributedOptimizer(optim.Adam, parameters, lr=0.1)

    def step() -> None:
        with bh.context() as context:
            bh.backward(context, [sum(module(x) for module in modules).sum()])
            optimizer.step(context)

    return step


def plain_step(workers: int) -> Callable[[], object]:
    """``zero_grad`` goes with the forward."""
    modules, x = model(workers)
    optimizer = optim.Adam([each for module in modules for each in module.parameters()], lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        sum(module(x) for module in modules).sum().backward()
        optimizer.step()

    return step


def zero_grad(workers: int) -> Callable[[], object]:
    modules, _ = model(workers)
    parameters = [each for module in modules for each in module.remote_parameters()]
    return bh.optim.DistributedOptimizer(optim.SGD, parameters, lr=0.1).zero_grad


def construction(workers: int) -> Callable[[], object]:
    modules, _ = model(workers)
    parameters = [each for module in modules for each in module.remote_parameters()]
    return lambda: bh.optim.DistributedOptimizer(optim.SGD, parameters, lr=0.1)


@pytest.mark.parametrize(
    ("make", "workers", "calls"),
    [
        (forward, 1, 1),
        (zero_grad, 2, 1),
        (construction, 2, 1),
        (step_of_context, 1, 2),  # forward and step
        (step_of_context, 2, 2),
        (plain_step, 1, 2),
        (plain_step, 2, 2),
    ],
)
def test_one_message_to_a_worker(
    frames: Frames,  # noqa: F811
    make: Callable[[int], Callable[[], object]],
    workers: int,
    calls: int,
) -> None:
    found = frames.of(make(workers))
    assert (found["REQUEST"], found["REPLY"]) == (calls * workers, calls * workers)
    others = {kind: count for kind, count in found.items() if kind not in ("REQUEST", "REPLY")}
    if make is construction:
        assert set(others) == {"NOTICES"}  # the shares are released
    else:
        assert set(others) <= BACKWARD
    assert all(count <= workers for count in others.values())
