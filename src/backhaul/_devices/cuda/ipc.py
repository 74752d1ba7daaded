"""Memory and flags between processes: ``backend.Ipc`` by CUDA. Imported only where there is CUDA."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from typing import Any

import torch

from backhaul._devices import flag_reaper
from backhaul._devices.cuda.library import Library
from backhaul._transport.shm.segments import Mapping
from backhaul._wire.device_link import Form

_storage_at: Any = getattr(torch._C, "_construct_storage_from_data_pointer", None)
_tensor_on: Any = getattr(torch._C, "_construct_CUDA_Tensor_From_Storage_And_Metadata", None)
_raw_current: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class DeviceBlock:
    """Device memory that this process has allocated or opened."""

    __slots__ = ("_free", "address", "device")

    def __init__(self, address: int, device: int, free: Any) -> None:
        self.address = address
        self.device = device
        self._free = free

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the device has failed, or CUDA or Python has ended before this
            self._free(self.device, self.address)


class PinnedBlock:
    """Host memory that devices can reach."""

    __slots__ = ("_ipc", "address", "device", "mapping")

    def __init__(self, ipc: CudaIpc, mapping: Mapping, device: int) -> None:
        self.device = device
        self.mapping = mapping
        self._ipc: CudaIpc | None = None
        self.address = ipc.library.pin(device, mapping.address, mapping.size)
        self._ipc = ipc
        ipc.pinned[self.address] = mapping.address, mapping.size

    def __del__(self) -> None:
        ipc = self._ipc
        if ipc is None:
            return
        ipc.pinned.pop(self.address, None)
        with contextlib.suppress(Exception):  # as above
            ipc.library.unpin(self.device, self.mapping.address)


class HostFlag:
    """A ``backend.Flag``: two numbers in pinned memory, the target and the number that was reached."""

    __slots__ = ("_address", "_library", "_memory", "_reached", "_target")

    def __init__(self, library: Library, memory: PinnedBlock, offset: int) -> None:
        place = memory.mapping.address + offset
        self._target = ctypes.c_uint32.from_address(place)
        self._reached = ctypes.c_uint32.from_address(place + 4)
        self._address = memory.address + offset + 4
        self._memory = memory
        self._library = library

    def query(self) -> bool:
        return bool(self._reached.value == self._target.value)

    def record(self, stream: Any) -> None:
        """Record the flag at the end of a stream's queue."""
        before = self._target.value
        self._target.value = before + 1
        try:
            self._library.write(stream.device_index, self._address, (before + 1) & 0xFFFFFFFF, stream.cuda_stream)
        except BaseException:
            self._target.value = before
            raise

    def wait(self, stream: Any) -> None:
        """What is queued on a stream from now on starts after the flag is passed."""
        self._library.wait(stream.device_index, self._address, self._target.value, stream.cuda_stream)

    def force(self) -> None:
        self._reached.value = self._target.value


class CudaIpc:
    """A ``backend.Ipc`` for ``count`` devices."""

    def __init__(self, count: int) -> None:
        self.library = Library(count)
        self.pinned: dict[int, tuple[int, int]] = {}  # address for devices -> address for the host, and size

    def allocate(self, device: int, nbytes: int) -> DeviceBlock:
        try:
            address = self.library.allocate(device, nbytes)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()  # torch may keep unused memory
            address = self.library.allocate(device, nbytes)
        return DeviceBlock(address, device, self.library.free)

    def export(self, memory: DeviceBlock) -> bytes:
        return self.library.handle(memory.device, memory.address)

    def open(self, handle: bytes, device: int, nbytes: int) -> DeviceBlock:
        return DeviceBlock(self.library.open(device, handle, nbytes), device, self.library.close)

    def pin(self, mapping: Mapping, device: int) -> PinnedBlock:
        return PinnedBlock(self, mapping, device)

    def flag(self, pinned: PinnedBlock, offset: int) -> HostFlag:
        return HostFlag(self.library, pinned, offset)

    def view(
        self, memory: DeviceBlock | PinnedBlock, offset: int, nbytes: int, device: int, form: Form
    ) -> tuple[torch.Tensor, object]:
        return view_at(memory.address + offset, nbytes, device_at(device), form)

    def copy(self, memory: DeviceBlock | PinnedBlock, offset: int, stretch: tuple[int, int], device: int) -> None:
        self.library.copy(device, memory.address + offset, *stretch, _raw_current(device))

    def on_host(self, address: int, nbytes: int) -> int:
        for start, (host, size) in list(self.pinned.items()):
            if start <= address < start + size:
                return address - start + host
        return 0

    def copy_on_host(self, pinned: PinnedBlock, offset: int, source: int, nbytes: int) -> None:
        ctypes.memmove(pinned.mapping.address + offset, source, nbytes)

    def watch(self, file: int, process: int, span: flag_reaper.Span) -> object:
        return flag_reaper.shared.watch(file, process, span)


device_at = functools.cache(functools.partial(torch.device, "cuda"))


def view_at(address: int, nbytes: int, device: torch.device, form: Form) -> tuple[torch.Tensor, object]:
    """A tensor on memory that torch does not own, and its storage. torch keeps the Python object of a storage as long
    as the storage itself, so the object's end tells that the last tensor is gone.
    """
    storage = _storage_at(address, device, nbytes)
    dtype, shape, stride = form
    if _tensor_on is None:
        return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, shape, stride), storage
    metadata = {"size": shape, "stride": stride, "dtype": dtype, "device": device, "storage_offset": 0}
    return _tensor_on(metadata, storage), storage
