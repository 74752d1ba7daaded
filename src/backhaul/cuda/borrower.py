"""The receiving end of shared device memory, see ``segments``: opens it, and makes tensors of its slots."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from backhaul.cuda.segments import SMALLEST, Answer, Ipc, Offer, bury, visit_graves
from backhaul.cuda.streams import Event, Frontier
from backhaul.errors import ProtocolError
from backhaul.transport import shm
from backhaul.transport.slots import FREE, LENT, MAX_SLOTS
from backhaul.wire.devices import Slot

_MAX_SEGMENTS = 1 << 12  # that a receiver has opened at once


class _Borrowed:
    """A segment as its receiver knows it."""

    __slots__ = ("device", "done", "frontier", "gone", "memory", "page", "ready", "slot_bytes", "states", "taken")

    def __init__(self, frontier: Frontier, device: int, offer: Offer, page: shm.Mapping, memory: Any) -> None:
        self.frontier = frontier
        self.device = device
        self.memory = memory
        self.page = page
        self.slot_bytes = offer.slot_bytes
        self.ready: list[Event | bytes] = list(offer.ready)  # opened at the first use
        self.done: list[Event] = []
        self.states = shm.states_of(page, len(offer.ready))
        self.taken = bytearray(len(offer.ready))  # which slots are in use here, whatever the states say
        self.gone = False

    def free(self, index: int) -> None:
        """Nothing here uses a slot any more, or will when ``done`` has passed."""
        if self.gone:
            bury((self.done[index],), self.memory)
        # In this order: after the second, the sender may lend the slot again.
        self.taken[index] = 0
        self.states[index] = FREE


class _Lease(weakref.ref[Any]):
    """Tells when a slot is no longer used."""

    __slots__ = ("index", "segment")
    segment: _Borrowed
    index: int


_leases: dict[int, _Lease] = {}  # by id, of this process; they outlive their channels
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leases.clear)  # the parent's to return; CUDA does not work in the child


def _end(lease: _Lease) -> None:
    """Called wherever the last reference happens to go: takes no lock."""
    if _leases.pop(id(lease), None) is not None:
        segment, index = lease.segment, lease.index
        segment.frontier.drain(segment.done[index], segment.device, functools.partial(segment.free, index))


class Borrower:
    """Makes tensors of slots. ``offered`` and ``retired`` are called by one thread at a time, all else by any.

    Args:
        ipc: Memory.
        frontier: Order.
        identities: What this process's devices are.
    """

    def __init__(self, ipc: Ipc, frontier: Frontier, identities: Sequence[str]) -> None:
        self._ipc = ipc
        self._frontier = frontier
        self._identities = list(identities)
        self._segments: dict[int, _Borrowed] = {}

    def offered(self, offer: Offer) -> Answer:
        """The sender offers a segment: open it, and return the answer."""
        count, nbytes = len(offer.ready), len(offer.ready) * offer.slot_bytes
        if not 0 < count <= MAX_SLOTS or offer.slot_bytes < 1 or offer.slot_bytes % SMALLEST:
            raise ProtocolError(f"impossible segment: {count} slots of {offer.slot_bytes} bytes")
        if offer.handle.nbytes < nbytes or len(offer.cookie) != shm.COOKIE:
            raise ProtocolError(f"impossible segment: {nbytes} bytes of {offer.handle.nbytes}")
        if offer.number in self._segments or not 0 < offer.number < 1 << 31:
            raise ProtocolError(f"impossible segment number {offer.number}")
        if len(self._segments) >= _MAX_SEGMENTS or offer.device not in self._identities or offer.process <= 0:
            return Answer(offer.number)
        device = self._identities.index(offer.device)
        try:
            page = shm.attach(offer.process, offer.descriptor, shm.PAGE, offer.cookie)
            events = [self._ipc.event(device) for _ in range(count)]
            segment = _Borrowed(self._frontier, device, offer, page, self._ipc.open(offer.handle, device))
        except (RuntimeError, OSError):
            return Answer(offer.number)
        segment.done = [event for event, _ in events]
        self._segments[offer.number] = segment
        return Answer(offer.number, tuple(name for _, name in events))

    def retired(self, number: int) -> None:
        """The sender has let go of a segment."""
        segment = self._segments.pop(number, None)
        if segment is None:
            raise ProtocolError(f"there is no segment {number}")
        self._forget(segment)

    def close(self) -> None:
        """The channel is lost. Slots in use stay so."""
        while self._segments:
            self._forget(self._segments.popitem()[1])

    def _forget(self, segment: _Borrowed) -> None:
        segment.gone = True
        bury(segment.done, segment.memory)

    def borrow(self, slot: Slot, nbytes: int, device: int) -> torch.Tensor:
        """The bytes in a slot; it goes back when nothing refers to their storage any more."""
        segment, index = self._known(slot)
        if segment.device != device or not 0 < nbytes <= segment.slot_bytes:
            raise ProtocolError(f"there are no {nbytes} bytes on cuda:{device} in slot {slot}")
        visit_graves()
        segment.taken[index] = 1
        try:
            ready = segment.ready[index]
            if isinstance(ready, bytes):
                ready = segment.ready[index] = self._ipc.open_event(ready, device)
            self._frontier.follow(device, (ready,))
            tensor, owner = self._ipc.view(segment.memory, index * segment.slot_bytes, nbytes)
        except BaseException:
            segment.free(index)
            raise
        lease = _Lease(owner, _end)
        lease.segment, lease.index = segment, index
        _leases[id(lease)] = lease
        return tensor

    def decline(self, slots: Iterable[Slot]) -> None:
        """Slots of a message that nobody is going to read go back."""
        for slot in slots:
            segment, index = self._known(slot)
            segment.free(index)

    def _known(self, slot: Slot) -> tuple[_Borrowed, int]:
        number, index = slot
        segment = self._segments.get(number)
        if segment is None or not 0 <= index < len(segment.taken):
            raise ProtocolError(f"there is no slot {slot}")
        if segment.taken[index] or segment.states[index] != LENT:
            raise ProtocolError(f"slot {slot} was not lent")
        return segment, index
