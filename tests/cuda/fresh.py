"""A program in processes in which nobody has asked torch for devices: to ask keeps forked children from using CUDA.
The module of the tests does ask, so workers must not import that.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

import torch

import backhaul as bh

WIDE = 1 << 16  # elements; too large for slots in host memory


def use_a_device() -> None:
    assert torch.ones(2, device="cuda").sum().item() == 2


def begin_without_a_device() -> dict[str, Any] | None:
    """Who has started CUDA, before and after a tensor of a device was sent; and whether a forked child can use it."""
    if bh.get_worker_info().id:
        return None
    workers = [info.name for info in bh.get_worker_infos()]
    x = torch.ones(3, requires_grad=True)
    with bh.context() as ctx:
        loss = bh.rpc_sync("worker1", torch.mul, args=(x, 2)).sum()
        # Before a pass: torch's engine asks the driver for devices, in a plain ``loss.backward()`` too.
        child = multiprocessing.get_context("fork").Process(target=use_a_device)
        child.start()
        child.join()
        ctx.backward(loss)
    before = [bh.rpc_sync(name, torch.cuda.is_initialized) for name in workers]
    back = bh.rpc_sync("worker1", torch.neg, args=(torch.ones(WIDE, device="cuda"),))
    after = [bh.rpc_sync(name, torch.cuda.is_initialized) for name in workers]
    return {"before": before, "child": child.exitcode, "back": (str(back.device), back.sum().item()), "after": after}
