"""Local hooks, and hooks on the owner."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import backhaul as bh
from backhaul.nn import RemoteModule

from . import modules
from .modules import batch, seeded

pytestmark = pytest.mark.usefixtures("workers")


def test_local_hooks_go_around_the_call() -> None:
    there = RemoteModule("worker1", nn.Identity)
    handles = [there.register_forward_pre_hook(modules.shifted), there.register_forward_hook(modules.kept)]
    assert there(torch.ones(1)).item() == 102
    for handle in handles:
        handle.remove()
    assert there(torch.ones(1)).item() == 1


def test_remote_hooks_run_there() -> None:
    there = RemoteModule("worker1", nn.Identity)
    handles = [
        there.register_remote_forward_pre_hook(modules.shifted),
        there.register_remote_forward_hook(modules.kept),
        there.register_remote_forward_hook(
            lambda module, args, out: out * (bh.get_worker_info().name == "worker1"), prepend=True
        ),
    ]
    assert there(torch.ones(1)).item() == 102
    assert there.forward_async(torch.ones(1)).wait().item() == 102
    for handle in handles:
        handle.remove()
    assert there(torch.ones(1)).item() == 1


def test_backward_hooks_of_this_side() -> None:
    seen: dict[str, list[Any]] = {"here": [], "there": []}
    for name, module in {"here": seeded(), "there": RemoteModule("worker1", seeded)}.items():
        x = batch().requires_grad_()
        module.register_full_backward_hook(lambda _, given, taken, name=name: seen[name].append((given, taken)))
        if name == "here":
            module(x).pow(2).sum().backward()
        else:
            with bh.context() as ctx:
                ctx.backward(module(x).pow(2).sum())
    assert len(seen["here"]) == 1
    torch.testing.assert_close(seen["there"], seen["here"])
