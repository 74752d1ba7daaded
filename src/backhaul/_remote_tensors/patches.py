"""What remote tensors patch in torch, while a worker runs. ``docs/patches.md`` lists all patches."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad
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
        _refuse_mixed_clipping()


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


def _refuse_mixed_clipping() -> None:
    """Refuse to clip parameters of FSDP2 together with those of other workers. Torch raises an error that says neither
    which tensors it means nor what to do, in some cases after it has scaled some of the gradients.
    """
    module: Any = clip_grad
    original = getattr(module, "_group_tensors_by_device_and_dtype", None)
    if original is None:  # this torch has another way
        return

    @functools.wraps(original)
    def group(lists: Any, *args: Any, **kwargs: Any) -> Any:
        sharded = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
        remote = next((each for each in lists[0] if isinstance(each, RemoteTensor)), None)
        if remote is not None and any(isinstance(each, sharded) for each in lists[0]):
            raise NotImplementedError(
                "gradients of fully_shard (DTensor) cannot be clipped together with those of worker "
                f"'{remote.owner_name()}': the ranks that share the model might clip by different norms; clip the two "
                "apart"
            )
        return original(lists, *args, **kwargs)

    module._group_tensors_by_device_and_dtype = group

    def restore() -> None:
        if module._group_tensors_by_device_and_dtype is group:
            module._group_tensors_by_device_and_dtype = original

    _undo.append(restore)


while_workers_run(install, uninstall)
