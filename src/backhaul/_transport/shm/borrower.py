"""The receiving end of memory that two processes share: ``Borrower`` opens segments and makes objects of their slots.

A borrower belongs to one direction of one channel; ``lender`` describes the protocol. The borrower owns the table of
segments and checks all that the sender says: offers, and the slots that messages name. It does not know what memory is:
a ``BorrowedSegment`` makes objects on it (``host_memory`` for the host, ``_devices.borrowing`` for CUDA).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, TypeVar

from backhaul._transport.shm.leases import lease
from backhaul._transport.shm.segments import PAGE
from backhaul._transport.shm.slots import FREE, LENT, MAX_SLOTS
from backhaul.errors import ProtocolError


class BorrowedSegment:
    """A segment as its receiver has it.

    Args:
        slot_bytes: Size of each slot.
        states: One byte for each slot, shared with the sender.

    Attributes:
        taken: Which slots are in use here, whatever the states say.
    """

    __slots__ = ("slot_bytes", "states", "taken")

    def __init__(self, slot_bytes: int, states: memoryview) -> None:
        self.slot_bytes = slot_bytes
        self.states = states
        self.taken = bytearray(len(states))

    def view(self, index: int, nbytes: int, form: Any) -> tuple[Any, Any]:
        """The first bytes of a slot: the object on it, and the object that dies with the last use of its memory."""
        raise NotImplementedError

    def free(self, index: int) -> None:
        """Nothing here uses the slot any more."""
        # In this order: after the second store, the sender may lend the slot again.
        self.taken[index] = 0
        self.states[index] = FREE

    give_back = free
    """Called in destructors when the lease of the slot has ended: takes no lock."""

    def copy_in_child(self, owner: Any) -> None:
        """Called in a forked child: make the memory of ``owner``, a leased object, the child's own."""

    def release(self, *, lost: bool) -> None:
        """Let go of the segment once its leases have ended. The sender has retired it, or the channel is ``lost``."""


Borrowed = TypeVar("Borrowed", bound=BorrowedSegment)


class Borrower(Generic[Borrowed]):
    """Makes objects of slots. One thread reads the channel and calls this; slots go back from any thread.

    Args:
        max_segments: How many segments the sender may have open here at once.
        max_segment_bytes: The size of the largest segment that is accepted.
    """

    def __init__(self, *, max_segments: int, max_segment_bytes: int) -> None:
        self._max_segments = max_segments
        self._max_segment_bytes = max_segment_bytes
        self._segments: dict[int, Borrowed] = {}
        self._closed = False

    @property
    def is_full(self) -> bool:
        """Whether no further segment is accepted."""
        return len(self._segments) >= self._max_segments

    def check_offer(self, number: int, slot_bytes: int, count: int) -> None:
        """Raise ``ProtocolError`` if no sender makes such an offer."""
        if not 0 < count <= MAX_SLOTS or slot_bytes < 1 or slot_bytes % PAGE:
            raise ProtocolError(f"impossible segment: {count} slots of {slot_bytes} bytes")
        if PAGE + count * slot_bytes > self._max_segment_bytes:
            raise ProtocolError(f"impossible segment: {count} slots of {slot_bytes} bytes are too large")
        if number in self._segments or not 0 < number < 1 << 31:
            raise ProtocolError(f"impossible segment number {number}")

    def retired(self, number: int) -> None:
        """The sender has let go of a segment."""
        segment = self._segments.pop(number, None)
        if segment is None:
            raise ProtocolError(f"there is no segment {number} to retire")
        segment.release(lost=False)

    def close(self) -> None:
        """The channel is lost. Slots in use stay valid."""
        self._closed = True
        while self._segments:
            try:
                segment = self._segments.popitem()[1]
            except KeyError:  # another thread has closed the last one
                return
            segment.release(lost=True)

    def find(self, number: int, index: int, nbytes: int) -> Borrowed:
        """The segment of a slot of at least ``nbytes`` bytes that was lent and is not borrowed yet. Raises
        ``ProtocolError``.
        """
        segment = self._segments.get(number)
        if segment is None or not 0 <= index < len(segment.taken) or not 0 < nbytes <= segment.slot_bytes:
            raise ProtocolError(f"there are no {nbytes} bytes in slot {index} of segment {number}")
        if segment.taken[index] or segment.states[index] != LENT:
            raise ProtocolError(f"slot {index} of segment {number} was not lent")
        return segment

    @staticmethod
    def lease(segment: Borrowed, index: int, nbytes: int, form: Any = None) -> Any:
        """Borrow a slot that ``find`` has found: an object on its first bytes. The slot goes back to the sender when
        nothing refers to that memory any more.
        """
        segment.taken[index] = 1
        try:
            value, owner = segment.view(index, nbytes, form)
        except BaseException:
            segment.free(index)
            raise
        lease(segment, index, owner)
        return value

    def decline(self, slots: Iterable[tuple[int, int]]) -> None:
        """Give back the slots of a message that nobody reads, except those that are in use."""
        for number, index in slots:
            segment = self._segments.get(number)
            if segment is None or not 0 <= index < len(segment.taken):
                continue
            if not segment.taken[index] and segment.states[index] == LENT:
                segment.free(index)
