"""How tensors of devices get into and out of the messages of a channel: in slots, handed over, or through the host."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import torch

from backhaul._devices.device_context import DeviceContext, Member
from backhaul._devices.handover import Handover
from backhaul._devices.placement import CPU, Route, index_of, same_device
from backhaul._devices.shared_slots import SharedSlots
from backhaul._transport.base import Channel, ChannelClosedError
from backhaul._wire.device_link import Form, Lease, Slot
from backhaul.errors import ProtocolError

_CHUNK_BYTES = 8 << 20  # that are copied to a device at a time
_PARALLEL_BYTES = 2 << 20  # from which on torch's threads copy together
_HOST = torch.device(CPU)


def index_at(device: torch.device) -> int | None:
    """The index of a device; None: the host. Tests replace this and ``device_at`` to have other devices."""
    return device.index if device.type == "cuda" else None


def device_at(index: int) -> torch.device:
    """The device of that index."""
    return torch.device("cuda", index)


class ChannelLink:
    """A ``_wire.device_link.Link`` for the messages over one channel, in one of the two directions of a map. Without
    ``ends`` everything is staged through the host.

    Attributes:
        channel: The channel that messages with slots have to take.
    """

    def __init__(
        self, route: Route, peer: Member, device_context: DeviceContext | None, ends: SharedSlots | Handover | None
    ) -> None:
        self.channel: Channel | None = None
        self.takes_host = route.takes_host or index_at(_HOST) is not None
        self._route = route
        self._peer = peer
        self._context = device_context
        self._ends = ends
        self._names: dict[torch.device, str] = {}
        self._slots: dict[torch.device, int | None] = {}  # where slots for tensors of a device lie

    def takes(self, device: torch.device) -> bool:
        return index_at(device) is not None or (self.takes_host and device == _HOST)

    def name(self, device: torch.device) -> str:
        found = self._names.get(device)
        if found is None:
            index = index_at(device)
            target = self._route.target(CPU if index is None else f"cuda:{index}")
            found = self._names[device] = "" if target == CPU else target
        return found

    def device(self, name: str) -> torch.device:
        if self._context is None or index_of(name) >= len(self._context.own.devices):
            raise ProtocolError(f"the peer names device {name}, which this worker does not have")
        return device_at(index_of(name))

    def lend(self, flat: torch.Tensor) -> Slot | None:
        source = index_at(flat.device)
        if self._ends is None or source is None:
            return None
        place = self._place(flat.device)
        return None if place is None else self._ends.lend(flat, place, source)

    def lend_whole(self, tensor: torch.Tensor, nbytes: int) -> Slot | None:
        ends = self._ends
        source = index_at(tensor.device)
        if source is None or not isinstance(ends, SharedSlots):
            return None
        place = self._place(tensor.device)
        return None if place is None else ends.lender.lend_at(tensor.data_ptr(), nbytes, place, source)

    def _place(self, device: torch.device) -> int | None:
        """The index here of the device on which slots for a device's tensors lie."""
        assert self._context is not None
        self._context.check()
        place = self._slots.get(device, -1)
        if place == -1:
            # On the very device where the tensor is to arrive: then the receiver computes with the slot itself.
            place = self._slots[device] = same_device(self._context.own, self._peer, self.name(device))
        return place

    def stage(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        device_context, staged = self._context, []
        devices: set[int] = set()
        for flat in flats:
            index = index_at(flat.device)
            if index is None:
                staged.append(flat)
                continue
            assert device_context is not None
            device_context.check()
            host = device_context.memory.pinned(len(flat))
            device_context.memory.copy(host, flat)
            devices.add(index)
            staged.append(host)
        if devices:
            assert device_context is not None
            device_context.stream_order.slot_order.synchronize(devices)
        return staged

    def borrow(self, slot: Slot, nbytes: int, device: torch.device) -> torch.Tensor:
        index = index_at(device)
        if self._ends is None or index is None:
            raise ProtocolError(f"the peer names slot {slot}, but no device memory is shared with it")
        assert self._context is not None
        self._context.check()
        return self._ends.borrow(slot, nbytes, index)

    def borrow_whole(self, slot: Slot, nbytes: int, device: torch.device, form: Form) -> torch.Tensor:
        index = index_at(device)
        if not isinstance(self._ends, SharedSlots) or index is None:
            raise ProtocolError(f"the peer names slot {slot}, but no device memory is shared with it")
        assert self._context is not None
        self._context.check()
        return self._ends.borrower.borrow(slot, nbytes, index, form)

    def unstage(self, host: torch.Tensor, device: torch.device) -> torch.Tensor:
        index = index_at(device)
        assert self._context is not None
        assert index is not None
        self._context.check()
        memory = self._context.memory
        pinned, made = memory.pinned(len(host)), memory.empty(index, len(host))
        for start in range(0, len(host), _CHUNK_BYTES):  # the device copies one chunk while the host copies the next
            part = slice(start, start + _CHUNK_BYTES)
            _copy_on_host(pinned[part], host[part])
            memory.copy(made[part], pinned[part])
        return made

    def take_back(self, slots: Sequence[Slot]) -> None:
        if self._ends is not None:
            self._ends.take_back(slots)

    def decline(self, slots: Iterable[Slot]) -> None:
        if self._ends is not None:
            self._ends.decline(slots)


def _copy_on_host(to: torch.Tensor, source: torch.Tensor) -> None:
    """Copy bytes. For a few of them, starting torch's threads takes longer than the copy."""
    if len(source) > _PARALLEL_BYTES:
        to.copy_(source)
    else:
        ctypes.memmove(to.data_ptr(), source.data_ptr(), len(source))


def hand_over(lease: Lease, channel: Channel) -> None:
    """The slots of a message go out with it over ``channel``. Raises ``ChannelClosedError`` if they belong to another
    channel, which has been lost since the message was encoded.
    """
    if isinstance(lease.link, ChannelLink) and lease.link.channel is not channel:
        raise ChannelClosedError("the channel was lost while the message was being encoded")
    lease.sent = True
