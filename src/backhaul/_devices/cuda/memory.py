"""Memory of torch's allocators, for tensors that are staged or handed over. Imported only where there is CUDA."""

from __future__ import annotations

import torch


class CudaMemory:
    """A ``backend.Memory``."""

    def empty(self, device: int, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", device))

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, to: torch.Tensor, flat: torch.Tensor) -> None:
        to.copy_(flat, non_blocking=True)

    def total(self, device: int) -> int:
        nbytes: int = torch.cuda.get_device_properties(device).total_memory
        return nbytes
