"""CUDA memory and events between processes, as ``segments`` wants them. The only module, with ``driver``, that calls
torch.cuda; imported where there is CUDA.
"""

from __future__ import annotations

from typing import Any

import torch

from backhaul.cuda.segments import Handle

_storage_at: Any = getattr(torch._C, "_construct_storage_from_data_pointer", None)


class CudaIpc:
    """A ``segments.Ipc``, by torch's own: what has been exported stays until those who opened it have closed it."""

    def allocate(self, device: int, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", device))

    def export(self, memory: torch.Tensor) -> Handle:
        shared: tuple[Any, ...] = memory.untyped_storage()._share_cuda_()
        _device, handle, nbytes, offset, counter, counter_offset, event, synchronize = shared
        return Handle(handle, nbytes, offset, counter, counter_offset, event, synchronize)

    def open(self, handle: Handle, device: int) -> torch.UntypedStorage:
        with torch.cuda.device(device):
            opened: torch.UntypedStorage = torch.UntypedStorage._new_shared_cuda(
                device,
                handle.memory,
                handle.nbytes,
                handle.offset,
                handle.counter,
                handle.counter_offset,
                handle.event,
                handle.synchronize,
            )
            return opened

    def view(self, memory: torch.UntypedStorage, offset: int, nbytes: int) -> tuple[torch.Tensor, object]:
        # Of memory that is another's. torch keeps a storage's Python object as long as the storage, so that one tells
        # when the last tensor on it is gone; who borrows keeps ``memory`` until then.
        storage = _storage_at(memory.data_ptr() + offset, memory.device, nbytes)
        tensor = torch.empty(0, dtype=torch.uint8, device=memory.device).set_(storage)
        return tensor, tensor.untyped_storage()

    def copy(self, memory: torch.Tensor, offset: int, flat: torch.Tensor) -> None:
        memory[offset : offset + len(flat)].copy_(flat, non_blocking=True)

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def total(self, device: int) -> int:
        nbytes: int = torch.cuda.get_device_properties(device).total_memory
        return nbytes

    def event(self, device: int) -> tuple[torch.cuda.Event, bytes]:
        with torch.cuda.device(device):
            event = torch.cuda.Event(interprocess=True)
            return event, event.ipc_handle()

    def open_event(self, handle: bytes, device: int) -> torch.cuda.Event:
        opened: torch.cuda.Event = torch.cuda.Event.from_ipc_handle(torch.device("cuda", device), handle)
        return opened
