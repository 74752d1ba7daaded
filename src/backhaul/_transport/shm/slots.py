"""Slots of shared memory: which there are, and which are free. Pure: the caller passes in memory and time.

A *segment* is a piece of shared memory cut into *slots* of one size. The state of each slot is a byte that both
processes see. The sender sets it when it lends the slot, and the receiver clears it when nothing there uses the slot
any more. So the return of a slot needs no message: the sender reads the states to find a free slot.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

from backhaul._wire.memory import round_up

FREE, LENT = 0, 1
"""States of a slot."""

MAX_SLOTS = 64
"""The largest number of slots of a segment."""

RESERVE = 16 << 20
"""Bytes of unused segments that are kept for good, the smallest segments first."""

_SEGMENT_BYTES = 4 << 20  # the usual size of a segment, unless one slot is larger
_MAX_SLACK = 2  # a slot is at most this many times larger than its content
_UNUSED_SECONDS = 10.0  # that an unused segment is kept
_MAX_MISSES = 1 << 10  # sizes to remember


class Budget:
    """How much shared memory all channels of a worker may have together. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._lock = threading.Lock()  # guards used

    def take(self, size: int) -> bool:
        """Count ``size`` bytes as used, if that many are left; return whether they were."""
        with self._lock:
            if self.used + size > self.limit:
                return False
            self.used += size
            return True

    def give_back(self, size: int) -> None:
        """Count ``size`` bytes as unused."""
        with self._lock:
            self.used -= size


@dataclass(slots=True, eq=False)
class Segment:
    """A segment as its owner, the sender, knows it.

    Attributes:
        number: Its name on the channel, from 1.
        slot_bytes: Size of each slot.
        states: One byte for each slot, shared with the receiver.
        used: When a slot was last lent.
        memory: The memory behind it, which this module does not look at.
        home: Where its memory lies, which this module does not look at.
        ready: Whether the receiver has opened it.
    """

    number: int
    slot_bytes: int
    states: Any
    used: float
    memory: Any = None
    home: Hashable = None
    ready: bool = False

    @property
    def lent(self) -> int:
        """How many slots the receiver has."""
        states = bytes(self.states)
        return len(states) - states.count(FREE)

    @property
    def nbytes(self) -> int:
        """Size of all slots."""
        return self.slot_bytes * len(self.states)


@dataclass(slots=True)
class Pool:
    """The segments of one direction of a channel that lie in one place. Used by one thread at a time."""

    _segments: dict[int, Segment] = field(default_factory=dict)
    _by_size: dict[int, list[Segment]] = field(default_factory=dict)
    _sizes: list[int] = field(default_factory=list)  # the keys of the above, sorted
    _misses: dict[int, int] = field(default_factory=dict)  # slot size -> how often there was no slot

    def __iter__(self) -> Iterator[Segment]:
        return iter(list(self._segments.values()))

    def __len__(self) -> int:
        return len(self._segments)

    def take(self, size: int, now: float) -> tuple[Segment, int] | None:
        """Lend the smallest free slot that holds ``size`` bytes; None if none is free."""
        for slot_bytes in self._sizes:
            if slot_bytes < size:
                continue
            if slot_bytes > _MAX_SLACK * size:
                break
            for segment in self._by_size[slot_bytes]:
                # The first free slot: its pages are more likely to be in memory already.
                index = bytes(segment.states).find(FREE) if segment.ready else -1
                if index >= 0:
                    segment.states[index] = LENT
                    segment.used = now
                    return segment, index
        return None

    def wish(self, size: int) -> tuple[int, int] | None:
        """There was no slot for ``size`` bytes: the slot size and slot count of a segment to add, or None for now.

        A size that was asked for once gets no segment: the first use of fresh memory costs ten times as much as the
        copy. Nor does a size for which another segment is on its way to the receiver.
        """
        slot_bytes = round_up(size)
        if len(self._misses) > _MAX_MISSES:
            self._misses.clear()
        self._misses[slot_bytes] = self._misses.get(slot_bytes, 0) + 1
        if self._misses[slot_bytes] < 2 or any(not known.ready for known in self._by_size.get(slot_bytes, ())):
            return None
        return slot_bytes, max(1, min(MAX_SLOTS, _SEGMENT_BYTES // slot_bytes))

    def add(self, segment: Segment) -> None:
        """Add a segment. Its slots are lent once it is ready."""
        self._segments[segment.number] = segment
        self._by_size.setdefault(segment.slot_bytes, []).append(segment)
        self._sizes = sorted(self._by_size)

    def drop(self, segment: Segment) -> None:
        """Remove a segment."""
        del self._segments[segment.number]
        self._by_size[segment.slot_bytes].remove(segment)
        if not self._by_size[segment.slot_bytes]:
            del self._by_size[segment.slot_bytes]
            self._sizes = sorted(self._by_size)
            self._misses.pop(segment.slot_bytes, None)

    def may_shrink(self, *, reserve: int = RESERVE) -> bool:
        """Whether there is more than the reserve that is kept for good."""
        return sum(segment.nbytes for segment in self._segments.values()) > reserve

    def drop_unused(self, now: float, *, reserve: int = RESERVE) -> list[Segment]:
        """Remove segments that have been unused for a while, except for a small reserve; return them."""
        unused = [s for s in self._segments.values() if s.ready and s.used + _UNUSED_SECONDS <= now and not s.lent]
        kept, dropped = 0, []
        for segment in sorted(unused, key=lambda segment: segment.nbytes):
            kept += segment.nbytes
            if kept > reserve:
                self.drop(segment)
                dropped.append(segment)
        return dropped
