"""Host memory for ``lender`` and ``borrower``: large buffers of a channel travel through segments of shared memory.

``HostLender`` and ``HostBorrower`` speak the channel's language: buffers, *places* (a segment's number and a slot's
index in 64 bits; 0 means that the buffer is inline), and control frames. A segment belongs to one direction of one
channel. When the channel is lost the sender unmaps its segments; slots that the receiver still uses stay valid.

    OFFER number, slots, descriptor, cookie ->  opens the sender's descriptor through /proc, checks it, maps it
                                            <-  ANSWER number, whether it could
    RETIRE number                           ->  unmaps it
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Sequence
from typing import Any

from backhaul._transport.shm.borrower import BorrowedSegment, Borrower
from backhaul._transport.shm.copies import copy_into
from backhaul._transport.shm.lender import Lender
from backhaul._transport.shm.segments import PAGE, Mapping, attach, create, make_private, states_of
from backhaul._transport.shm.slots import Budget
from backhaul._wire.frames import control_frame
from backhaul._wire.memory import Buffer
from backhaul.errors import ProtocolError

THRESHOLD = 64 << 10  # bytes; buffers from here on go through slots; measured, see docs/performance.md
OFFER, ANSWER, RETIRE = 1, 2, 3  # kinds of control frames
_OFFER_BODY = struct.Struct("<iIQ16s")  # descriptor, slots, slot size, cookie
_INDEX_MASK = 0xFFFFFFFF  # of a place
_MAX_SEGMENTS = 1 << 14
_MAX_SEGMENT_BYTES = 1 << 40


class LentHostMemory:
    """The memory of one segment, as its sender has it."""

    __slots__ = ("_budget", "_cookie", "_descriptor", "_slot_bytes", "mapping", "states")

    def __init__(self, budget: Budget, slot_bytes: int, count: int) -> None:
        self._descriptor, self.mapping, self._cookie = create(PAGE + slot_bytes * count)
        self._budget = budget
        self._slot_bytes = slot_bytes
        self.states = states_of(self.mapping, count)

    def offer(self, number: int) -> bytes:
        body = _OFFER_BODY.pack(self._descriptor, len(self.states), self._slot_bytes, self._cookie)
        return control_frame(OFFER, number, body)

    def check_opened(self, number: int) -> None:
        """Whether the receiver has mapped it cannot be seen from here."""

    def opened(self) -> None:
        self._close_descriptor()

    def release(self) -> None:
        self._close_descriptor()
        self._budget.give_back(self.mapping.size)

    def _close_descriptor(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class HostMemory:
    """Makes segments, within the budget that all channels of the worker share."""

    smallest = 1
    retry_seconds = 0.0

    def __init__(self, budget: Budget) -> None:
        self._budget = budget

    def budget(self, home: None) -> Budget:
        return self._budget

    def create(self, home: None, slot_bytes: int, count: int) -> LentHostMemory | None:
        total = PAGE + slot_bytes * count
        if not self._budget.take(total):
            return None
        try:
            return LentHostMemory(self._budget, slot_bytes, count)
        except BaseException:
            self._budget.give_back(total)
            raise

    def retire(self, number: int) -> bytes:
        return control_frame(RETIRE, number)


class HostLender(Lender[bytes]):
    """Puts the buffers of a channel into slots. Thread-safe, and waits for nobody: a buffer without a slot goes inline.

    Args:
        budget: What all channels of the worker share.
    """

    def __init__(self, budget: Budget) -> None:
        super().__init__(HostMemory(budget))

    def lend(self, buffers: Sequence[Buffer]) -> list[int] | None:
        """Copy large buffers into slots; return the places of all buffers, or None if all go inline."""
        places: list[int] | None = None
        try:
            for position, buffer in enumerate(buffers):
                size = len(buffer)
                if size < THRESHOLD:
                    continue
                slot = self.take(None, size)
                if slot is None:
                    continue
                places = places or [0] * len(buffers)
                segment, index = slot
                places[position] = segment.number << 32 | index
                copy_into(segment.memory.mapping.block(PAGE + index * segment.slot_bytes, size), buffer)
        except BaseException:
            self.take_back(places)
            raise
        return places

    def take_back(self, places: Sequence[int] | None) -> None:
        """Places that were not sent are free again."""
        for place in places or ():
            if place:
                self.free(place >> 32, place & _INDEX_MASK)

    def answered(self, number: int, body: bytes) -> None:
        """The receiver says whether it has mapped a segment."""
        if body not in (b"\0", b"\1"):
            raise ProtocolError(f"an impossible answer to the offer of segment {number}: {len(body)} bytes")
        self.replied(number, body == b"\1")


class BorrowedHostSegment(BorrowedSegment):
    """A segment of host memory, as its receiver has it."""

    __slots__ = ("_mapping",)

    def __init__(self, mapping: Mapping, slot_bytes: int, count: int) -> None:
        super().__init__(slot_bytes, states_of(mapping, count))
        self._mapping = mapping

    def view(self, index: int, nbytes: int, form: None) -> tuple[Buffer, Buffer]:
        block: Buffer = self._mapping.block(PAGE + index * self.slot_bytes, nbytes)
        return block, block

    def copy_in_child(self, owner: Any) -> None:
        make_private(ctypes.addressof(owner), len(owner))


class HostBorrower(Borrower[BorrowedHostSegment]):
    """Makes buffers of slots. One thread reads the channel and calls this; slots go back from any thread.

    Args:
        process: The sender's process; 0 to accept no segment.
    """

    def __init__(self, process: int) -> None:
        super().__init__(max_segments=_MAX_SEGMENTS, max_segment_bytes=_MAX_SEGMENT_BYTES)
        self._process = process

    def offered(self, number: int, body: bytes) -> bytes:
        """The sender offers a segment: map it, and return the answer."""
        if len(body) != _OFFER_BODY.size:
            raise ProtocolError(f"the offer of segment {number} has {len(body)} bytes, not {_OFFER_BODY.size}")
        fd, count, slot_bytes, cookie = _OFFER_BODY.unpack(body)
        self.check_offer(number, slot_bytes, count)
        accepted = False
        if not self.is_full and self._process > 0 and fd >= 0:
            with contextlib.suppress(OSError):
                mapping = attach(self._process, fd, PAGE + count * slot_bytes, cookie)
                self._segments[number] = BorrowedHostSegment(mapping, slot_bytes, count)
                accepted = True
        return control_frame(ANSWER, number, b"\1" if accepted else b"\0")

    def borrow(self, place: int, size: int) -> Buffer:
        """The buffer of ``size`` bytes at ``place``; the slot goes back when nothing refers to the buffer any more."""
        index = place & _INDEX_MASK
        found: Buffer = self.lease(self.find(place >> 32, index, size), index, size)
        return found
