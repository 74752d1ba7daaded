"""A link over CPU memory. Tensors arrive in slots or staged, as tensors of a device do."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable, Sequence

import torch

from backhaul._wire.device_link import Form, Slot
from backhaul.errors import ProtocolError, SerializationError

CPU = torch.device("cpu")


class FakeLink:
    """Both ends of a link. It takes CPU tensors and claims that they arrive on ``cuda:1`` of the peer.

    Args:
        slots: The number of slots. Tensors that find no slot are staged.
        slot_bytes: The size of each slot.
    """

    takes_host = True

    def __init__(self, slots: int = 0, slot_bytes: int = 1 << 16) -> None:
        self.slot_bytes = slot_bytes
        self.memory = [bytearray(slot_bytes) for _ in range(slots)]
        self.states = ["free"] * slots
        self.staged = 0
        self.unstaged = 0
        self.told = "cuda:1"
        self.breaks: Exception | None = None  # raised by the next attempt to stage

    @property
    def free(self) -> int:
        return self.states.count("free")

    def takes(self, device: torch.device) -> bool:
        return device == CPU

    def name(self, device: torch.device) -> str:
        if self.told == "none":
            raise SerializationError("a tensor on cpu has no device at 'peer'; set Options.devices.maps")
        return self.told

    def device(self, name: str) -> torch.device:
        if name != "cuda:1":
            raise ProtocolError(f"no device {name}")
        return CPU

    def lend(self, flat: torch.Tensor) -> Slot | None:
        assert flat.dtype is torch.uint8
        assert flat.is_contiguous()
        if len(flat) > self.slot_bytes or "free" not in self.states:
            return None
        index = self.states.index("free")
        self.states[index] = "lent"
        torch.frombuffer(self.memory[index], dtype=torch.uint8)[: len(flat)].copy_(flat)
        return 7, index

    def lend_whole(self, tensor: torch.Tensor, nbytes: int) -> Slot | None:
        block = (ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())
        return self.lend(torch.frombuffer(block, dtype=torch.uint8))

    def stage(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self.breaks is not None:
            raise self.breaks
        self.staged += len(flats)
        return [flat.clone() for flat in flats]

    def borrow(self, slot: Slot, nbytes: int, device: torch.device) -> torch.Tensor:
        segment, index = slot
        if segment != 7 or index >= len(self.states) or self.states[index] != "lent" or nbytes > self.slot_bytes:
            raise ProtocolError(f"no {nbytes} bytes in {slot}")
        self.states[index] = "borrowed"
        block = (ctypes.c_ubyte * nbytes).from_buffer(self.memory[index])
        weakref.finalize(block, self._end, index)
        return torch.frombuffer(block, dtype=torch.uint8)

    def borrow_whole(self, slot: Slot, nbytes: int, device: torch.device, form: Form) -> torch.Tensor:
        storage = self.borrow(slot, nbytes, device).untyped_storage()
        return torch.empty(0, dtype=form.dtype).set_(storage, 0, form.shape, form.stride)

    def unstage(self, host: torch.Tensor, device: torch.device) -> torch.Tensor:
        self.unstaged += 1
        return host.clone()

    def take_back(self, slots: Sequence[Slot]) -> None:
        for _, index in slots:
            assert self.states[index] == "lent"
            self._end(index)

    def decline(self, slots: Iterable[Slot]) -> None:
        self.take_back(list(slots))

    def _end(self, index: int) -> None:
        self.states[index] = "free"
