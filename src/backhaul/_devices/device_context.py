"""What the links of one worker share: its devices, their memory and streams, and how much of it slots may take."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from backhaul._devices.backend import Ipc, Memory
from backhaul._devices.deferred_free import free_deferred
from backhaul._devices.lending import HOST
from backhaul._devices.placement import Party
from backhaul._devices.stream_order import StreamOrder
from backhaul._transport.base import Channel
from backhaul._transport.shm.slots import Budget

if TYPE_CHECKING:
    from backhaul._devices.shared_slots import SharedSlots

_DEVICE_SHARE = 8  # slots may take one part in so many of a device's memory
_HOST_SLOT_BYTES = 64 << 20  # of host memory, for small slots


class Member(Party, Protocol):
    """What a worker says of itself."""

    @property
    def host(self) -> str: ...

    @property
    def incarnation(self) -> str: ...


class DeviceContext:
    """What the links of one worker share. Thread-safe.

    Args:
        own: The worker.
        memory: Memory of its devices.
        ipc: Memory that others can open; None where nothing can be shared.
        stream_order: The order of its process's streams.
        slot_bytes: How many bytes of a device to use for slots; default: a share of the device.

    Attributes:
        count_lock: Guards ``bytes_lent_before``, together with the links that it is about.
        bytes_lent_before: How many bytes went over channels that are lost.
        send_updates: Sends the news of shared slots to the peer at the other end of a channel.
        free_soon: Frees shared memory that is no longer lent, as soon as that is safe.
        verify: Called before the first tensor of a device is sent or received. Raises if the devices are not ``own``'s.
    """

    send_updates: Callable[[Channel, SharedSlots], None]
    free_soon: Callable[[], object]
    verify: Callable[[], None] | None = None

    def __init__(
        self, own: Member, memory: Memory, ipc: Ipc | None, stream_order: StreamOrder, slot_bytes: int | None = None
    ) -> None:
        self.own = own
        self.memory = memory
        self.ipc = ipc
        self.stream_order = stream_order
        self.free_soon = functools.partial(free_deferred, stream_order.slot_order)
        self.count_lock = threading.Lock()
        self.bytes_lent_before = 0
        self._limit = slot_bytes
        self._budgets: dict[int, Budget] = {}
        _processes[own.incarnation] = os.getpid()

    def check(self) -> None:
        """A tensor of a device is about to be sent or received. Raises ``RuntimeError`` if that is impossible."""
        if self.verify is not None:
            self.verify()
            self.verify = None
        self.stream_order.slot_order.check()

    def budget(self, device: int) -> Budget:
        """How much memory of a device, or of the host, may be used for slots."""
        found = self._budgets.get(device)
        if found is None:
            if device == HOST:
                limit = _HOST_SLOT_BYTES
            elif self._limit is None:
                limit = self.memory.total(device) // _DEVICE_SHARE
            else:
                limit = self._limit
            found = self._budgets.setdefault(device, Budget(limit))
        return found

    @property
    def slot_bytes(self) -> int:
        """How many bytes of device memory are used for slots."""
        return sum(budget.used for device, budget in list(self._budgets.items()) if device != HOST)

    def close(self) -> None:
        """The worker ends."""
        _processes.pop(self.own.incarnation, None)


_processes: dict[str, int] = {}  # incarnation of each worker in this process -> the process: a forked child is another


def in_this_process(member: Member) -> bool:
    """Whether a worker with devices runs in this very process."""
    return _processes.get(member.incarnation) == os.getpid()
