"""The links of one worker: for each peer where tensors arrive, for each channel to it how they get there.

``DeviceContext`` is what they have in common; a ``DeviceLink`` is for one peer, a ``ChannelLink`` is the
``wire.devices.Link``
for messages over one channel, in one of the two directions of a map.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from backhaul._devices.borrower import DeviceBorrower
from backhaul._devices.handover import Handover
from backhaul._devices.lender import HOST, DeviceLender
from backhaul._devices.placement import CPU, Party, Route, backward, index_of, onward, same_device
from backhaul._devices.segments import Ipc, Item, Offer, SegmentReply, free_deferred
from backhaul._devices.stream_order import StreamOrder
from backhaul._transport.base import Channel, ChannelClosedError
from backhaul._transport.shm import shared_memory
from backhaul._transport.shm.slots import Budget
from backhaul._wire.device_link import Form, Lease, Slot
from backhaul.errors import ProtocolError, SerializationError

_SHARE = 8  # of a device's memory, so many parts make one that slots may take
_HOST_SLOTS = 64 << 20  # bytes of host memory for small ones
_CHUNK = 8 << 20  # bytes that are copied to a device at a time
_SHARED = 2 << 20  # bytes from which on several threads copy


_HOST = torch.device(CPU)


def index_at(device: torch.device) -> int | None:
    """Which device it is; None: the host. With ``device_at``, all that makes a device one: tests have others."""
    return device.index if device.type == "cuda" else None


def device_at(index: int) -> torch.device:
    """The device of that index."""
    return torch.device("cuda", index)


class Member(Party, Protocol):
    """What a worker says of itself."""

    @property
    def host(self) -> str: ...

    @property
    def incarnation(self) -> str: ...


class Memory(Protocol):
    """Memory of devices, and of the host for what goes there."""

    def empty(self, device: int, nbytes: int) -> torch.Tensor:
        """Bytes on a device."""

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Host memory that a device can copy to and from while others go on."""

    def copy(self, to: torch.Tensor, flat: torch.Tensor) -> None:
        """Copy bytes, on the current streams."""

    def total(self, device: int) -> int:
        """How much a device has."""


class DeviceContext:
    """What the links of one worker share. Thread-safe.

    Args:
        own: The worker.
        memory: Of its devices.
        ipc: What of it others can open; None where nothing can be shared.
        frontier: The order of its process's streams.
        slot_bytes: How much of a device to use for slots; default: a share of it.

    Attributes:
        lent_before: How many bytes went over channels that are lost.
        tell: Sends what the peer at the other end of a channel is to be told.
        mourn: Looks after shared memory that has been given up.
        verify: Called before the first tensor of a device is sent or received. Raises if the devices are not ``own``'s.
    """

    tell: Callable[[Channel, Shared], None]
    mourn: Callable[[], object]
    verify: Callable[[], None] | None = None

    def __init__(
        self, own: Member, memory: Memory, ipc: Ipc | None, stream_order: StreamOrder, slot_bytes: int | None = None
    ) -> None:
        self.own = own
        self.memory = memory
        self.ipc = ipc
        self.stream_order = stream_order
        self.mourn = functools.partial(free_deferred, stream_order)
        self.counting = threading.Lock()  # guards lent_before, together with the links that it is about
        self.lent_before = 0
        self._limit = slot_bytes
        self._budgets: dict[int, Budget] = {}
        _living[own.incarnation] = os.getpid()

    def check(self) -> None:
        """A tensor of a device is about to be sent or received. Raises ``RuntimeError`` if it cannot be."""
        if self.verify is not None:
            self.verify()
            self.verify = None
        self.stream_order.check()

    def budget(self, device: int) -> Budget:
        """How much of a device's memory may be used for slots, or of the host's."""
        found = self._budgets.get(device)
        if found is None:
            if device == HOST:
                limit = _HOST_SLOTS
            elif self._limit is None:
                limit = self.memory.total(device) // _SHARE
            else:
                limit = self._limit
            found = self._budgets.setdefault(device, Budget(limit))
        return found

    @property
    def slot_bytes(self) -> int:
        """How much device memory is used for slots."""
        return sum(budget.used for device, budget in list(self._budgets.items()) if device != HOST)

    def close(self) -> None:
        """The worker ends."""
        _living.pop(self.own.incarnation, None)


_living: dict[str, int] = {}  # incarnations of workers in this process, and the process: a fork is another


class Shared:
    """Both ends of the memory that two processes share over one channel."""

    def __init__(self, device_context: DeviceContext, ipc: Ipc) -> None:
        self.lender = DeviceLender(ipc, device_context.stream_order, device_context.own.devices, device_context.budget)
        self.borrower = DeviceBorrower(ipc, device_context.stream_order, device_context.own.devices)
        self.lend = self.lender.lend
        self.take_back = self.lender.take_back
        self.borrow = self.borrower.borrow
        self.decline = self.borrower.decline

    @property
    def news(self) -> collections.deque[Item]:
        """What the peer is to be told."""
        return self.lender.news

    def hear(self, items: Iterable[Item]) -> list[Offer]:
        """The peer has told something; what of it is to be opened. Raises ``ProtocolError``."""
        offers = []
        for item in items:
            if isinstance(item, Offer):
                self.borrower.check(item)
                offers.append(item)
            elif isinstance(item, SegmentReply):
                self.lender.answered(item)
            else:
                self.borrower.retired(item.number)
        return offers

    def open(self, offers: Iterable[Offer]) -> None:
        """Open what the peer offers, which takes a while."""
        self.news.extend(map(self.borrower.open, offers))

    def close(self) -> None:
        """The channel is lost."""
        self.borrower.close()  # first: the other may wait for a thread that waits for the peer
        self.lender.close()


class ChannelLink:
    """A ``wire.devices.Link``. Without ``ends`` all is staged.

    Attributes:
        channel: The one that messages with slots have to take.
    """

    def __init__(
        self, route: Route, peer: Member, device_context: DeviceContext | None, ends: Shared | Handover | None
    ) -> None:
        self.channel: Channel | None = None
        self.takes_host = route.takes_host or index_at(_HOST) is not None
        self._route = route
        self._peer = peer
        self._plane = device_context
        self._ends = ends
        self._names: dict[torch.device, str] = {}
        self._slots: dict[torch.device, int | None] = {}  # where slots for a device's tensors lie, by index here

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
        if self._plane is None or index_of(name) >= len(self._plane.own.devices):
            raise ProtocolError(f"there is no device {name} here")
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
        if source is None or not isinstance(ends, Shared):
            return None
        place = self._place(tensor.device)
        return None if place is None else ends.lender.lend_at(tensor.data_ptr(), nbytes, place, source)

    def _place(self, device: torch.device) -> int | None:
        """Where, by index here, slots for a device's tensors lie."""
        assert self._plane is not None
        self._plane.check()
        place = self._slots.get(device, -1)
        if place == -1:
            # On the very device where it is to be: then the receiver works on what is in the slot.
            place = self._slots[device] = same_device(self._plane.own, self._peer, self.name(device))
        return place

    def stage(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        device_context, staged = self._plane, []
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
            device_context.stream_order.settle(devices)
        return staged

    def borrow(self, slot: Slot, nbytes: int, device: torch.device) -> torch.Tensor:
        index = index_at(device)
        if self._ends is None or index is None:
            raise ProtocolError(f"slot {slot}, where no device memory is shared")
        assert self._plane is not None
        self._plane.check()
        return self._ends.borrow(slot, nbytes, index)

    def borrow_whole(self, slot: Slot, nbytes: int, device: torch.device, form: Form) -> torch.Tensor:
        index = index_at(device)
        if not isinstance(self._ends, Shared) or index is None:
            raise ProtocolError(f"slot {slot}, where no device memory is shared")
        assert self._plane is not None
        self._plane.check()
        return self._ends.borrower.borrow(slot, nbytes, index, form)

    def unstage(self, host: torch.Tensor, device: torch.device) -> torch.Tensor:
        index = index_at(device)
        assert self._plane is not None
        assert index is not None
        self._plane.check()
        memory = self._plane.memory
        pinned, made = memory.pinned(len(host)), memory.empty(index, len(host))
        for start in range(0, len(host), _CHUNK):  # the device has one of them while the host copies the next
            part = slice(start, start + _CHUNK)
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
    """Copy bytes. To share a few of them among torch's threads takes longer than the copy."""
    if len(source) > _SHARED:
        to.copy_(source)
    else:
        ctypes.memmove(to.data_ptr(), source.data_ptr(), len(source))


class _Pair:
    """The links over one channel."""

    __slots__ = ("back", "ends", "onward")

    def __init__(
        self, peer: DeviceLink, record: Member, channel: Channel | None, ends: Shared | Handover | None
    ) -> None:
        self.ends = ends
        self.onward = ChannelLink(peer.onward, record, peer.device_context, ends)
        self.back = ChannelLink(peer.back, record, peer.device_context, ends)
        self.onward.channel = self.back.channel = channel


class DeviceLink:
    """What stands between one worker and another for tensors of devices. Thread-safe.

    Args:
        own: The worker.
        record: The other.
        plane: Where the worker has devices.
        open: Whether the two may share memory: they trust each other.
    """

    def __init__(self, own: Member, record: Member, device_context: DeviceContext | None, *, open: bool) -> None:
        self.device_context = device_context
        self.onward, self.back = onward(own, record), backward(own, record)
        self._own = own
        self._record = record
        self._open = open and device_context is not None
        self._staged = _Pair(self, record, None, None)
        self._pairs: dict[Channel, _Pair] = {}

    @property
    def needed(self) -> bool:
        """Whether there is anything to do: a worker without devices has not, unless its tensors go to another's."""
        return self.device_context is not None or self.onward.takes_host or self.back.takes_host

    def opened(self, channel: Channel) -> None:
        """There is a channel to the peer."""
        ends: Shared | Handover | None = None
        if self._open and self._record.devices:
            device_context = self.device_context
            assert device_context is not None
            if _living.get(self._record.incarnation) == os.getpid():
                ends = Handover(device_context.memory, device_context.stream_order)
            elif device_context.ipc is not None and self._record.host == self._own.host and shared_memory.available():
                ends = Shared(device_context, device_context.ipc)
        self._pairs[channel] = _Pair(self, self._record, channel, ends)

    def lost(self, channel: Channel) -> None:
        """A channel to the peer is gone."""
        device_context = self.device_context
        with contextlib.nullcontext() if device_context is None else device_context.counting:
            pair = self._pairs.pop(channel, None)
            if device_context is not None and pair is not None and isinstance(pair.ends, Shared):
                device_context.lent_before += pair.ends.lender.bytes_lent
        if pair is not None and pair.ends is not None:
            assert device_context is not None
            pair.ends.close()
            device_context.mourn()

    def close(self) -> None:
        """The worker ends."""
        for channel in list(self._pairs):
            self.lost(channel)

    def request(self, channel: Channel | None) -> ChannelLink:
        """For what this worker asks of the peer, and gradients of what the peer has answered."""
        return self._pair(channel).onward

    def answer(self, channel: Channel | None) -> ChannelLink:
        """For what goes back to the peer: replies, and gradients of what it has asked."""
        return self._pair(channel).back

    def _pair(self, channel: Channel | None) -> _Pair:
        return self._staged if channel is None else self._pairs.get(channel, self._staged)

    def takes_from(self, device: str) -> bool:
        """Whether the peer's answers may bring tensors of a device of its."""
        try:
            backward(self._record, self._own).target(device)
        except SerializationError:
            return False
        return True

    def ends_of(self, channel: Channel) -> Shared | None:
        """The memory shared over a channel."""
        ends = self._pair(channel).ends
        return ends if isinstance(ends, Shared) else None

    def shared(self) -> list[tuple[Channel, Shared]]:
        """All that is shared with the peer."""
        return [(channel, pair.ends) for channel, pair in list(self._pairs.items()) if isinstance(pair.ends, Shared)]

    def depart(self) -> None:
        """A message is about to go out."""
        if self.device_context is not None:
            self.device_context.stream_order.depart()
            self.tell()

    def tell(self) -> None:
        """Let the peer know of memory that there is for it."""
        for channel, pair in list(self._pairs.items()):
            if isinstance(pair.ends, Shared) and pair.ends.news:
                assert self.device_context is not None
                self.device_context.tell(channel, pair.ends)

    def arrive(self, channel: Channel | None) -> ChannelLink:
        """A message has come over ``channel``, and this thread goes on with it; what to read it with."""
        if self.device_context is not None:
            self.device_context.stream_order.arrive()
        return self._pair(channel).back


def link_to(own: Member, record: Member, device_context: DeviceContext | None, *, open: bool) -> DeviceLink | None:
    """What stands between two workers; None: nothing, for there are no devices."""
    if device_context is None and not (own.maps or record.maps):
        return None
    made = DeviceLink(own, record, device_context, open=open)
    return made if made.needed else None


def hand_over(lease: Lease, channel: Channel) -> None:
    """The slots of a message go out with it. They belong to one channel, which may have been lost meanwhile.

    Raises ``ChannelClosedError``.
    """
    if isinstance(lease.link, ChannelLink) and lease.link.channel is not channel:
        raise ChannelClosedError("the channel was lost while the message was being encoded")
    lease.sent = True
