"""The sending end of shared device memory, see ``segments``: owns the memory, and copies tensors into its slots."""

from __future__ import annotations

import collections
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import torch

from backhaul._devices.segments import (
    HEAD,
    SMALL,
    SMALLEST,
    Ipc,
    Item,
    Offer,
    Pages,
    Retire,
    SegmentReply,
    Stretch,
    bury,
    free_deferred,
    has_ended,
    identity_of,
    pages_size,
    probe,
    span_of_done,
)
from backhaul._devices.stream_order import StreamOrder
from backhaul._transport.shm import shared_memory
from backhaul._transport.shm.slots import FREE, RESERVE, Budget, Pool, Segment
from backhaul._wire.device_link import Slot
from backhaul.errors import ProtocolError

_PATIENCE = 0.01  # seconds to wait for another thread in the pool; then the tensor is staged
_PAUSE = 10.0  # seconds after which memory is asked for again where there was none left
HOST = -1
"""Stands for the host among devices that have a budget."""


class _Lent:
    """A segment's memory, as its owner has it."""

    __slots__ = ("abandoned", "budget", "descriptor", "life", "memory", "nbytes", "pages", "pool", "start", "watch")

    def __init__(self, pages: Pages, memory: Stretch, descriptor: int, budget: Budget, pool: Pool) -> None:
        self.pages = pages
        self.memory = memory
        self.start = HEAD if memory is pages.pinned else 0
        self.nbytes = 0  # that are counted in the budget
        self.descriptor = descriptor  # until it is answered
        self.budget = budget
        self.pool = pool
        self.watch: object = None
        self.life = -1  # of the receiver's process, see ``life_of``
        self.abandoned = False  # it has ended

    @property
    def on_host(self) -> bool:
        return self.memory is self.pages.pinned

    def close_descriptor(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def release(self) -> None:
        if not self.abandoned and self.pages.opened and has_ended(self.pages.opened, self.life):
            self.abandoned = True
            self.pages.force_done()

    def over(self) -> bool:
        pages = self.pages
        return (self.abandoned or not (pages.in_use or pages.opened)) and pages.passed

    def let_go(self) -> None:
        del self.memory
        self.budget.give_back(self.nbytes)


class DeviceLender:
    """Puts tensors into slots. Thread-safe, and waits for nobody: what finds no slot is staged.

    Args:
        ipc: Memory.
        frontier: Order.
        identities: What this process's devices are.
        budgets: For each device, what all channels share.
        now: The clock.

    Attributes:
        news: What the receiver is to be told.
        bytes_lent: Ever.
    """

    def __init__(
        self,
        ipc: Ipc,
        stream_order: StreamOrder,
        identities: Sequence[str],
        budgets: Callable[[int], Budget],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.news: collections.deque[Item] = collections.deque()
        self.bytes_lent = 0
        self._ipc = ipc
        self._frontier = stream_order
        self._identities = identities
        self._budgets = budgets
        self._now = now
        self._lock = threading.Lock()  # guards all below; never waited for long, as in ``shm``
        self._numbers = itertools.count(1)
        self._pools: dict[tuple[int, bool], Pool] = {}  # of each device, for large slots and for small ones
        self._segments: dict[int, Segment] = {}
        self._full: dict[tuple[int, bool], float] = {}  # what had no memory left, and until when it is not asked for
        self._refused = False  # the receiver could not open a segment, and is not asked again
        self._closed = False

    @property
    def lent(self) -> int:
        """How many slots the receiver has."""
        return sum(segment.lent for segment in list(self._segments.values()))

    @property
    def nbytes(self) -> int:
        """How much memory there is."""
        return sum(segment.nbytes for segment in list(self._segments.values()))

    def lend(self, flat: torch.Tensor, device: int, source: int | None = None) -> Slot | None:
        """Copy bytes, of the device ``source``, into a slot for ``device``, where the receiver is to have them; None if
        there is none.
        """
        return self.lend_at(flat.data_ptr(), len(flat), device, device if source is None else source)

    def lend_at(self, address: int, nbytes: int, device: int, source: int) -> Slot | None:
        """The same for bytes that begin at an address."""
        slot = self._take(nbytes, device)
        if slot is None:
            return None
        segment, index = slot
        lent: _Lent = segment.memory
        try:
            self._copy(lent, index, lent.start + index * segment.slot_bytes, (address, nbytes), source)
        except BaseException:
            segment.states[index] = FREE
            raise
        self.bytes_lent += nbytes
        return segment.number, index

    def _copy(self, lent: _Lent, index: int, offset: int, stretch: tuple[int, int], source: int) -> None:
        stream_order, ipc, ready, done = self._frontier, self._ipc, lent.pages.ready[index], lent.pages.done[index]
        settled = ready.query() and done.query()
        if settled and lent.on_host and (host := ipc.on_host(*stretch)) and stream_order.idle(source):
            ipc.copy_on_host(lent.memory, offset, host, stretch[1])
            return  # and ``ready`` is passed as it was
        if not settled:
            stream_order.follow(source, (ready, done))
        ipc.copy(lent.memory, offset, stretch, source)
        stream_order.record(ready, source)

    def take_back(self, slots: Iterable[Slot]) -> None:
        """Slots that were not named to the receiver are free again. Takes no lock."""
        for number, index in slots:
            segment = self._segments.get(number)
            if segment is not None:
                segment.states[index] = FREE

    def _take(self, size: int, device: int) -> tuple[Segment, int] | None:
        size = max(size, SMALLEST)
        if not self._lock.acquire(timeout=_PATIENCE):
            return None
        try:
            if self._closed:
                return None
            small = size <= SMALL
            pool = self._pools.get((device, small))
            if pool is None:
                pool = self._pools[device, small] = Pool()
            slot = pool.take(size, self._now())
            if slot is None and not self._refused and self._now() >= self._full.get((device, small), 0.0):
                self._grow(size, device, small)
            return slot
        finally:
            self._lock.release()

    def _grow(self, size: int, device: int, small: bool) -> None:
        wish = self._pools[device, small].wish(size)
        if wish is None:
            return
        slot_bytes, count = wish
        budget = self._budgets(HOST if small else device)
        if not budget.take(slot_bytes * count):
            return
        try:
            self._offer(device, small, slot_bytes, count)
        except (RuntimeError, OSError):  # no memory left, or none that can be shared
            budget.give_back(slot_bytes * count)
            self._full[device, small] = self._now() + _PAUSE

    def _offer(self, device: int, small: bool, slot_bytes: int, count: int) -> None:
        descriptor, mapping, cookie = shared_memory.create(pages_size(slot_bytes, count, slots=small))
        try:
            pages = Pages(self._ipc, mapping, count, device)
            memory = pages.pinned if small else self._ipc.allocate(device, slot_bytes * count)
            name = b"" if small else self._ipc.export(memory)
            probe(self._ipc, self._frontier, pages, device, sender=True)
        except BaseException:
            os.close(descriptor)
            raise
        pool = self._pools[device, small]
        lent = _Lent(pages, memory, descriptor, self._budgets(HOST if small else device), pool)
        lent.nbytes = slot_bytes * count
        number = next(self._numbers)
        segment = Segment(number, slot_bytes, pages.states, self._now(), lent)
        pool.add(segment)
        self._segments[number] = segment
        identity = self._identities[device]
        self.news.append(Offer(number, identity, slot_bytes, count, name, os.getpid(), descriptor, cookie))

    def answered(self, answer: SegmentReply) -> None:
        """The receiver says whether it has opened a segment."""
        with self._lock:
            segment = self._segments.get(answer.number)
            if self._closed:
                return
            if segment is None or segment.ready:
                raise ProtocolError(f"an answer to no offer: segment {answer.number}")
            lent: _Lent = segment.memory
            if not answer.accepted:
                self._refused = True
                self._drop(segment)
                return
            if not lent.pages.opened:
                raise ProtocolError(f"segment {answer.number} was accepted and is not open")
            lent.life = identity_of(lent.pages.opened)
            lent.watch = self._ipc.watch(lent.descriptor, lent.pages.opened, span_of_done(len(segment.states)))
            lent.close_descriptor()
            segment.ready = True

    def trim(self) -> bool:
        """Let unused segments go; whether there may be more of them later."""
        free_deferred(self._frontier)
        if not self._lock.acquire(blocking=False):
            return True
        try:
            self._full.clear()
            again = False
            for (device, small), pool in self._pools.items():
                budget = self._budgets(HOST if small else device)
                reserve = RESERVE if budget.used < budget.limit // 2 else 0  # others may need it
                for segment in pool.drop_unused(self._now(), reserve=reserve):
                    self.news.append(Retire(segment.number))
                    self._forget(segment)
                again |= pool.may_shrink(reserve=reserve)
            return again and not self._closed
        finally:
            self._lock.release()

    def close(self) -> None:
        """The channel is lost: let go of everything. What the receiver uses stays as it is."""
        with self._lock:
            self._closed = True
            for segment in list(self._segments.values()):
                self._drop(segment)

    def _drop(self, segment: Segment) -> None:
        segment.memory.pool.drop(segment)
        self._forget(segment)

    def _forget(self, segment: Segment) -> None:
        lent: _Lent = segment.memory
        lent.close_descriptor()
        del self._segments[segment.number]
        bury(lent)

    @property
    def settled(self) -> bool:
        """Whether all that was copied into slots is there."""
        segments = list(self._segments.values())
        return all(flag.query() for segment in segments for flag in segment.memory.pages.ready)
