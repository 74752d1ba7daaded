"""The pages of a segment of device memory: host memory that both processes map and that devices reach.

They hold the state of each slot and two *flags* for it. ``ready`` is recorded by the sender when a tensor has been
copied into the slot; ``done`` is recorded by the receiver behind all work that may use the slot. ``_devices`` describes
the protocol. Small slots lie in the pages too, behind the first ``HEAD_BYTES``.
"""

from __future__ import annotations

from backhaul._devices.backend import Flag, Ipc
from backhaul._devices.flag_reaper import Span
from backhaul._devices.slot_order import SlotOrder
from backhaul._transport.shm.segments import PAGE, Mapping, states_of
from backhaul._transport.shm.slots import MAX_SLOTS

HEAD_BYTES = 2 * PAGE
"""Size of the pages without slots: states, then flags."""

_FLAG_BYTES = 8
_PROBES = PAGE + 2 * MAX_SLOTS * _FLAG_BYTES  # offset of two flags, one of each end
_OPENED = _PROBES + 2 * _FLAG_BYTES  # where the receiver writes which process has opened the memory
_CLOSED = _OPENED + 4  # where the receiver writes that it borrows nothing more
_LOST = _CLOSED + 4  # one byte for each flag: whether it was set for a process that had ended

TAKEN = 2
"""The state of a slot that the receiver has borrowed, after ``slots.LENT``."""

assert HEAD_BYTES >= _LOST + 2 * MAX_SLOTS


class Pages:
    """What both ends of a segment see of it. The sender records ``ready``, the receiver records ``done``."""

    __slots__ = ("_closed", "_lost", "_opened", "done", "pinned", "probe", "ready", "states")

    def __init__(self, ipc: Ipc, mapping: Mapping, count: int, device: int) -> None:
        self.pinned = ipc.pin(mapping, device)
        self.states = states_of(mapping, count)
        self._opened = memoryview(mapping.block(_OPENED, 4)).cast("B").cast("I")
        self._closed = memoryview(mapping.block(_CLOSED, 1)).cast("B")
        self._lost = memoryview(mapping.block(_LOST, count)).cast("B")
        flags = [ipc.flag(self.pinned, PAGE + index * _FLAG_BYTES) for index in range(2 * count)]
        self.ready, self.done = flags[:count], flags[count:]
        self.probe: Flag | None = None  # of this end

    @property
    def opened(self) -> int:
        """The process that has the memory open; 0: none."""
        return int(self._opened[0])

    @opened.setter
    def opened(self, process: int) -> None:
        self._opened[0] = process

    def lost(self, index: int) -> bool:
        """Whether the sender has ended before a slot was ready."""
        return bool(self._lost[index])

    def force_ready(self) -> None:
        """Set the flags of the sender, which has ended."""
        for index, flag in enumerate(self.ready):
            if not flag.query():
                self._lost[index] = 1
                flag.force()

    def force_done(self) -> None:
        """Set the flags of the receiver, which has ended."""
        for flag in self.done:
            flag.force()

    def close(self) -> None:
        """The receiver borrows nothing more."""
        self._closed[0] = 1

    @property
    def in_use(self) -> bool:
        """Whether the receiver has slots, or may still borrow slots that were named to it."""
        return TAKEN in self.states if self._closed[0] else any(self.states)

    @property
    def passed(self) -> bool:
        """Whether no device work of either process lies ahead."""
        probed = self.probe is None or self.probe.query()
        return probed and all(flag.query() for flag in (*self.ready, *self.done))


def span_of_ready(count: int) -> Span:
    """The flags that the sender records."""
    return Span(PAGE, count, _LOST)


def span_of_done(count: int) -> Span:
    """The flags that the receiver records."""
    return Span(PAGE + count * _FLAG_BYTES, count, _LOST + count)


def probe(ipc: Ipc, slot_order: SlotOrder, pages: Pages, device: int, *, sender: bool) -> None:
    """Find out whether a device can record flags; some cannot. Raises ``RuntimeError`` if not. After success the pages
    must be kept until they are ``passed``, because the device is going to write there.
    """
    slot_order.prepare(device)
    flag = ipc.flag(pages.pinned, _PROBES + (0 if sender else _FLAG_BYTES))
    slot_order.try_out(flag, device)
    pages.probe = flag


def pages_size(slot_bytes: int, count: int, *, slots: bool) -> int:
    """Bytes of a segment's pages; with ``slots``, the slots are in them as well."""
    return HEAD_BYTES + (slot_bytes * count if slots else 0)
