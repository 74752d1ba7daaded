"""What the programs import: the API of one of the two systems, as the variable ``BENCHMARK_SYSTEM`` says.

A process serves one system. So the programs differ between the systems as a user's program does: in their imports. With
``plain`` it serves Backhaul without contexts, for programs that have a ``PlainDriver``.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

import backhaul as bh

SYSTEM = os.environ.get("BENCHMARK_SYSTEM", "backhaul")

if SYSTEM == "reference":
    from torch.distributed import autograd, rpc
    from torch.distributed.nn.api.remote_module import RemoteModule
    from torch.distributed.optim import DistributedOptimizer
else:
    from backhaul.compat import autograd, rpc
    from backhaul.compat.nn import RemoteModule
    from backhaul.compat.optim import DistributedOptimizer

__all__ = [
    "SYSTEM",
    "DistributedOptimizer",
    "RemoteModule",
    "autograd",
    "call_method",
    "join",
    "parameter_rrefs",
    "rpc",
    "seeded",
]


def show_unless_deprecation(message: Warning | str, category: type[Warning], *_: Any) -> None:
    """Show no deprecation: ``DistributedOptimizer`` of the reference announces its own, past all filters."""
    if not issubclass(category, DeprecationWarning):
        print(f"{category.__name__}: {message}", file=sys.stderr)


def join(name: str, rank: int, count: int, meet: str) -> Callable[[], None]:
    """Become a worker; returns what ends it. ``meet`` is the URL at which the workers find each other."""
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    warnings.filterwarnings("ignore", message="You are using a Backend")  # the reference warns about itself
    warnings.showwarning = show_unless_deprecation
    if SYSTEM == "plain":
        bh.init(name, rank=rank, world_size=count, options=bh.Options(init_method=meet))
        return functools.partial(bh.shutdown, timeout=3600)  # all but the driver call it at once
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=16, init_method=meet)
    rpc.init_rpc(name, rank=rank, world_size=count, rpc_backend_options=options)
    return rpc.shutdown


def seeded(module: torch.nn.Module, seed: int) -> None:
    """Draw the parameters of a module, in whichever thread and order modules are made."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(-0.3, 0.3, generator=draw)


def run_method(method: Callable[..., Any], rref: Any, *args: Any) -> Any:
    """Runs on the owner of an RRef: call a method of its value."""
    return method(rref.local_value(), *args)


def call_method(method: Callable[..., Any], rref: Any, *args: Any) -> Any:
    """Call a method of the value of an RRef on its owner, as programs did before RRefs had proxies."""
    return rpc.rpc_sync(rref.owner(), run_method, args=(method, rref, *args))


def parameter_rrefs(module: Any) -> list[Any]:
    """An RRef for each parameter of a module of this worker, for ``DistributedOptimizer``."""
    return [rpc.RRef(parameter) for parameter in module.parameters()]
