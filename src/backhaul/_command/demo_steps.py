"""The steps of ``backhaul demo``. The command runs these functions, and shows their code: what stands between the
docstring and the ``return``. The current worker is ``you``; ``left`` and ``right`` are other processes.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from torch import nn

import backhaul as bh


def hidden(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The first half of a computation."""
    return torch.tanh(x @ w)


def loss_of(y: torch.Tensor) -> torch.Tensor:
    """The second half."""
    return y.square().mean()


def call() -> tuple[torch.Tensor, torch.Tensor, int]:
    """A function runs on another worker."""
    a, b = torch.randn(256, 256), torch.randn(256, 256)
    product = bh.rpc_sync("left", torch.matmul, args=(a, b))
    where = bh.rpc_sync("left", os.getpid)
    return product, a @ b, where


def gradient(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The forward goes over two workers, and so does the backward."""
    y = bh.rpc_sync("left", hidden, args=(x, w))
    loss = bh.rpc_sync("right", loss_of, args=(y,))
    loss.backward()
    return loss.detach()


def make_model() -> nn.Sequential:
    """A small model, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))


def split(model: nn.Module) -> nn.Module:
    """Two layers move to other workers."""
    model = bh.nn.split(model, {"0": "left", "2": "right"})
    return model


def train(model: nn.Module, steps: int) -> list[float]:
    """An ordinary training loop: the same code for a split model and for one that is not."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    x = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        loss = (model(x).squeeze() - x.sum(1).sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def profile(model: nn.Module, report: str) -> Any:
    """Every worker that takes part is recorded, on one clock."""
    with bh.profile() as prof:
        model(torch.randn(64, 16)).square().mean().backward()
    prof.report(report)
    return prof


def lose(pid: int) -> bh.PeerLostError | None:
    """Kill a worker, and call it."""
    os.kill(pid, signal.SIGKILL)
    try:
        bh.rpc_sync("right", abs, args=(-1,))
    except bh.PeerLostError as error:
        return error
    return None
