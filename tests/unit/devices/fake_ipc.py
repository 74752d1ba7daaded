"""Fake device memory and flags, made of CPU memory and clocked events. Both ends are in one process."""

from __future__ import annotations

import ctypes
import itertools
import os
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from backhaul._devices.backend import HANDLE_BYTES
from backhaul._devices.flag_reaper import Span
from backhaul._transport.shm.segments import COOKIE_BYTES, Mapping
from backhaul._wire.device_link import Form
from tests.unit.devices.clocks import Cell, FakeCuda, FakeEvent

RemoteDevice = tuple[bytes, int]
"""The name of a piece of memory, the same at both ends, and an offset in it."""


class FakeBlock:
    """Memory of "a device" or, with ``mapping``, of the host."""

    def __init__(self, ipc: FakeIpc, name: bytes, address: int, keep: object) -> None:
        self.ipc = ipc
        self.name = name
        self.address = address
        self.keep = keep
        ipc.there_now += 1

    def __del__(self) -> None:
        self.ipc.pins.pop(self.address, None)
        self.ipc.there_now -= 1


@dataclass(eq=False)
class Watch:
    process: int
    span: Span


class FakeFlag(FakeEvent):
    foreign = True

    def force(self) -> None:
        self.clock = {}


class FakeIpc:
    """Each offset of memory has a ``Cell``: a stream that writes or reads a slot too early raises ``RaceError``.
    Also a ``backend.Memory``.
    """

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.no_memory = False
        self.watches: weakref.WeakSet[Watch] = weakref.WeakSet()
        self.refuse = False
        self.breaks = False  # the next copy
        self.there_now = 0
        self.on_host_count = 0  # how often the host has copied
        self.cells: dict[RemoteDevice, Cell] = {}
        self.flags: dict[RemoteDevice, FakeFlag] = {}
        self.pins: dict[int, tuple[int, bytes]] = {}  # address -> size and name
        self._names = itertools.count(1)
        self._exported: dict[bytes, torch.Tensor] = {}

    def cell(self, place: RemoteDevice) -> Cell:
        return self.cells.setdefault(place, Cell(self.cuda))

    def allocate(self, device: int, nbytes: int) -> FakeBlock:
        memory = self.empty(device, nbytes)
        return FakeBlock(self, b"%d" % next(self._names), memory.data_ptr(), memory)

    def export(self, memory: FakeBlock) -> bytes:
        assert isinstance(memory.keep, torch.Tensor)
        handle = memory.name.ljust(HANDLE_BYTES)
        self._exported[handle] = memory.keep
        return handle

    def open(self, handle: bytes, device: int, nbytes: int) -> FakeBlock:
        if self.refuse:
            raise RuntimeError("CUDA error: invalid device context")
        memory = self._exported[handle]
        assert len(memory) >= nbytes
        return FakeBlock(self, handle.rstrip(), memory.data_ptr(), memory)

    def pin(self, mapping: Mapping, device: int) -> FakeBlock:
        name = ctypes.string_at(mapping.address, COOKIE_BYTES)
        if self.refuse and any(name == known for _, known in self.pins.values()):  # the other end's
            raise RuntimeError("CUDA error: invalid device context")
        self.pins[mapping.address] = mapping.size, name
        return FakeBlock(self, name, mapping.address, mapping)

    def flag(self, pinned: FakeBlock, offset: int) -> FakeFlag:
        return self.flags.setdefault((pinned.name, offset), FakeFlag(self.cuda))

    def view(self, memory: FakeBlock, offset: int, nbytes: int, device: int, form: Form) -> tuple[torch.Tensor, object]:
        self.cell((memory.name, offset)).read_on(self.cuda.current(device))
        block = (ctypes.c_ubyte * nbytes).from_address(memory.address + offset)
        block.memory = memory  # type: ignore[attr-defined]
        return torch.frombuffer(block, dtype=form.dtype).as_strided(form.shape, form.stride), block

    def copy(self, memory: FakeBlock | torch.Tensor, *args: Any) -> None:
        """Also ``backend.Memory.copy``."""
        if self.breaks:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if isinstance(memory, torch.Tensor):
            (flat,) = args
            if hasattr(memory, "home"):
                self.cell((b"", memory.data_ptr())).write_on(self.cuda.current(memory.home))
            memory.copy_(flat)
            return
        offset, (address, nbytes), device = args
        self.cell((memory.name, offset)).write_on(self.cuda.current(device))
        ctypes.memmove(memory.address + offset, address, nbytes)

    def on_host(self, address: int, nbytes: int) -> int:
        return address if self._pinned_at(address) is not None else 0

    def _pinned_at(self, address: int) -> RemoteDevice | None:
        for start, (size, name) in self.pins.items():
            if start <= address < start + size:
                return name, address - start
        return None

    def copy_on_host(self, pinned: FakeBlock, offset: int, source: int, nbytes: int) -> None:
        place = self._pinned_at(source)
        assert place is not None
        self.cell(place).look()
        self.cell((pinned.name, offset)).put()
        ctypes.memmove(pinned.address + offset, source, nbytes)
        self.on_host_count += 1

    def watch(self, file: int, process: int, span: Span) -> object:
        os.fstat(file)  # it is open
        watch = Watch(process, span)
        self.watches.add(watch)
        return watch

    def empty(self, device: int, nbytes: int) -> torch.Tensor:
        if self.no_memory:
            raise torch.OutOfMemoryError("CUDA out of memory")
        memory = torch.zeros(nbytes, dtype=torch.uint8)
        memory.home = device  # type: ignore[attr-defined]
        self.cells.pop((b"", memory.data_ptr()), None)  # torch gives out no memory that a stream may still use
        return memory

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def total(self, device: int) -> int:
        assert device >= 0, "no device"
        return 1 << 30
