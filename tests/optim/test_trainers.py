"""Several trainers optimize the same parameters at once; each owner takes their steps one after the other."""

from __future__ import annotations

import os
from typing import Any

import torch

import backhaul as bh

STEPS = 25


class Careful(torch.optim.SGD):
    """Sees whether somebody else is at its parameters while it steps."""

    def step(self, closure: Any = None) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        before = [(param.grad, param.clone()) for param in params]
        for _ in range(20):
            os.sched_yield()
        for param, (grad, value) in zip(params, before, strict=True):
            assert param.grad is grad
            assert torch.equal(param, value)
        super().step()


def trainer(params: list[bh.RRef[Any]], slope: float) -> None:
    """The gradient of each element is ``slope``, so the order of steps does not matter."""
    optimizer = bh.optim.DistributedOptimizer(Careful, params, lr=1.0)
    for _ in range(STEPS):
        with bh.context() as ctx:
            ctx.backward(sum(param.to_here().sum() for param in params) * slope)
            optimizer.step(ctx)


def train_from_workers() -> list[torch.Tensor]:
    params = [bh.remote(owner, torch.zeros, (3,), {"requires_grad": True}) for owner in (0, 1, 0)]
    bh.wait_all([bh.rpc_async(f"worker{number}", trainer, (params, 10.0**number)) for number in (1, 2)])
    return [param.to_here().detach() for param in params]


def test_steps_are_serialised() -> None:
    with bh.cluster(3):
        for value in train_from_workers():
            assert value.tolist() == [-STEPS * 110.0] * 3


def test_steps_of_one_optimizer_from_several_threads_are_serialised() -> None:
    with bh.cluster(2) as workers:
        params = [bh.remote(1, torch.zeros, (3,), {"requires_grad": True})]
        futures = [bh.rpc_async(number, trainer, (params, 1.0)) for number in (0, 0, 1, 1)]
        bh.wait_all(futures)
        assert params[0].to_here().tolist() == [-STEPS * 4.0] * 3
        assert len(workers) == 2


def in_processes() -> list[torch.Tensor] | None:
    return train_from_workers() if bh.get_worker_info().id == 0 else None


def test_steps_are_serialised_in_processes() -> None:
    found, *_ = bh.launch(in_processes, 3, start_method="forkserver", timeout=60)
    for value in found:
        assert value.tolist() == [-STEPS * 110.0] * 3
