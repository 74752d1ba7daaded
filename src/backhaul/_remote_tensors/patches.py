"""What remote tensors patch in torch, while a worker runs. ``docs/patches.md`` lists all patches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from torch.utils import _foreach_utils

from backhaul._remote_tensors.remote_parameter import RemoteParameter
from backhaul._remote_tensors.remote_tensor import RemoteTensor
from backhaul._runtime.worker_patches import while_workers_run

_undo: list[Callable[[], None]] = []


def install() -> None:
    """Patch torch. Does nothing if the patches are there."""
    if not _undo:
        _allow_foreach()
        _leave_out_of_ddp()


def uninstall() -> None:
    """Leave torch as ``install`` found it."""
    while _undo:
        _undo.pop()()


def _allow_foreach() -> None:
    """Clip gradients with one operation on all of them, as torch does for its own tensors."""
    types: list[Any] = _foreach_utils._foreach_supported_types
    for kind in (RemoteTensor, RemoteParameter):
        types.append(kind)
        _undo.append(functools.partial(types.remove, kind))


def _leave_out_of_ddp() -> None:
    """Let DDP neither broadcast nor reduce parameters of other workers."""
    original = DistributedDataParallel.__init__

    @functools.wraps(original)
    def init(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        named = (*module.named_parameters(), *module.named_buffers())
        remote = [name for name, tensor in named if isinstance(tensor, RemoteTensor)]
        if remote:
            ignored = [*getattr(module, "_ddp_params_and_buffers_to_ignore", ()), *remote]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
        original(self, module, *args, **kwargs)

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]

    def restore() -> None:
        if DistributedDataParallel.__init__ is init:
            DistributedDataParallel.__init__ = original  # type: ignore[method-assign]

    _undo.append(restore)


while_workers_run(install, uninstall)
