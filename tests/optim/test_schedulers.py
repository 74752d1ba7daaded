"""Schedulers of torch drive a distributed optimizer as they drive a plain one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import backhaul as bh

from .training import WORKERS, Far, Plain, batches, same, train

DistributedOptimizer = bh.optim.DistributedOptimizer
STEPS = 6

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, [lambda n: 0.9**n, lambda n: 1 / (1 + n)]),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 4),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=STEPS + 1),  # betas too
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=2),
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.7),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.5)],
        [3],
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("tensors", [False, True])
def test_schedulers(name: str, tensors: bool) -> None:
    lr: Any = torch.tensor(0.05) if tensors else 0.05
    plain = Plain()
    expected = torch.optim.Adam(plain.two_groups(), lr=copy.deepcopy(lr))
    train(plain, expected, batches(STEPS), SCHEDULERS[name](expected))
    with bh.cluster(WORKERS):
        far = Far()
        optimizer = DistributedOptimizer(torch.optim.Adam, far.two_groups(), lr=lr)
        assert isinstance(optimizer, torch.optim.Optimizer)
        train(far, optimizer, batches(STEPS), SCHEDULERS[name](optimizer))
        same(far.values(), plain.values())
        same(optimizer.state_dict(), expected.state_dict())


def test_reduce_on_plateau() -> None:
    losses = [3.0, 2.0, 2.0, 2.5, 2.6, 2.7]

    def run(model: Any, optimizer: Any) -> list[list[float]]:
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.1)
        rates = []
        for x, loss in zip(batches(len(losses)), losses, strict=True):
            train(model, optimizer, [x])
            scheduler.step(loss)
            rates.append(scheduler.get_last_lr())
        return rates

    plain = Plain()
    expected = run(plain, torch.optim.SGD(plain.two_groups(), lr=0.1))
    assert expected[-1] != expected[0]
    with bh.cluster(WORKERS):
        far = Far()
        assert run(far, DistributedOptimizer(torch.optim.SGD, far.two_groups(), lr=0.1)) == expected
        same(far.values(), plain.values())


def test_new_values_travel_with_the_step() -> None:
    """A scheduler costs no calls."""
    with bh.cluster(WORKERS):
        far = Far()
        optimizer = DistributedOptimizer(torch.optim.SGD, far.groups(), lr=0.1)
        scheduler = lr_scheduler.StepLR(optimizer, 1)

        def calls(work: Callable[[], None]) -> int:
            before = served("worker2")
            work()
            return served("worker2") - before

        with far.backward(batches(1)[0]) as ctx:

            def step() -> None:
                optimizer.step(ctx)

            def schedule_and_step() -> None:
                scheduler.step()
                optimizer.step(ctx)

            assert calls(step) == calls(schedule_and_step) == 2  # one of them is the question itself


def served(worker: str) -> int:
    return bh.rpc_sync(worker, bh.get_debug_info)["num_calls_served"]


def test_options_set_by_hand() -> None:
    plain = Plain()
    expected = torch.optim.SGD(plain.two_groups(), lr=0.1)
    with bh.cluster(WORKERS):
        far = Far()
        optimizer = DistributedOptimizer(torch.optim.SGD, far.two_groups(), lr=0.1)
        for model, either in ((plain, expected), (far, optimizer)):
            train(model, either, batches(2))
            either.param_groups[1]["momentum"] = 0.5
            either.param_groups[0].update(lr=0.3, weight_decay=0.1)
            train(model, either, batches(2))
        same(far.values(), plain.values())


def test_step_hooks_run_at_the_caller() -> None:
    with bh.cluster(WORKERS):
        far = Far()
        optimizer = DistributedOptimizer(torch.optim.SGD, far.groups(), lr=0.1)
        seen: list[Any] = []
        optimizer.register_step_pre_hook(lambda *_: seen.append(bh.get_worker_info().name))
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        train(far, optimizer, batches(1))
        assert seen == ["worker0", "after"]
