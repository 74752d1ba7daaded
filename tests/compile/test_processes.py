"""The compiler at both ends of calls between processes. All is shown by one launch: each process has to import the
compiler first, which takes seconds.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

import backhaul as bh

from . import functions
from .test_remote_op import around, tensor
from .test_remote_side import BACKENDS, gradients, gradients_over, network, run_compiled


def train() -> list[float]:
    """The same steps by a compiled model whose middle is on another worker, and by a plain one."""
    there = bh.remote_op(functions.head, to="worker1")
    losses = []
    for step in (torch.compile(around(there), backend="aot_eager", fullgraph=True), around(functions.head)):
        x, w = tensor(3, 4), tensor(4, seed=1)
        for _ in range(3):
            loss = step(x, w).pow(2).sum()
            loss.backward()
            with torch.no_grad():
                for leaf in (x, w):
                    leaf.sub_(0.01 * leaf.grad)
                    leaf.grad = None
        losses.append(loss.item())
    return losses


def call_compiled(backend: str) -> list[Tensor]:
    """A step through what the other worker compiles."""
    call = functools.partial(bh.rpc_sync, "worker1", run_compiled)
    return gradients_over(lambda x, weight: call(args=(backend, functions.head(x, weight), weight)))


def steps() -> tuple[list[float], list[list[Tensor]]] | None:
    if bh.get_worker_info().id:
        return None
    return train(), [call_compiled(backend) for backend in BACKENDS]


def test_between_processes() -> None:
    (losses, found), _ = bh.launch(steps, 2, timeout=100, start_method="forkserver")
    assert losses[0] == pytest.approx(losses[1])
    wanted = gradients(lambda x, weight: network(functions.head(x, weight), weight))
    torch.testing.assert_close(found, [wanted] * len(BACKENDS))
