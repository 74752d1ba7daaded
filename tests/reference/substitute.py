"""Puts ``backhaul.compat`` in the place of the modules that the reference's suites test, in this process."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import torch.distributed.autograd
import torch.distributed.nn.api.remote_module
import torch.distributed.optim
import torch.distributed.rpc
import torch.nn.parallel.distributed  # noqa: F401 (it has names of the reference already)

MODULES = {
    "torch.distributed.rpc": "backhaul.compat.rpc",
    "torch.distributed.rpc.api": "backhaul.compat.rpc.api",
    "torch.distributed.rpc.backend_registry": "backhaul.compat.rpc.backend_registry",
    "torch.distributed.rpc.constants": "backhaul.compat.rpc.constants",
    "torch.distributed.rpc.functions": "backhaul.compat.rpc.functions",
    "torch.distributed.rpc.internal": "backhaul.compat.rpc.internal",
    "torch.distributed.rpc.options": "backhaul.compat.rpc.options",
    "torch.distributed.rpc._testing": "backhaul.compat.rpc._testing",
    "torch.distributed.autograd": "backhaul.compat.autograd",
}
NAMES = {
    "torch.distributed.optim": ("backhaul.compat.optim", ["DistributedOptimizer"]),
    "torch.distributed.optim.optimizer": ("backhaul.compat.optim", ["DistributedOptimizer"]),
    "torch.distributed.nn": ("backhaul.compat.nn", ["RemoteModule"]),
    "torch.distributed.nn.api.remote_module": (
        "backhaul.compat.nn",
        ["RemoteModule", "_RemoteModule", "_REMOTE_MODULE_PICKLED_ATTRIBUTES"],
    ),
}


def install() -> None:
    """Do it, before any suite is imported."""
    ours = {name: importlib.import_module(target) for name, target in MODULES.items()}
    for name, module in ours.items():
        sys.modules[name] = module
        parent, _, leaf = name.rpartition(".")
        setattr(sys.modules[parent], leaf, module)
    for name, (target, wanted) in NAMES.items():
        if importlib.util.find_spec(target) is None:
            continue
        source = importlib.import_module(target)
        for attribute in wanted:
            setattr(importlib.import_module(name), attribute, getattr(source, attribute))
