"""Device memory between workers of one process: the sender makes a copy, and the receiver takes it.

Both use the same address space, so no memory has to be opened and nothing goes back.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch

from backhaul._devices.backend import DeviceEvent, Memory
from backhaul._devices.stream_order import StreamOrder
from backhaul._wire.device_link import Slot
from backhaul.errors import ProtocolError

_numbers = itertools.count(1)
_handed: dict[int, tuple[torch.Tensor, DeviceEvent, int, int]] = {}
"""Copies on their way, by number: the memory, the event after which it is filled, its device, and its sender."""


class Handover:
    """Both ends, like lender and borrower of shared memory. Thread-safe."""

    def __init__(self, memory: Memory, stream_order: StreamOrder) -> None:
        self._memory = memory
        self._stream_order = stream_order

    def lend(self, flat: torch.Tensor, device: int, source: int) -> Slot | None:
        """Copy bytes. The worker that is told the slot takes them."""
        memory = self._memory.empty(device, len(flat))
        self._memory.copy(memory, flat)
        ready = self._stream_order.slot_order.record_new(device)
        number = next(_numbers)
        _handed[number] = memory, ready, device, id(self)
        return 0, number

    def take_back(self, slots: Iterable[Slot]) -> None:
        """Drop copies that were not named to the receiver."""
        for _, number in slots:
            _handed.pop(number, None)

    def borrow(self, slot: Slot, nbytes: int, device: int) -> torch.Tensor:
        """Take the bytes of a copy."""
        segment, number = slot
        found = _handed.pop(number, None)
        if segment or found is None or found[2] != device or len(found[0]) < nbytes:
            raise ProtocolError(f"there are no {nbytes} bytes on cuda:{device} in slot {slot}")
        memory, ready, *_ = found
        self._stream_order.slot_order.follow(device, (ready,))
        self._stream_order.adopt(memory)
        return memory

    def decline(self, slots: Iterable[Slot]) -> None:
        """Drop copies of a message that nobody reads."""
        for _, number in slots:
            _handed.pop(number, None)

    def close(self) -> None:
        """The channel is lost: drop the copies that are on their way."""
        self.take_back([(0, number) for number, entry in list(_handed.items()) if entry[3] == id(self)])
