"""What this process has of CUDA, if anything. Nothing here costs anything where it has none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from backhaul.cuda.links import Member, Plane
    from backhaul.cuda.streams import Frontier

frontier: Frontier | None = None
"""The order of this process's streams, from the first worker on that has devices. Streams belong to a process."""


def identities() -> tuple[str, ...]:
    """What the visible devices are, by index. Makes CUDA ready for use where there is any, but no context."""
    if not torch.cuda.is_available():
        return ()
    from backhaul.cuda import driver

    return driver.identities()


def start(own: Member) -> Plane | None:
    """What the links of a worker share; None where it has no devices."""
    global frontier
    if not own.devices:
        return None
    from backhaul.cuda.driver import Driver
    from backhaul.cuda.ipc import CudaIpc
    from backhaul.cuda.links import Plane
    from backhaul.cuda.memory import CudaMemory
    from backhaul.cuda.streams import Frontier

    if frontier is None:
        frontier = Frontier(Driver())
    try:
        ipc = CudaIpc()
    except (OSError, AttributeError):  # another driver than NVIDIA's, or an old one
        ipc = None
    return Plane(own, CudaMemory(), ipc, frontier)
