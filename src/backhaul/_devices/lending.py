"""Device memory for ``_transport.shm.lender``: owns the memory of segments, and copies tensors into their slots.

The protocol between the two processes is ``Lender``'s; ``_devices`` describes what device memory adds to it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec
import torch

from backhaul._devices.backend import Ipc, MemoryBlock
from backhaul._devices.deferred_free import free_later
from backhaul._devices.pages import HEAD_BYTES, Pages, pages_size, probe, span_of_done
from backhaul._devices.process_identity import has_ended, identity_of
from backhaul._devices.segment_messages import Item, Offer, Retire, SegmentReply
from backhaul._devices.slot_order import SlotOrder
from backhaul._transport.shm import segments
from backhaul._transport.shm.lender import Lender
from backhaul._transport.shm.slots import FREE, Budget
from backhaul._wire.device_link import Slot
from backhaul.errors import ProtocolError

HOST = -1
"""Stands for the host among devices that have a budget."""

SMALL_BYTES = 16 << 10
"""Slots up to this size are in host memory. A device reads that much from there in the time that it needs to begin."""

_SMALLEST_BYTES = 4096  # of a slot
_RETRY_SECONDS = 10.0  # after which memory is asked for again where there was none left

Home = tuple[int, bool]
"""Where slots lie: for which device, and whether they are small ones, in host memory."""


class LentDeviceMemory:
    """The memory of one segment, as its sender has it. Also a ``DeferredFree``.

    Attributes:
        pages: What both processes see.
        memory: Where the slots are: in the pages, or in device memory.
        start: The offset of the first slot in it.
    """

    __slots__ = (
        "_abandoned",
        "_budget",
        "_descriptor",
        "_ipc",
        "_nbytes",
        "_offer",
        "_receiver",
        "_watch",
        "memory",
        "on_host",
        "pages",
        "start",
    )

    def __init__(self, ipc: Ipc, budget: Budget, pages: Pages, memory: MemoryBlock, offer: Offer) -> None:
        self.pages = pages
        self.memory = memory
        self.on_host = memory is pages.pinned
        self.start = HEAD_BYTES if self.on_host else 0
        self._ipc = ipc
        self._budget = budget
        self._nbytes = offer.slot_bytes * offer.count  # that are counted in the budget
        self._offer = offer
        self._descriptor = offer.descriptor  # open until the receiver has replied
        self._watch: object = None
        self._receiver = -1  # the identity of the receiver's process
        self._abandoned = False  # the receiver's process has ended

    @property
    def states(self) -> memoryview:
        return self.pages.states

    def offer(self, number: int) -> Offer:
        return msgspec.structs.replace(self._offer, number=number)

    def check_opened(self, number: int) -> None:
        if not self.pages.opened:
            raise ProtocolError(f"the peer has accepted segment {number} of device memory and has not opened it")

    def opened(self) -> None:
        pages = self.pages
        self._receiver = identity_of(pages.opened)
        self._watch = self._ipc.watch(self._descriptor, pages.opened, span_of_done(len(pages.states)))
        self._close_descriptor()

    def release(self) -> None:
        self._close_descriptor()
        free_later(self)

    def _close_descriptor(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    @property
    def is_settled(self) -> bool:
        """Whether all that was copied into slots is there."""
        return all(flag.query() for flag in self.pages.ready)

    def set_flags_of_ended(self) -> None:
        if not self._abandoned and self.pages.opened and has_ended(self.pages.opened, self._receiver):
            self._abandoned = True
            self.pages.force_done()

    def can_free(self) -> bool:
        pages = self.pages
        return (self._abandoned or not (pages.in_use or pages.opened)) and pages.passed

    def free_memory(self) -> None:
        del self.memory
        self._budget.give_back(self._nbytes)


class DeviceSegments:
    """Makes segments of device memory, and of pinned host memory for small slots.

    Args:
        ipc: Memory that other processes can open.
        slot_order: The order of copies.
        identities: What this process's devices are.
        budgets: For each device, and for ``HOST``, what all channels of the worker share.
    """

    smallest = _SMALLEST_BYTES
    retry_seconds = _RETRY_SECONDS

    def __init__(
        self, ipc: Ipc, slot_order: SlotOrder, identities: Sequence[str], budgets: Callable[[int], Budget]
    ) -> None:
        self._ipc = ipc
        self._slot_order = slot_order
        self._identities = identities
        self._budgets = budgets

    def budget(self, home: Home) -> Budget:
        device, small = home
        return self._budgets(HOST if small else device)

    def create(self, home: Home, slot_bytes: int, count: int) -> LentDeviceMemory | None:
        budget = self.budget(home)
        if not budget.take(slot_bytes * count):
            return None
        try:
            return self._create(budget, home, slot_bytes, count)
        except BaseException:
            budget.give_back(slot_bytes * count)
            raise

    def _create(self, budget: Budget, home: Home, slot_bytes: int, count: int) -> LentDeviceMemory:
        device, small = home
        descriptor, mapping, cookie = segments.create(pages_size(slot_bytes, count, slots=small))
        try:
            pages = Pages(self._ipc, mapping, count, device)
            memory = pages.pinned if small else self._ipc.allocate(device, slot_bytes * count)
            handle = b"" if small else self._ipc.export(memory)
            probe(self._ipc, self._slot_order, pages, device, sender=True)
        except BaseException:
            os.close(descriptor)
            raise
        offer = Offer(0, self._identities[device], slot_bytes, count, handle, os.getpid(), descriptor, cookie)
        return LentDeviceMemory(self._ipc, budget, pages, memory, offer)

    def retire(self, number: int) -> Retire:
        return Retire(number)


class DeviceLender(Lender[Item]):
    """Puts tensors into slots. Thread-safe, and waits for nobody: a tensor without a slot is staged.

    Args:
        ipc: Memory that other processes can open.
        slot_order: The order of copies.
        identities: What this process's devices are.
        budgets: For each device, and for ``HOST``, what all channels of the worker share.
        now: The clock.
    """

    def __init__(
        self,
        ipc: Ipc,
        slot_order: SlotOrder,
        identities: Sequence[str],
        budgets: Callable[[int], Budget],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(DeviceSegments(ipc, slot_order, identities, budgets), now)
        self._ipc = ipc
        self._slot_order = slot_order

    def lend(self, flat: torch.Tensor, device: int, source: int | None = None) -> Slot | None:
        """Copy the bytes of a tensor on the device ``source`` into a slot for ``device``, where the receiver is to have
        them; None if there is no slot.
        """
        return self.lend_at(flat.data_ptr(), len(flat), device, device if source is None else source)

    def lend_at(self, address: int, nbytes: int, device: int, source: int) -> Slot | None:
        """Copy bytes that begin at an address into a slot for ``device``; None if there is no slot."""
        slot = self.take((device, nbytes <= SMALL_BYTES), nbytes)
        if slot is None:
            return None
        segment, index = slot
        lent: LentDeviceMemory = segment.memory
        try:
            self._copy(lent, index, lent.start + index * segment.slot_bytes, (address, nbytes), source)
        except BaseException:
            segment.states[index] = FREE
            raise
        return segment.number, index

    def _copy(self, lent: LentDeviceMemory, index: int, offset: int, stretch: tuple[int, int], source: int) -> None:
        slot_order, ipc, ready, done = self._slot_order, self._ipc, lent.pages.ready[index], lent.pages.done[index]
        settled = ready.query() and done.query()
        if settled and lent.on_host and (host := ipc.on_host(*stretch)) and slot_order.is_idle(source):
            ipc.copy_on_host(lent.memory, offset, host, stretch[1])
            return  # ``ready`` is still passed
        if not settled:
            slot_order.follow(source, (ready, done))
        ipc.copy(lent.memory, offset, stretch, source)
        slot_order.record(ready, source)

    def take_back(self, slots: Iterable[Slot]) -> None:
        """Slots that were not named to the receiver are free again. Takes no lock."""
        for number, index in slots:
            self.free(number, index)

    def answered(self, reply: SegmentReply) -> None:
        """The receiver says whether it has opened a segment."""
        self.replied(reply.number, reply.accepted)

    @property
    def is_settled(self) -> bool:
        """Whether all that was copied into slots is there."""
        return all(segment.memory.is_settled for segment in list(self._segments.values()))
