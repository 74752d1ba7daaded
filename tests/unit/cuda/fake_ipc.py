"""CPU memory and clocked events in the place of CUDA's, both ends in one process."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import torch

from backhaul.cuda.segments import Handle

from .clocks import Cell, FakeCuda, FakeEvent


class Opened:
    """Memory of "another process". Keeps it, as CUDA does."""

    def __init__(self, ipc: FakeIpc, memory: torch.Tensor) -> None:
        self.ipc = ipc
        self.memory = memory
        ipc.open_now += 1

    def __del__(self) -> None:
        self.ipc.open_now -= 1


class FakeIpc:
    """Each place in memory has a ``Cell``: who writes a slot too early, or looks at it too early, has found a race."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.no_memory = False
        self.refuse = False
        self.breaks = False  # the next copy
        self.open_now = 0
        self.cells: dict[int, Cell] = {}  # by address
        self._names = itertools.count(1)
        self._exported: dict[bytes, Any] = {}

    def cell(self, address: int, device: int) -> Cell:
        return self.cells.setdefault(address, Cell(self.cuda, device))

    def allocate(self, device: int, nbytes: int) -> torch.Tensor:
        if self.no_memory:
            raise torch.OutOfMemoryError("CUDA out of memory")
        memory = torch.zeros(nbytes, dtype=torch.uint8)
        memory.home = device  # type: ignore[attr-defined]
        return memory

    def export(self, memory: torch.Tensor) -> Handle:
        name = b"memory %d" % next(self._names)
        self._exported[name] = memory
        return Handle(name, len(memory), 0, b"", 0, b"", False)

    def open(self, handle: Handle, device: int) -> Opened:
        if self.refuse:
            raise RuntimeError("CUDA error: invalid device context")
        memory = self._exported[handle.memory]
        assert memory.home == device
        return Opened(self, memory)

    def view(self, memory: Opened, offset: int, nbytes: int) -> tuple[torch.Tensor, object]:
        self.cell(memory.memory.data_ptr() + offset, memory.memory.home).read()  # type: ignore[attr-defined]
        block = (ctypes.c_ubyte * nbytes).from_address(memory.memory.data_ptr() + offset)
        block.memory = memory  # type: ignore[attr-defined]
        return torch.frombuffer(block, dtype=torch.uint8), block

    def copy(self, memory: torch.Tensor, offset: int, flat: torch.Tensor) -> None:
        if self.breaks:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if hasattr(memory, "home"):
            self.cell(memory.data_ptr() + offset, memory.home).write()
        memory[offset : offset + len(flat)].copy_(flat)

    def event(self, device: int) -> tuple[FakeEvent, bytes]:
        name, event = b"event %d" % next(self._names), FakeEvent(self.cuda, device)
        self._exported[name] = event
        return event, name

    def open_event(self, handle: bytes, device: int) -> FakeEvent:
        event: FakeEvent = self._exported[handle]
        assert event.device == device
        return event

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def total(self, device: int) -> int:
        return 1 << 30
