"""The sending end of memory that two processes share: ``Lender`` lends slots of host memory and of device memory.

A lender belongs to one direction of one channel. It owns the protocol: pools of slots, offers of new segments, the
receiver's replies, and the retirement of segments that nobody uses. It does not know what memory is: a ``LenderMemory``
creates it (``host_memory`` for the host, ``_devices.lending`` for CUDA), and the subclass beside that copies into
slots. What the receiver is to be told is collected in ``news`` for the owner of the channel to send.

    sender                                      receiver
    offer: number, slots, how to open it    ->  opens and maps the segment
                                            <-  reply: whether it could
    messages that name slots                ->  tensors are views of the slots
    (finds the slot's state to be free)         clears the slot's state when the last of them is gone
    retire: number                          ->  lets go of the segment

[Note: order] States are single bytes, written with plain stores. The sender writes a slot, then names it in a system
call; the receiver's reads follow another system call: both are barriers. The receiver clears the state when the last
owner of the slot's memory is gone. That owner was counted down atomically, with acquire and release order, by the
thread that dropped it. So all use of the memory comes before the store, on weakly ordered machines too; and the
sender's writes depend on the state that it read, so none is made before.

[Note: reentry] The garbage collector may run anywhere, and the destructors that it calls may send. A thread that would
wait for itself gives up after ``_LOCK_SECONDS``, and replies are noted without the lock.
"""

from __future__ import annotations

import collections
import itertools
import threading
import time
from collections.abc import Callable, Hashable
from typing import Any, Generic, Protocol, TypeVar

from backhaul._transport.shm.slots import FREE, RESERVE, Budget, Pool, Segment
from backhaul.errors import ProtocolError

_LOCK_SECONDS = 0.01  # to wait for another thread; then the caller gets no slot
_CLOSE_SECONDS = 1.0  # to wait for another thread before everything is dropped anyway

Note = TypeVar("Note")
Note_co = TypeVar("Note_co", covariant=True)


class LentMemory(Protocol[Note_co]):
    """The memory of one segment, as the sender has it."""

    @property
    def states(self) -> Any:
        """One byte for each slot, shared with the receiver."""

    def offer(self, number: int) -> Note_co:
        """What tells the receiver how to open this memory, as segment ``number``."""

    def check_opened(self, number: int) -> None:
        """Raise ``ProtocolError`` if the receiver says that it has opened the memory and cannot have done so."""

    def opened(self) -> None:
        """The receiver has opened the memory; it is lent from now on."""

    def release(self) -> None:
        """Give the memory back to its budget: now, or as soon as the receiver is done with it."""


class LenderMemory(Protocol[Note_co]):
    """Where a lender gets memory from.

    Attributes:
        smallest: Bytes of the smallest slot that is worth making.
        retry_seconds: How long memory is not asked for again after there was none.
    """

    smallest: int
    retry_seconds: float

    def budget(self, home: Any) -> Budget:
        """What the channels of a worker may use together of the memory of ``home``."""

    def create(self, home: Any, slot_bytes: int, count: int) -> LentMemory[Note_co] | None:
        """Memory for ``count`` slots at ``home``; None if the budget is spent. Raises ``RuntimeError`` or ``OSError``
        if the system has none.
        """

    def retire(self, number: int) -> Note_co:
        """What tells the receiver that a segment is gone."""


class Lender(Generic[Note]):
    """Lends slots. Thread-safe, and waits for nobody: where there is no slot now, the caller sends another way.

    A *home* says where slots lie, for instance on which device; each home has a pool of its own.

    Attributes:
        bytes_lent: How many bytes have ever been lent.
        news: What the receiver is to be told, in this order.
    """

    def __init__(self, memory: LenderMemory[Note], now: Callable[[], float] = time.monotonic) -> None:
        self.bytes_lent = 0
        self.news: collections.deque[Note] = collections.deque()
        self._memory = memory
        self._now = now
        self._lock = threading.Lock()  # guards all below but _replies; never waited for long, see [Note: reentry]
        self._pools: dict[Hashable, Pool] = {}
        self._segments: dict[int, Segment] = {}
        self._numbers = itertools.count(1)
        self._replies: collections.deque[tuple[int, bool]] = collections.deque()
        self._paused: dict[Hashable, float] = {}  # homes that had no memory left, and until when none is asked for
        self._refused = False  # the receiver could not open a segment, and is not asked again
        self._closed = False

    @property
    def lent(self) -> int:
        """How many slots the receiver has."""
        return sum(segment.lent for segment in list(self._segments.values()))

    @property
    def nbytes(self) -> int:
        """Size of all slots."""
        return sum(segment.nbytes for segment in list(self._segments.values()))

    def take(self, home: Hashable, nbytes: int) -> tuple[Segment, int] | None:
        """Take a slot for ``nbytes`` bytes at ``home``; None if there is none now."""
        if not self._lock.acquire(timeout=_LOCK_SECONDS):
            return None
        try:
            if self._replies:
                self._note_replies()
            if self._closed:
                return None
            pool, smallest = self._pools.get(home), self._memory.smallest
            if pool is None:
                pool = self._pools[home] = Pool()
            size = nbytes if nbytes > smallest else smallest
            slot = pool.take(size, self._now())
            if slot is None:
                self._grow(home, pool, size)
            else:
                self.bytes_lent += nbytes
            return slot
        finally:
            self._lock.release()

    def free(self, number: int, index: int) -> None:
        """A slot that was taken and never named to the receiver is free again. Takes no lock."""
        segment = self._segments.get(number)
        if segment is not None:
            segment.states[index] = FREE

    def _grow(self, home: Hashable, pool: Pool, size: int) -> None:
        if self._refused or self._now() < self._paused.get(home, 0.0):
            return
        wish = pool.wish(size)
        if wish is None:
            return
        slot_bytes, count = wish
        try:
            memory = self._memory.create(home, slot_bytes, count)
        except (RuntimeError, OSError):  # no memory, descriptors or address space left, or none that can be shared
            self._paused[home] = self._now() + self._memory.retry_seconds
            return
        if memory is None:
            return
        if self._closed:  # meanwhile: to allocate device memory may take longer than ``close`` waits
            memory.release()
            return
        number = next(self._numbers)
        segment = Segment(number, slot_bytes, memory.states, self._now(), memory, home)
        pool.add(segment)
        self._segments[number] = segment
        self.news.append(memory.offer(number))

    def replied(self, number: int, accepted: bool) -> None:
        """The receiver says whether it has opened a segment. Raises ``ProtocolError`` if none was offered."""
        if self._closed:
            return
        segment = self._segments.get(number)
        if segment is None or segment.ready:
            raise ProtocolError(f"a reply to an offer that was not made: segment {number}")
        if accepted:
            segment.memory.check_opened(number)
        self._replies.append((number, accepted))
        if self._lock.acquire(blocking=False):  # else the next thread that takes a slot notes the reply
            try:
                self._note_replies()
            finally:
                self._lock.release()

    def _note_replies(self) -> None:
        while self._replies:
            number, accepted = self._replies.popleft()
            segment = self._segments.get(number)
            if segment is None or segment.ready:
                continue
            if accepted:
                segment.memory.opened()
                segment.ready = True
            else:
                self._refused = True
                self._drop(segment)

    def trim(self) -> bool:
        """Retire unused segments; return whether there may be more of them later."""
        if not self._lock.acquire(blocking=False):
            return True
        try:
            self._note_replies()
            self._paused.clear()
            again = False
            for home, pool in self._pools.items():
                budget = self._memory.budget(home)
                reserve = RESERVE if budget.used < budget.limit // 2 else 0  # other channels may need it
                for segment in pool.drop_unused(self._now(), reserve=reserve):
                    self.news.append(self._memory.retire(segment.number))
                    self._release(segment)
                again |= pool.may_shrink(reserve=reserve)
            return again and not self._closed
        finally:
            self._lock.release()

    def close(self) -> None:
        """The channel is lost: let go of everything. What the receiver uses stays valid."""
        held = self._lock.acquire(timeout=_CLOSE_SECONDS)
        self._closed = True
        for segment in list(self._segments.values()):
            self._drop(segment)
        if held:
            self._lock.release()

    def _drop(self, segment: Segment) -> None:
        self._pools[segment.home].drop(segment)
        self._release(segment)

    def _release(self, segment: Segment) -> None:
        del self._segments[segment.number]
        segment.memory.release()
