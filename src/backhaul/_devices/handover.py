"""Device memory between workers of one process, which need not open what they have: a copy changes hands."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from backhaul._devices.stream_order import DeviceEvent, StreamOrder
from backhaul._wire.device_link import Slot
from backhaul.errors import ProtocolError

if TYPE_CHECKING:
    from backhaul._devices.links import Memory

_numbers = itertools.count(1)
_handed: dict[int, tuple[torch.Tensor, DeviceEvent, int, int]] = {}
"""What is on its way: memory, when it is there, on which device, and whose it was."""


class Handover:
    """Both ends, as ``lender`` and ``borrower`` are of shared memory. Thread-safe."""

    def __init__(self, memory: Memory, stream_order: StreamOrder) -> None:
        self._memory = memory
        self._frontier = stream_order

    def lend(self, flat: torch.Tensor, device: int, source: int) -> Slot | None:
        """Copy bytes; whoever knows the slot may have them."""
        memory = self._memory.empty(device, len(flat))
        self._memory.copy(memory, flat)
        ready = self._frontier.record_new(device)
        number = next(_numbers)
        _handed[number] = memory, ready, device, id(self)
        return 0, number

    def take_back(self, slots: Iterable[Slot]) -> None:
        """Nobody has been told of these."""
        for _, number in slots:
            _handed.pop(number, None)

    def borrow(self, slot: Slot, nbytes: int, device: int) -> torch.Tensor:
        """Take bytes."""
        segment, number = slot
        found = _handed.pop(number, None)
        if segment or found is None or found[2] != device or len(found[0]) < nbytes:
            raise ProtocolError(f"there are no {nbytes} bytes on cuda:{device} in slot {slot}")
        memory, ready, *_ = found
        self._frontier.follow(device, (ready,))
        self._frontier.adopt(memory)
        return memory

    def decline(self, slots: Iterable[Slot]) -> None:
        """Nobody is going to take these."""
        for _, number in slots:
            _handed.pop(number, None)

    def close(self) -> None:
        """The channel is lost, with what is on its way."""
        self.take_back([(0, number) for number, entry in list(_handed.items()) if entry[3] == id(self)])
