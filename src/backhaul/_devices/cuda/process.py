"""Starts CUDA for the workers of this process. Costs nothing in a process without CUDA."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from backhaul._devices import seam
from backhaul._torch_support import require

if TYPE_CHECKING:
    from backhaul._devices.device_context import DeviceContext, Member

_warn_of_streams: Any = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None)


def identities() -> tuple[str, ...]:
    """The identities of the visible devices, by index. Does not start CUDA where that can be avoided."""
    if not torch.cuda._is_compiled():
        return ()
    from backhaul._devices.cuda import driver

    found = driver.identities()
    if found:
        require("backhaul.cuda")
    return found


def start(own: Member, slot_bytes: int | None) -> DeviceContext | None:
    """Make what the links of a worker share, with at most ``slot_bytes`` of each device for slots; None if it has no
    devices.
    """
    if not own.devices:
        return None
    from backhaul._devices.cuda.driver import Driver, verify
    from backhaul._devices.cuda.ipc import CudaIpc
    from backhaul._devices.cuda.memory import CudaMemory
    from backhaul._devices.device_context import DeviceContext
    from backhaul._devices.stream_order import StreamOrder

    stream_order = seam.streams
    if not isinstance(stream_order, StreamOrder):
        seam.streams = stream_order = StreamOrder(Driver(len(own.devices)))
        if _warn_of_streams is not None:
            _warn_of_streams(False)  # calls that use one parameter run on different streams here, in order
    try:
        ipc = None if slot_bytes == 0 else CudaIpc(len(own.devices))
    except (OSError, AttributeError):  # not NVIDIA's driver, or an old one
        ipc = None
    device_context = DeviceContext(own, CudaMemory(), ipc, stream_order, slot_bytes)
    device_context.verify = functools.partial(verify, own.devices)
    return device_context
