"""The receiving end of shared device memory, see ``segments``: opens it, and makes tensors of its slots."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from backhaul._devices.segments import (
    HANDLE,
    HEAD,
    SMALLEST,
    TAKEN,
    Ipc,
    Offer,
    Pages,
    SegmentReply,
    Stretch,
    bury,
    has_ended,
    identity_of,
    pages_size,
    probe,
    span_of_ready,
)
from backhaul._devices.stream_order import DeviceEvent, StreamOrder
from backhaul._transport.shm import shared_memory
from backhaul._transport.shm.slots import FREE, LENT, MAX_SLOTS
from backhaul._wire.device_link import Form, Slot
from backhaul.errors import ProtocolError

_MAX_SEGMENTS = 1 << 12  # that a receiver has opened at once
_MAX_SEGMENT = 1 << 48

log = logging.getLogger("backhaul")


class _BorrowedDevice:
    """A segment as its receiver knows it."""

    __slots__ = ("device", "life", "memory", "pages", "sender", "slot_bytes", "start", "stream_order", "taken", "watch")

    def __init__(self, stream_order: StreamOrder, device: int, offer: Offer, pages: Pages, memory: Stretch) -> None:
        self.stream_order = stream_order
        self.device = device
        self.memory = memory
        self.start = HEAD if memory is pages.pinned else 0
        self.pages = pages
        self.sender = offer.process
        self.life = identity_of(offer.process)
        self.slot_bytes = offer.slot_bytes
        self.taken = bytearray(offer.count)  # which slots are in use here, whatever the states say
        self.watch: Sequence[object] = ()

    @property
    def on_host(self) -> bool:
        return self.memory is self.pages.pinned

    def free(self, index: int) -> None:
        """Nothing here uses a slot any more, or will when ``done`` has passed."""
        # In this order: after the second, the sender may lend the slot again.
        self.taken[index] = 0
        self.pages.states[index] = FREE

    def release(self) -> None:
        if self.sender and has_ended(self.sender, self.life):
            self.sender = 0
            self.pages.force_ready()
            lost = sum(self.pages.lost(index) for index, taken in enumerate(self.taken) if taken)
            if lost:
                log.error("a worker ended before %d tensors that it had sent were computed: they hold nothing", lost)

    def over(self) -> bool:
        return not any(self.taken) and self.pages.passed

    def let_go(self) -> None:
        del self.memory
        self.pages.opened = 0


class Patience:
    """Looks for a moment whether a flag is passed, if that has paid off of late.

    A stream that waits is work for the device, and the device has to switch from process to process for it; which makes
    the next message late as well. Where what was sent takes long to compute, nothing is gained by looking.
    """

    MOMENT = 300e-6  # seconds: two switches
    MOST = 8

    def __init__(self) -> None:
        self._credit = self.MOST
        self._skipped = 0

    def await_(self, flag: DeviceEvent) -> bool:
        """Whether it was passed within a moment."""
        if self._credit <= 0:
            self._skipped += 1
            if self._skipped < 64:
                return False
            self._skipped = 0
        until = time.perf_counter() + self.MOMENT
        while time.perf_counter() < until:
            if flag.query():
                self._credit = min(self._credit + 2, self.MOST)
                return True
            time.sleep(0)  # lets other threads go on
        self._credit = max(self._credit - 1, 0)
        return False


class _DeviceLease(weakref.ref[Any]):
    """Tells when a slot is no longer used."""

    __slots__ = ("index", "segment")
    segment: _BorrowedDevice
    index: int


_leases: dict[int, _DeviceLease] = {}  # by id, of this process; they outlive their channels
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leases.clear)  # the parent's to return; CUDA does not work in the child


def _end(lease: _DeviceLease) -> None:
    """Called wherever the last reference happens to go: takes no lock."""
    if _leases.pop(id(lease), None) is not None:
        segment, index = lease.segment, lease.index
        segment.stream_order.drain(segment.pages.done[index], segment.device, functools.partial(segment.free, index))


class DeviceBorrower:
    """Makes tensors of slots. Thread-safe.

    Args:
        ipc: Memory.
        frontier: Order.
        identities: What this process's devices are.
    """

    def __init__(self, ipc: Ipc, stream_order: StreamOrder, identities: Sequence[str]) -> None:
        self._ipc = ipc
        self._frontier = stream_order
        self._identities = list(identities)
        self._segments: dict[int, _BorrowedDevice] = {}
        self._opening = threading.Lock()  # for one offer at a time
        self._closed = False
        self._patience = Patience()

    def check(self, offer: Offer) -> None:
        """Raise ``ProtocolError`` if an offer is none that a sender makes."""
        count, nbytes = offer.count, offer.count * offer.slot_bytes
        if not 0 < count <= MAX_SLOTS or offer.slot_bytes < 1 or offer.slot_bytes % SMALLEST or nbytes > _MAX_SEGMENT:
            raise ProtocolError(f"impossible segment: {count} slots of {offer.slot_bytes} bytes")
        if len(offer.memory) not in (0, HANDLE) or len(offer.cookie) != shared_memory.COOKIE:
            raise ProtocolError("impossible segment")
        if offer.number in self._segments or not 0 < offer.number < 1 << 31:
            raise ProtocolError(f"impossible segment number {offer.number}")

    def open(self, offer: Offer) -> SegmentReply:
        """Open a segment that the sender offers, and return the answer. Takes a while."""
        with self._opening:
            accepted = offer.number not in self._segments and self._open(offer)
        if self._closed:
            self.close()  # not all was there yet
        return SegmentReply(offer.number, accepted)

    def _open(self, offer: Offer) -> bool:
        if len(self._segments) >= _MAX_SEGMENTS or offer.device not in self._identities or offer.process <= 0:
            return False
        device = self._identities.index(offer.device)
        size = offer.count * offer.slot_bytes
        watches: list[object] = []

        def watch(file: int) -> None:
            watches.append(self._ipc.watch(file, offer.process, span_of_ready(offer.count)))

        try:
            total = pages_size(offer.slot_bytes, offer.count, slots=not offer.memory)
            mapping = shared_memory.attach(offer.process, offer.descriptor, total, offer.cookie, watch)
            pages = Pages(self._ipc, mapping, offer.count, device)
        except (RuntimeError, OSError):
            return False
        pages.opened = os.getpid()  # first: the sender frees nothing that may be open
        try:
            memory = self._ipc.open(offer.memory, device, size) if offer.memory else pages.pinned
        except RuntimeError:
            pages.opened = 0
            return False
        segment = _BorrowedDevice(self._frontier, device, offer, pages, memory)
        del memory
        try:
            probe(self._ipc, self._frontier, pages, device, sender=False)
        except RuntimeError:
            segment.let_go()
            return False
        segment.watch = watches
        self._segments[offer.number] = segment
        return True

    def retired(self, number: int) -> None:
        """The sender has let go of a segment."""
        segment = self._segments.pop(number, None)
        if segment is None:
            raise ProtocolError(f"there is no segment {number}")
        bury(segment)

    def close(self) -> None:
        """The channel is lost. Slots in use stay so."""
        self._closed = True
        while self._segments:
            try:
                segment = self._segments.popitem()[1]
            except KeyError:  # another thread was faster, see ``open``
                return
            segment.pages.close()
            bury(segment)

    def borrow(self, slot: Slot, nbytes: int, device: int, form: Form | None = None) -> torch.Tensor:
        """The bytes in a slot, or a tensor that consists of them; it goes back when nothing refers to their storage any
        more.
        """
        segment, index = self._known(slot)
        if segment.device != device or not 0 < nbytes <= segment.slot_bytes:
            raise ProtocolError(f"there are no {nbytes} bytes on cuda:{device} in slot {slot}")
        segment.taken[index], segment.pages.states[index] = 1, TAKEN
        try:
            ready = segment.pages.ready[index]
            if not ready.query() and not (segment.on_host and self._patience.await_(ready)):
                self._frontier.follow(device, (ready,))
            place = segment.start + index * segment.slot_bytes
            tensor, owner = self._ipc.view(
                segment.memory, place, nbytes, device, form or Form(torch.uint8, (nbytes,), (1,))
            )
        except BaseException:
            segment.free(index)
            raise
        lease = _DeviceLease(owner, _end)
        lease.segment, lease.index = segment, index
        _leases[id(lease)] = lease
        return tensor

    def decline(self, slots: Iterable[Slot]) -> None:
        """Slots of a message that nobody is going to read go back, but for those that somebody has."""
        for number, index in slots:
            segment = self._segments.get(number)
            if segment is None or not 0 <= index < len(segment.taken):
                continue
            if not segment.taken[index] and segment.pages.states[index] == LENT:
                segment.free(index)

    def _known(self, slot: Slot) -> tuple[_BorrowedDevice, int]:
        number, index = slot
        segment = self._segments.get(number)
        if segment is None or not 0 <= index < len(segment.taken):
            raise ProtocolError(f"there is no slot {slot}")
        if segment.taken[index] or segment.pages.states[index] != LENT:
            raise ProtocolError(f"slot {slot} was not lent")
        if segment.pages.lost(index):
            raise ProtocolError(f"the worker has ended before what is in slot {slot} was computed")
        return segment, index
