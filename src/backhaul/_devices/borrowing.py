"""Device memory for ``_transport.shm.borrower``: opens segments of another process, and makes tensors of their slots.

The protocol between the two processes is ``Lender``'s; ``_devices`` describes what device memory adds to it.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Sequence

import torch

from backhaul._devices.backend import HANDLE_BYTES, DeviceEvent, Ipc, MemoryBlock
from backhaul._devices.deferred_free import free_later
from backhaul._devices.pages import HEAD_BYTES, TAKEN, Pages, pages_size, probe, span_of_ready
from backhaul._devices.process_identity import has_ended, identity_of
from backhaul._devices.segment_messages import Offer, SegmentReply
from backhaul._devices.slot_order import SlotOrder
from backhaul._transport.shm import segments
from backhaul._transport.shm.borrower import BorrowedSegment, Borrower
from backhaul._wire.device_link import Form, Slot
from backhaul.errors import ProtocolError

_MAX_SEGMENTS = 1 << 12
_MAX_SEGMENT_BYTES = 1 << 48

log = logging.getLogger("backhaul")


class FlagSpin:
    """Polls a flag for a short time, if that has paid off recently. Not ``spin_wait``: that is about messages.

    A stream that waits is work for the device, and the device has to switch from process to process for it. That also
    makes the next message late. Where the sent tensor takes long to compute, polling gains nothing.
    """

    SPIN_SECONDS = 300e-6  # as long as two switches between processes
    MAX_CREDIT = 8
    _RETRY_WAITS = 64  # of these, one polls although there is no credit

    def __init__(self) -> None:
        self._credit = self.MAX_CREDIT
        self._skipped = 0

    def wait(self, flag: DeviceEvent) -> bool:
        """Whether the flag was passed within ``SPIN_SECONDS``."""
        if self._credit <= 0:
            self._skipped += 1
            if self._skipped < self._RETRY_WAITS:
                return False
            self._skipped = 0
        until = time.perf_counter() + self.SPIN_SECONDS
        while time.perf_counter() < until:
            if flag.query():
                self._credit = min(self._credit + 2, self.MAX_CREDIT)
                return True
            time.sleep(0)  # lets other threads run
        self._credit = max(self._credit - 1, 0)
        return False


class BorrowedDeviceSegment(BorrowedSegment):
    """A segment of device memory, as its receiver has it. Also a ``DeferredFree``."""

    __slots__ = (
        "_identity",
        "_ipc",
        "_on_host",
        "_sender",
        "_slot_order",
        "_spin",
        "device",
        "memory",
        "pages",
        "watch",
    )

    def __init__(
        self,
        ipc: Ipc,
        slot_order: SlotOrder,
        spin: FlagSpin,
        *,
        device: int,
        offer: Offer,
        pages: Pages,
        memory: MemoryBlock,
    ) -> None:
        super().__init__(offer.slot_bytes, pages.states)
        self.device = device
        self.memory = memory
        self.pages = pages
        self.watch: Sequence[object] = ()
        self._ipc = ipc
        self._slot_order = slot_order
        self._spin = spin
        self._on_host = memory is pages.pinned
        self._sender = offer.process  # 0: it has ended
        self._identity = identity_of(offer.process)

    def view(self, index: int, nbytes: int, form: Form | None) -> tuple[torch.Tensor, object]:
        self.states[index] = TAKEN
        ready = self.pages.ready[index]
        if not ready.query() and not (self._on_host and self._spin.wait(ready)):
            self._slot_order.follow(self.device, (ready,))
        offset = (HEAD_BYTES if self._on_host else 0) + index * self.slot_bytes
        form = form or Form(torch.uint8, (nbytes,), (1,))
        return self._ipc.view(self.memory, offset, nbytes, self.device, form)

    def give_back(self, index: int) -> None:
        free = functools.partial(self.free, index)
        self._slot_order.record_behind_all(self.pages.done[index], self.device, free)

    # CUDA does not work in a forked child, so there is nothing to copy in one.

    def release(self, *, lost: bool) -> None:
        if lost:
            self.pages.close()
        free_later(self)

    def set_flags_of_ended(self) -> None:
        if self._sender and has_ended(self._sender, self._identity):
            self._sender = 0
            self.pages.force_ready()
            lost = sum(self.pages.lost(index) for index, taken in enumerate(self.taken) if taken)
            if lost:
                log.error(
                    "a worker ended before %d tensors that it had sent were computed: their content is lost", lost
                )

    def can_free(self) -> bool:
        return not any(self.taken) and self.pages.passed

    def free_memory(self) -> None:
        del self.memory
        self.pages.opened = 0


class DeviceBorrower(Borrower[BorrowedDeviceSegment]):
    """Makes tensors of slots. Thread-safe.

    Args:
        ipc: Memory that other processes have made.
        slot_order: The order of copies.
        identities: What this process's devices are.
    """

    def __init__(self, ipc: Ipc, slot_order: SlotOrder, identities: Sequence[str]) -> None:
        super().__init__(max_segments=_MAX_SEGMENTS, max_segment_bytes=_MAX_SEGMENT_BYTES)
        self._ipc = ipc
        self._slot_order = slot_order
        self._identities = list(identities)
        self._opening = threading.Lock()  # one offer is opened at a time
        self._spin = FlagSpin()

    def check(self, offer: Offer) -> None:
        """Raise ``ProtocolError`` if no sender makes such an offer."""
        self.check_offer(offer.number, offer.slot_bytes, offer.count)
        if len(offer.memory) not in (0, HANDLE_BYTES) or len(offer.cookie) != segments.COOKIE_BYTES:
            raise ProtocolError(
                f"impossible segment {offer.number}: a handle of {len(offer.memory)} bytes "
                f"and a cookie of {len(offer.cookie)} bytes"
            )

    def open(self, offer: Offer) -> SegmentReply:
        """Open a segment that the sender offers, and return the reply. Takes milliseconds."""
        with self._opening:
            accepted = offer.number not in self._segments and self._open(offer)
        if self._closed:
            self.close()  # again: the segment was not in the table yet
        return SegmentReply(offer.number, accepted)

    def _open(self, offer: Offer) -> bool:
        if self.is_full or offer.device not in self._identities or offer.process <= 0:
            return False
        device = self._identities.index(offer.device)
        watches: list[object] = []

        def watch(file: int) -> None:
            watches.append(self._ipc.watch(file, offer.process, span_of_ready(offer.count)))

        try:
            total = pages_size(offer.slot_bytes, offer.count, slots=not offer.memory)
            mapping = segments.attach(offer.process, offer.descriptor, total, offer.cookie, watch)
            pages = Pages(self._ipc, mapping, offer.count, device)
        except (RuntimeError, OSError):
            return False
        pages.opened = os.getpid()  # first: the sender frees nothing that may be open
        try:
            size = offer.count * offer.slot_bytes
            memory = self._ipc.open(offer.memory, device, size) if offer.memory else pages.pinned
        except RuntimeError:
            pages.opened = 0
            return False
        segment = BorrowedDeviceSegment(
            self._ipc, self._slot_order, self._spin, device=device, offer=offer, pages=pages, memory=memory
        )
        del memory
        try:
            probe(self._ipc, self._slot_order, pages, device, sender=False)
        except RuntimeError:
            segment.free_memory()
            return False
        segment.watch = watches
        self._segments[offer.number] = segment
        return True

    def borrow(self, slot: Slot, nbytes: int, device: int, form: Form | None = None) -> torch.Tensor:
        """The bytes in a slot, or a tensor of that form on them. The slot goes back when nothing refers to the storage
        any more.
        """
        number, index = slot
        segment = self.find(number, index, nbytes)
        if segment.device != device:
            raise ProtocolError(f"slot {index} of segment {number} is on cuda:{segment.device}, not on cuda:{device}")
        if segment.pages.lost(index):
            raise ProtocolError(f"the worker has ended before slot {index} of segment {number} was computed")
        tensor: torch.Tensor = self.lease(segment, index, nbytes, form)
        return tensor
