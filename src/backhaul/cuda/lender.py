"""The sending end of shared device memory, see ``segments``: owns the memory, and copies tensors into its slots."""

from __future__ import annotations

import collections
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import torch

from backhaul.cuda.segments import SMALLEST, Answer, Ipc, Item, Offer, Retire, bury, visit_graves
from backhaul.cuda.streams import Event, Frontier
from backhaul.errors import ProtocolError
from backhaul.transport import shm
from backhaul.transport.slots import FREE, RESERVE, Budget, Pool, Segment
from backhaul.wire.devices import Slot

_MOST = 16  # slots of a segment: each has two events, which cost more than memory does
_PATIENCE = 0.01  # seconds to wait for another thread in the pool; then the tensor is staged


class _Lent:
    """A segment's memory and events, as its owner has them."""

    __slots__ = ("descriptor", "device", "done", "memory", "page", "ready")

    def __init__(self, device: int, memory: torch.Tensor, page: shm.Mapping, descriptor: int) -> None:
        self.device = device
        self.memory = memory
        self.page = page
        self.descriptor = descriptor  # until it is answered
        self.ready: list[Event] = []
        self.done: list[Event | bytes] = []  # opened at the first use

    def close_descriptor(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class Lender:
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
        frontier: Frontier,
        identities: Sequence[str],
        budgets: Callable[[int], Budget],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.news: collections.deque[Item] = collections.deque()
        self.bytes_lent = 0
        self._ipc = ipc
        self._frontier = frontier
        self._identities = identities
        self._budgets = budgets
        self._now = now
        self._lock = threading.Lock()  # guards all below; never waited for long, as in ``shm``
        self._numbers = itertools.count(1)
        self._pools: dict[int, Pool] = {}
        self._segments: dict[int, Segment] = {}
        self._full: set[int] = set()  # devices that had no memory left, until the next trim
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

    def lend(self, flat: torch.Tensor, device: int) -> Slot | None:
        """Copy bytes into a slot on ``device``, where the receiver is to have them; None if there is none."""
        slot = self._take(len(flat), device)
        if slot is None:
            return None
        segment, index = slot
        lent: _Lent = segment.memory
        try:
            done = lent.done[index]
            if isinstance(done, bytes):
                done = lent.done[index] = self._ipc.open_event(done, device)
            self._frontier.follow(device, (lent.ready[index], done))
            self._ipc.copy(lent.memory, index * segment.slot_bytes, flat)
            self._frontier.record(lent.ready[index], device)
        except BaseException:
            segment.states[index] = FREE
            raise
        self.bytes_lent += len(flat)
        return segment.number, index

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
            pool = self._pools.setdefault(device, Pool())
            slot = pool.take(size, self._now())
            if slot is None and not self._refused and device not in self._full:
                self._grow(pool, size, device)
            return slot
        finally:
            self._lock.release()

    def _grow(self, pool: Pool, size: int, device: int) -> None:
        wish = pool.wish(size)
        if wish is None:
            return
        slot_bytes, count = wish[0], min(wish[1], _MOST)
        budget = self._budgets(device)
        if not budget.take(slot_bytes * count):
            return
        try:
            self._offer(pool, device, slot_bytes, count)
        except (RuntimeError, OSError):  # no memory left, or none that can be shared
            budget.give_back(slot_bytes * count)
            self._full.add(device)

    def _offer(self, pool: Pool, device: int, slot_bytes: int, count: int) -> None:
        memory = self._ipc.allocate(device, slot_bytes * count)
        events = [self._ipc.event(device) for _ in range(count)]
        handle = self._ipc.export(memory)
        descriptor, page, cookie = shm.create(shm.PAGE)
        lent = _Lent(device, memory, page, descriptor)
        lent.ready = [event for event, _ in events]
        number = next(self._numbers)
        segment = Segment(number, slot_bytes, shm.states_of(page, count), self._now(), lent)
        pool.add(segment)
        self._segments[number] = segment
        ready = tuple(name for _, name in events)
        self.news.append(
            Offer(number, self._identities[device], slot_bytes, handle, ready, os.getpid(), descriptor, cookie)
        )

    def answered(self, answer: Answer) -> None:
        """The receiver says whether it has opened a segment."""
        with self._lock:
            segment = self._segments.get(answer.number)
            if self._closed:
                return
            if segment is None or segment.ready or len(answer.done) not in (0, len(segment.states)):
                raise ProtocolError(f"an answer to no offer: segment {answer.number}")
            segment.memory.close_descriptor()
            if answer.done:
                segment.memory.done = list(answer.done)
                segment.ready = True
            else:
                self._refused = True
                self._drop(segment)

    def trim(self) -> bool:
        """Let unused segments go; whether there may be more of them later."""
        visit_graves()
        if not self._lock.acquire(blocking=False):
            return True
        try:
            self._full.clear()
            for device, pool in self._pools.items():
                budget = self._budgets(device)
                reserve = RESERVE if budget.used < budget.limit // 2 else 0  # others may need it
                for segment in pool.drop_unused(self._now(), reserve=reserve):
                    self.news.append(Retire(segment.number))
                    self._forget(segment)
            return not self._closed and any(pool.may_shrink for pool in self._pools.values())
        finally:
            self._lock.release()

    def close(self) -> None:
        """The channel is lost: let go of everything. What the receiver uses stays as it is."""
        with self._lock:
            self._closed = True
            for segment in list(self._segments.values()):
                self._drop(segment)

    def _drop(self, segment: Segment) -> None:
        self._pools[segment.memory.device].drop(segment)
        self._forget(segment)

    def _forget(self, segment: Segment) -> None:
        lent: _Lent = segment.memory
        lent.close_descriptor()
        del self._segments[segment.number]
        self._budgets(lent.device).give_back(segment.nbytes)
        events = [*lent.ready, *(done for done in lent.done if not isinstance(done, bytes))]
        bury(events, lent.memory)
