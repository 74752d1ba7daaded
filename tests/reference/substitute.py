"""Puts ``backhaul.compat`` in the place of the modules that the reference's suites test, in this process.

Suites that use TorchScript are compiled when they are imported; what the compiler refuses with Backhaul in place
becomes a function that says so, so that it fails the tests that call it and no others.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed.autograd
import torch.distributed.nn.api.remote_module
import torch.distributed.optim
import torch.distributed.rpc
import torch.nn.parallel.distributed

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


@contextlib.contextmanager
def tolerating_the_compiler() -> Iterator[None]:
    """Import suites inside of this."""
    script: Any = torch.jit.script

    def try_to_script(what: Any = None, *args: Any, **kwargs: Any) -> Any:
        try:
            return script(what, *args, **kwargs)
        except Exception as error:
            return what if isinstance(what, type) else _refused(what, str(error))

    torch.jit.script = try_to_script
    try:
        yield
    finally:
        torch.jit.script = script


def _refused(what: Callable[..., Any], reason: str) -> Callable[..., Any]:
    def refused(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f"TorchScript refused to compile this: {reason}")

    if isinstance(what, types.FunctionType):
        refused.__module__, refused.__qualname__ = what.__module__, what.__qualname__
    return refused
