"""The CUDA state of this process, if it uses CUDA. Costs nothing in a process without CUDA."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

import torch

from backhaul._torch_support import require
from backhaul.errors import RemoteTraceback

if TYPE_CHECKING:
    from backhaul._devices.device_context import DeviceContext, Member
    from backhaul._devices.stream_order import StreamOrder

_warn_of_streams: Any = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None)

stream_order: StreamOrder | None = None
"""The order of this process's streams, once a worker with devices has started: streams belong to a process."""


def _forget() -> None:
    global stream_order
    stream_order = None  # CUDA does not work in a child


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def identities() -> tuple[str, ...]:
    """The identities of the visible devices, by index. Does not start CUDA where that can be avoided."""
    if not torch.cuda._is_compiled():
        return ()
    from backhaul._devices.cuda import driver

    found = driver.identities()
    if found:
        require("backhaul.cuda")
    return found


def judge(error: BaseException, worker: str) -> None:
    """Add a note to an error of a device, which says whether the worker is still usable."""
    if stream_order is None or not isinstance(error, RuntimeError) or isinstance(error.__cause__, RemoteTraceback):
        return  # an error from another worker already has its note
    if stream_order.failed():
        error.add_note(
            f"CUDA has failed in the process of worker '{worker}' ({stream_order.trouble}): restart that worker"
        )
    elif isinstance(error, (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", ()))):
        error.add_note(f"worker '{worker}' and its CUDA devices are still usable")


def start(own: Member, slot_bytes: int | None) -> DeviceContext | None:
    """Make what the links of a worker share, with at most ``slot_bytes`` of each device for slots; None if it has no
    devices.
    """
    global stream_order
    if not own.devices:
        return None
    from backhaul._devices.cuda.driver import Driver, verify
    from backhaul._devices.cuda.ipc import CudaIpc
    from backhaul._devices.cuda.memory import CudaMemory
    from backhaul._devices.device_context import DeviceContext
    from backhaul._devices.stream_order import StreamOrder

    if stream_order is None:
        stream_order = StreamOrder(Driver(len(own.devices)))
        if _warn_of_streams is not None:
            _warn_of_streams(False)  # calls that use one parameter run on different streams here, in order
    try:
        ipc = None if slot_bytes == 0 else CudaIpc(len(own.devices))
    except (OSError, AttributeError):  # not NVIDIA's driver, or an old one
        ipc = None
    device_context = DeviceContext(own, CudaMemory(), ipc, stream_order, slot_bytes)
    device_context.verify = functools.partial(verify, own.devices)
    return device_context
