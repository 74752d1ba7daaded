"""Memory that two processes share for tensors of a device: the sender's *segments*, which the receiver opens once, cut
into *slots*.

A ``Lender`` is the sending end of one direction of a channel, a ``Borrower`` the receiving end, as in
``transport.shm``. Here is what they have in common: the ``SegmentUpdate`` they tell each other, which others
carry; the *pages*
that both have mapped, with the state of each slot and two *flags* for it; and ``Ipc``, all that is needed of CUDA.

    sender                                        receiver
    Offer: memory, pages                       -> opens both
                                               <- Answer: whether it could
    copies a tensor into a slot, records the
    slot's *ready*; a message names the slot   -> its stream waits for *ready*; tensors are views of the slot
    (finds the slot free) its stream waits        records *done* behind all that may use them, and clears the slot's
    for *done* before it writes there             state, when the last of them is gone
    Retire                                     -> closes it, and says so in the pages: only then is it freed

The host waits for nothing. A slot is free when its state says so, although the receiver's device may still read it: who
writes there next waits for *done*, on the device.

[Note: host slots] Where two processes share a device, it has to switch from one to the other for whatever both do: that
takes much longer than to copy a few numbers (docs/performance.md). So small slots lie in the pages themselves, in host
memory that devices read and write as if it were their own. What came in one, and is sent on while nothing is under way,
the host copies.

[Note: graves] Memory is let go when nothing on it lies ahead any more: when all flags are passed and no slot is lent.
What a process that has ended was to do is never going to be done; its flags are set for it: by the other process, or,
should that be unable to (see ``undertaker``), for it.
"""

from __future__ import annotations

import collections
import threading
from typing import Any, Protocol

import msgspec
import torch

from backhaul._devices.flag_reaper import Span
from backhaul._devices.stream_order import DeviceEvent, StreamOrder
from backhaul._transport.shm import shared_memory
from backhaul._transport.shm.slots import MAX_SLOTS
from backhaul._wire.device_link import Form
from backhaul._wire.messages import prepare

SMALLEST = 4096
"""Slots have a multiple of so many bytes."""

SMALL = 16 << 10
"""Up to here slots are in host memory. A device reads so much from there in the time that it needs to begin."""

HEAD = 2 * shared_memory.PAGE
"""The size of a segment's pages, without slots: states, then flags."""

HANDLE = 64
"""Bytes by which device memory is opened."""

_FLAG = 8
_PROBES = shared_memory.PAGE + 2 * MAX_SLOTS * _FLAG  # two flags, one of each end
_OPENED = _PROBES + 2 * _FLAG  # where the receiver says which process has opened the memory
_CLOSED = _OPENED + 4  # and that it borrows nothing more
_LOST = _CLOSED + 4  # a byte for each flag: whether it was set for a process that had ended
TAKEN = 2
"""The state of a slot that the receiver has borrowed, after ``slots.LENT``."""


class Offer(msgspec.Struct, array_like=True, frozen=True, tag="offer"):
    """A segment that the receiver may open."""

    number: int
    device: str  # its identity
    slot_bytes: int
    count: int
    memory: bytes  # how to open it; empty: it follows the pages
    process: int
    descriptor: int  # of the pages
    cookie: bytes


class SegmentReply(msgspec.Struct, array_like=True, frozen=True, tag="answer"):
    """Whether an offer was accepted."""

    number: int
    accepted: bool = False


class Retire(msgspec.Struct, array_like=True, frozen=True, tag="retire"):
    """The sender has let go of a segment, of which nothing is lent."""

    number: int


Item = Offer | SegmentReply | Retire


class SegmentUpdate(msgspec.Struct, array_like=True, frozen=True):
    """What the two ends of a link have to tell each other."""

    items: tuple[Item, ...]


prepare(SegmentUpdate)


class Flag(DeviceEvent, Protocol):
    """An event that two processes see. One of them records it, again and again but never before it was passed."""

    def force(self) -> None:
        """Who records it has ended: it counts as passed."""


class Stretch(Protocol):
    """Memory, which is let go when nothing refers to this any more."""

    @property
    def address(self) -> int:
        """Where it is for devices."""


class Ipc(Protocol):
    """Memory and flags that other processes can open. All of it raises ``RuntimeError`` where it cannot."""

    def allocate(self, device: int, nbytes: int) -> Stretch:
        """Memory of a device."""

    def export(self, memory: Any) -> bytes:
        """How others open memory that ``allocate`` has made."""

    def open(self, handle: bytes, device: int, nbytes: int) -> Stretch:
        """Memory of another process."""

    def pin(self, mapping: shared_memory.Mapping, device: int) -> Stretch:
        """Mapped host memory, for devices."""

    def flag(self, pinned: Any, offset: int) -> Flag:
        """The flag at a place in pinned memory."""

    def view(self, memory: Any, offset: int, nbytes: int, device: int, form: Form) -> tuple[torch.Tensor, object]:
        """A stretch of memory as a device's tensor with a storage of its own, and an object that dies with that."""

    def copy(self, memory: Any, offset: int, stretch: tuple[int, int], device: int) -> None:
        """Copy bytes, from an address and so many, to a place in memory, on the calling thread's stream of
        ``device``.
        """

    def on_host(self, address: int, nbytes: int) -> int:
        """Where the host finds bytes of a device, if they are in pinned memory; else 0."""

    def copy_on_host(self, pinned: Any, offset: int, source: int, nbytes: int) -> None:
        """Copy bytes from there to a place in pinned memory, at once."""

    def watch(self, file: int, process: int, span: Span) -> object:
        """Set flags that a process was to set, when it has ended: even if no thread of this one can go on. As long as
        what is returned is there.
        """


class Pages:
    """What both ends of a segment see of it. ``ready`` is recorded by the sender, ``done`` by the receiver."""

    __slots__ = ("_closed", "_lost", "_opened", "done", "pinned", "probe", "ready", "states")

    def __init__(self, ipc: Ipc, mapping: shared_memory.Mapping, count: int, device: int) -> None:
        self.pinned = ipc.pin(mapping, device)
        self.states = shared_memory.states_of(mapping, count)
        self._opened = memoryview(mapping.block(_OPENED, 4)).cast("B").cast("I")
        self._closed = memoryview(mapping.block(_CLOSED, 1)).cast("B")
        self._lost = memoryview(mapping.block(_LOST, count)).cast("B")
        flags = [ipc.flag(self.pinned, shared_memory.PAGE + index * _FLAG) for index in range(2 * count)]
        self.ready, self.done = flags[:count], flags[count:]
        self.probe: Flag | None = None  # this end's

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
        """The sender has ended."""
        for index, flag in enumerate(self.ready):
            if not flag.query():
                self._lost[index] = 1
                flag.force()

    def force_done(self) -> None:
        """The receiver has ended."""
        for flag in self.done:
            flag.force()

    def close(self) -> None:
        """The receiver borrows nothing more."""
        self._closed[0] = 1

    @property
    def in_use(self) -> bool:
        """Whether the receiver has slots, or may still get some that were named to it."""
        return TAKEN in self.states if self._closed[0] else any(self.states)

    @property
    def passed(self) -> bool:
        """Whether nothing on either side lies ahead."""
        tried = self.probe is None or self.probe.query()
        return tried and all(flag.query() for flag in (*self.ready, *self.done))


assert HEAD >= _LOST + 2 * MAX_SLOTS


def span_of_ready(count: int) -> Span:
    """The flags that the sender records."""
    return Span(shared_memory.PAGE, count, _LOST)


def span_of_done(count: int) -> Span:
    """The flags that the receiver records."""
    return Span(shared_memory.PAGE + count * _FLAG, count, _LOST + count)


def probe(ipc: Ipc, stream_order: StreamOrder, pages: Pages, device: int, *, sender: bool) -> None:
    """Find out whether a device can record flags; some cannot. Raises ``RuntimeError``. Else the pages must be kept
    until they are ``passed``: it is going to write there.
    """
    stream_order.prepare(device)
    flag = ipc.flag(pages.pinned, _PROBES + (0 if sender else _FLAG))
    stream_order.try_out(flag, device)
    pages.probe = flag


def pages_size(slot_bytes: int, count: int, *, slots: bool) -> int:
    """The size of a segment's pages; with ``slots``, these are there as well."""
    return HEAD + (slot_bytes * count if slots else 0)


class DeferredFree(Protocol):
    """Memory of a segment that is no longer lent from."""

    def release(self) -> None:
        """If the process at the other end has ended, set its flags: streams may wait for them."""

    def over(self) -> bool:
        """Whether it can go. See [Note: graves]."""

    def let_go(self) -> None:
        """It goes."""


deferred_frees: collections.deque[DeferredFree] = collections.deque()
"""Memory that cannot go yet."""


def bury(grave: DeferredFree) -> None:
    """Keep memory until it can go."""
    deferred_frees.append(grave)


def free_deferred(stream_order: StreamOrder | None = None) -> bool:
    """Let memory go that can; whether there is more. None goes while anything is under way on streams of
    ``stream_order``:
    CUDA would wait for all of it first, and it may itself wait for the other process.
    """
    gone: list[DeferredFree] = []
    if not _visiting.acquire(blocking=False):
        return True
    try:
        for grave in list(deferred_frees):
            grave.release()
        gone = [grave for grave in list(deferred_frees) if grave.over()]
        if gone and stream_order is not None and not stream_order.quiet():
            gone = []
        for grave in gone:
            deferred_frees.remove(grave)
    finally:
        _visiting.release()
    for grave in gone:
        grave.let_go()
    return bool(deferred_frees)


_visiting = threading.Lock()


def identity_of(process: int) -> int:
    """Tells a process of this host from another that gets its number later; 0 if it is gone, also if its parent has not
    noticed, -1 if that cannot be seen.
    """
    try:
        with open(f"/proc/{process}/stat", "rb") as said:
            fields = said.read().rpartition(b")")[2].split()
        return 0 if fields[0] in (b"Z", b"X") else int(fields[19])  # when it was started
    except (FileNotFoundError, ProcessLookupError):
        return 0
    except (OSError, IndexError, ValueError):
        return -1


def has_ended(process: int, life: int) -> bool:
    """Whether a process that had this ``life`` is gone."""
    now = identity_of(process)
    return now == 0 or (min(now, life) > 0 and now != life)
