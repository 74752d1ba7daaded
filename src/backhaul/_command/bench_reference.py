"""``torch.distributed.rpc`` as ``backhaul bench`` measures it. Only the process that is measured imports this module;
nothing else in Backhaul calls the reference.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
import torch.distributed.autograd
import torch.distributed.rpc as reference

from backhaul._command.bench_calls import CALLEE, BenchedSystem, scale

_autograd: Any = torch.distributed.autograd  # its names are not annotated


def start(name: str, rank: int, size: int, store: str) -> BenchedSystem:
    """Become a worker of the reference's cluster."""
    warnings.simplefilter("ignore")  # its deprecations are not ours to tell
    for variable in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        os.environ.pop(variable, None)
    options = reference.TensorPipeRpcBackendOptions(init_method=store)
    reference.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=options)
    return BenchedSystem(reference.rpc_sync, reference.rpc_async, torch.futures.wait_all, _gradient, reference.shutdown)


def _gradient(x: torch.Tensor) -> torch.Tensor:
    with _autograd.context() as context:
        loss = reference.rpc_sync(CALLEE, scale, args=(x,)).sum()
        _autograd.backward(context, [loss])
        gradient: torch.Tensor = _autograd.get_gradients(context)[x]
    return gradient
