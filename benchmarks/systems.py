"""The API of each system that calls are measured through: our own, and the reference's."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.autograd as reference_autograd
import torch.distributed.rpc as reference
from harness import OURS, PLAIN, THEIRS
from programs.api import show_unless_deprecation
from torch.distributed.nn.api.remote_module import RemoteModule as ReferenceModule
from torch.distributed.optim import DistributedOptimizer as ReferenceOptimizer

import backhaul as bh


@dataclass(frozen=True)
class System:
    """What a benchmark calls, of one of the systems."""

    name: str
    call: Callable[..., Any]
    start: Callable[..., Any]
    remote: Callable[..., Any]
    wait: Callable[..., Any]
    context: Callable[..., Any]
    backward: Callable[..., Any]
    gradients: Callable[..., Any]
    remote_module: Callable[..., Any]
    optimizer: Callable[..., Any]  # of a remote module; its step takes a context


def backward_without_context(_: None, roots: list[torch.Tensor]) -> None:
    """``loss.backward()`` over all workers."""
    torch.autograd.backward(roots)


class PlainOptimizer:
    """Steps a remote module as a program does that has no contexts."""

    def __init__(self, module: Any) -> None:
        self._optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)

    def step(self, _: None) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


def our_optimizer(module: Any) -> Any:
    """Steps a remote module with the gradients of a context."""
    return bh.optim.DistributedOptimizer(torch.optim.SGD, module.remote_parameters(), lr=1e-3)


def their_optimizer(module: Any) -> Any:
    """The same of the reference."""
    return ReferenceOptimizer(torch.optim.SGD, module.remote_parameters(), lr=1e-3)


_calls_of_ours = (bh.rpc_sync, bh.rpc_async, bh.remote, bh.wait_all)

SYSTEMS = {
    OURS: System(
        OURS,
        *_calls_of_ours,
        *(bh.context, bh.backward, bh.get_gradients),
        *(bh.nn.RemoteModule, our_optimizer),
    ),
    PLAIN: System(
        PLAIN,
        *_calls_of_ours,
        *(contextlib.nullcontext, backward_without_context, dict),
        *(bh.nn.RemoteModule, PlainOptimizer),
    ),
    THEIRS: System(
        THEIRS,
        *(reference.rpc_sync, reference.rpc_async, reference.remote, torch.futures.wait_all),
        *(reference_autograd.context, reference_autograd.backward, reference_autograd.get_gradients),
        *(ReferenceModule, their_optimizer),
    ),
}


def join(  # noqa: PLR0917 (the harness passes them by place)
    transport: str, threads: int, system: str, name: str, rank: int, count: int, meet: str
) -> Callable[[], None]:
    """Become a worker of a system; the reference has so many threads. Returns what ends it."""
    if system == THEIRS:
        join_reference(name, rank, count, meet, threads=threads, transport=transport)
        return reference.shutdown
    bh.init(name, rank=rank, world_size=count, options=bh.Options(transport=transport, init_method=meet))
    return functools.partial(bh.shutdown, timeout=3600)  # all but the first worker call it at once


def join_reference(
    name: str,
    rank: int,
    count: int,
    meet: str,
    *,
    threads: int = 16,
    transport: str = "auto",
    devices: dict[str, dict[int, int]] | None = None,
) -> None:
    """Become a worker of the reference's cluster; over TCP it is kept from using shared memory, as we are."""
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    warnings.filterwarnings("ignore", message="You are using a Backend")  # its own business
    warnings.showwarning = show_unless_deprecation
    limits = {"_transports": ["uv"], "_channels": ["basic"]} if transport == "tcp" else {}
    reference.init_rpc(
        name,
        rank=rank,
        world_size=count,
        rpc_backend_options=reference.TensorPipeRpcBackendOptions(
            num_worker_threads=threads, init_method=meet, device_maps=devices or {}, **limits
        ),
    )
