"""The data plane of one host: large buffers travel through memory that both processes have mapped.

``HostLender`` is the sending end of one direction of a channel, ``HostBorrower`` the receiving end. Segments
are anonymous
files (``memfd_create``): they have no name, so the system frees them with the last process that has them mapped,
however that one ends, and the size of ``/dev/shm`` does not matter. They belong to one direction of one channel: when
the channel is lost the sender lets go of its own mapping, and what the receiver still uses stays as it is.

    sender                                      receiver
    OFFER number, slots, descriptor, cookie ->  opens the sender's descriptor by /proc, checks it, maps it
                                            <-  ANSWER number, whether it could
    frames that name slots                  ->  tensors are views of the slots
    (finds the slot's state to be free)         clears the slot's state when the last of them is gone
    RETIRE number                           ->  unmaps it

[Note: order] States are single bytes, written with plain stores. The sender writes a slot, then names it in a system
call; the receiver's reads follow another: both are barriers. The receiver clears the state when the last owner of the
slot's memory is gone. That owner was counted down atomically, with acquire and release order, by whichever thread let
go of it, so all use of the memory comes before the store, on weakly ordered machines too; and the sender's writes
depend on what it read in the state, so none is made before.

[Note: fork] A forked child would see the parent's slots being used again. Before it goes on it therefore gets copies of
all borrowed slots in their place, which are its own like any other memory. The parent waits for that, and returns no
slot meanwhile.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import fcntl
import mmap
import os
import secrets
import select
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from backhaul._transport.shm.copies import copy_into
from backhaul._transport.shm.slots import FREE, LENT, MAX_SLOTS, RESERVE, Budget, Pool, Segment
from backhaul._wire.frames import control_frame
from backhaul._wire.memory import Buffer, block_type
from backhaul.errors import ProtocolError

THRESHOLD = 64 << 10  # buffers from here on go through slots; measured, see docs/performance.md
OFFER, ANSWER, RETIRE = 1, 2, 3  # kinds of control frames
_OFFER_BODY = struct.Struct("<iIQ16s")  # descriptor, slots, slot size, cookie
PAGE = 4096  # a segment's first, with its states
COOKIE = 16  # bytes
_STATES = 64  # where in a segment's first page the states are; the cookie is at its beginning
_MAX_SEGMENTS = 1 << 14  # that a receiver has mapped at once
_MAX_SEGMENT = 1 << 40
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_PATIENCE = 0.01  # seconds to wait for another thread in the pool; then the buffer goes inline
_FORK_PATIENCE = 5.0  # seconds

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_FAILED = ctypes.c_void_p(-1).value
_ONTO = 1 | 2  # MREMAP_MAYMOVE | MREMAP_FIXED


def _map(fd: int, size: int, flags: int) -> int:
    address: int = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if address == _FAILED:
        raise OSError(ctypes.get_errno(), "cannot map memory")
    return address


class Mapping:
    """A file in memory. Unmapped when nothing refers to it; unlike ``mmap.mmap`` it keeps no descriptor."""

    __slots__ = ("address", "size")

    def __init__(self, fd: int, size: int) -> None:
        self.size = 0
        self.address = _map(fd, size, mmap.MAP_SHARED)
        self.size = size

    def __del__(self, unmap: Any = _libc.munmap) -> None:
        if self.size:
            unmap(self.address, self.size)

    def block(self, offset: int, size: int) -> Any:
        """A stretch of it that keeps all of it."""
        block = block_type(size).from_address(self.address + offset)
        block.mapping = self  # type: ignore[attr-defined]
        return block


def states_of(mapping: Mapping, count: int) -> memoryview:
    """The states of a segment's slots, in its first page."""
    return memoryview(mapping.block(_STATES, count)).cast("B")


def create(total: int) -> tuple[int, Mapping, bytes]:
    """Make a segment of that size: a descriptor, by which another process can open it while it is not closed, the
    memory, and what it begins with. Raises ``OSError``.
    """
    fd = os.memfd_create("backhaul", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, total)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        mapping = Mapping(fd, total)
    except BaseException:
        os.close(fd)
        raise
    cookie = secrets.token_bytes(COOKIE)
    ctypes.memmove(mapping.address, cookie, len(cookie))
    return fd, mapping, cookie


def attach(process: int, fd: int, total: int, cookie: bytes, look: Callable[[int], object] | None = None) -> Mapping:
    """Map a segment that another process has made. Raises ``OSError``.

    Args:
        process: Whose it is.
        fd: Its descriptor there.
        total: Its size.
        cookie: What it begins with.
        look: Called with a descriptor that is open as long.
    """
    # Whatever that descriptor is, opening it must not block; and what may shrink would kill whoever reads it.
    mine = os.open(f"/proc/{process}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        if os.fstat(mine).st_size != total or fcntl.fcntl(mine, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise OSError("not a segment")
        mapping = Mapping(mine, total)
        if ctypes.string_at(mapping.address, len(cookie)) != cookie:
            raise OSError("another segment")
        if look is not None:
            look(mine)
    finally:
        os.close(mine)
    return mapping


def available() -> bool:
    """Whether this system has what is needed."""
    return hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")


def default_ceiling() -> int:
    """An eighth of this machine's memory, or of what this process may use of it; at most 2 GiB."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError), open("/sys/fs/cgroup/memory.max") as limit:
        memory = min(memory, int(limit.read()))
    return min(memory // 8, 2 << 30)


# The sending end.


class HostLender:
    """Puts buffers into slots. Thread-safe, and waits for nobody: what finds no slot goes inline.

    Args:
        budget: What all channels of the worker share.
    """

    def __init__(self, budget: Budget) -> None:
        self.bytes_lent = 0  # ever
        self.news: collections.deque[bytes] = collections.deque()  # control frames to be sent
        self._budget = budget
        self._lock = threading.Lock()  # guards all below but _answers; never waited for long, see [Note: reentry]
        self._pool = Pool()
        self._descriptors: dict[int, int] = {}  # segment -> descriptor, until the receiver has mapped it
        self._answers: collections.deque[tuple[int, bool]] = collections.deque()
        self._refused = False  # the receiver could not map a segment, and is not asked again
        self._closed = False

    # [Note: reentry] The garbage collector may run anywhere, and what it calls may send. A thread that would wait for
    # itself gives up after _PATIENCE, and answers are noted without the lock.

    @property
    def lent(self) -> int:
        """How many slots the receiver has."""
        return sum(segment.lent for segment in self._pool)

    def lend(self, buffers: Sequence[Buffer]) -> list[int] | None:
        """Copy large buffers into slots; return all buffers' places (0: inline), or None if all go inline."""
        places: list[int] | None = None
        try:
            for position, buffer in enumerate(buffers):
                size = len(buffer)
                if size < THRESHOLD:
                    continue
                slot = self._take(size)
                if slot is None:
                    continue
                places = places or [0] * len(buffers)
                segment, index = slot
                places[position] = segment.number << 32 | index
                copy_into(segment.memory.block(PAGE + index * segment.slot_bytes, size), buffer)
        except BaseException:
            self.take_back(places)
            raise
        return places

    def take_back(self, places: Sequence[int] | None) -> None:
        """Places that were not sent are free again."""
        for place in places or ():
            segment = self._pool.get(place >> 32) if place else None
            if segment is not None:
                segment.states[place & 0xFFFFFFFF] = FREE

    def _take(self, size: int) -> tuple[Segment, int] | None:
        if not self._lock.acquire(timeout=_PATIENCE):
            return None
        try:
            if self._answers:
                self._note_answers()
            if self._closed:
                return None
            slot = self._pool.take(size, time.monotonic())
            if slot is None:
                self._grow(size)
            else:
                self.bytes_lent += size
            return slot
        finally:
            self._lock.release()

    def _grow(self, size: int) -> None:
        wish = None if self._refused else self._pool.wish(size)
        if wish is None:
            return
        slot_bytes, count = wish
        total = PAGE + slot_bytes * count
        if not self._budget.take(total):
            return
        try:
            fd, mapping, cookie = create(total)
        except OSError:  # no descriptors or address space left, say: inline then
            self._budget.give_back(total)
            return
        number = self._pool.next_number()
        self._descriptors[number] = fd
        self._pool.add(Segment(number, slot_bytes, states_of(mapping, count), time.monotonic(), mapping))
        self.news.append(control_frame(OFFER, number, _OFFER_BODY.pack(fd, count, slot_bytes, cookie)))

    def answered(self, number: int, body: bytes) -> None:
        """The receiver says whether it has mapped a segment."""
        if body not in (b"\0", b"\1") or number not in self._descriptors:
            raise ProtocolError(f"an answer to no offer: segment {number}")
        self._answers.append((number, body == b"\1"))
        if self._lock.acquire(blocking=False):  # else the next that is lent sees to it
            try:
                self._note_answers()
            finally:
                self._lock.release()

    def _note_answers(self) -> None:
        while self._answers:
            number, accepted = self._answers.popleft()
            segment = self._pool.get(number)
            if segment is None or segment.ready:
                continue
            os.close(self._descriptors.pop(number))
            segment.ready = accepted
            if not accepted:
                self._refused = True
                self._pool.drop(segment)
                self._budget.give_back(PAGE + segment.nbytes)

    def trim(self) -> bool:
        """Let unused segments go; whether there may be more of them later."""
        if not self._lock.acquire(blocking=False):
            return True
        try:
            self._note_answers()
            reserve = RESERVE if self._budget.used < self._budget.limit // 2 else 0  # others may need it
            for segment in self._pool.drop_unused(time.monotonic(), reserve=reserve):
                self.news.append(control_frame(RETIRE, segment.number))
                self._budget.give_back(PAGE + segment.nbytes)
            return not self._closed and self._pool.may_shrink()
        finally:
            self._lock.release()

    def close(self) -> None:
        """The channel is lost: let go of everything."""
        held = self._lock.acquire(timeout=1.0)
        self._closed = True
        for segment in self._pool:
            self._pool.drop(segment)
            self._budget.give_back(PAGE + segment.nbytes)
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])
        if held:
            self._lock.release()


# The receiving end.


class _Borrowed:
    """A segment as its receiver knows it."""

    __slots__ = ("mapping", "slot_bytes", "states", "taken")

    def __init__(self, mapping: Mapping, slot_bytes: int, count: int) -> None:
        self.mapping = mapping
        self.slot_bytes = slot_bytes
        self.states = states_of(mapping, count)
        self.taken = bytearray(count)  # which slots are in use here, whatever the states say


class _HostLease(weakref.ref[Any]):
    """Tells when a slot is no longer used."""

    __slots__ = ("index", "segment")
    segment: _Borrowed
    index: int


_leases: dict[int, _HostLease] = {}  # by id, of this process; they outlive their channels


class HostBorrower:
    """Makes buffers of slots. Used by the one thread that reads the channel; slots go back from any.

    Args:
        process: The sender's process.
    """

    def __init__(self, process: int) -> None:
        self._process = process
        self._segments: dict[int, _Borrowed] = {}

    def offered(self, number: int, body: bytes) -> bytes:
        """The sender offers a segment: map it, and return the answer."""
        if len(body) != _OFFER_BODY.size:
            raise ProtocolError(f"an offer of {len(body)} bytes")
        fd, count, slot_bytes, cookie = _OFFER_BODY.unpack(body)
        total = PAGE + count * slot_bytes
        if not 0 < count <= MAX_SLOTS or not slot_bytes or slot_bytes % PAGE or total > _MAX_SEGMENT:
            raise ProtocolError(f"impossible segment: {count} slots of {slot_bytes} bytes")
        if number in self._segments or not 0 < number < 1 << 31:
            raise ProtocolError(f"impossible segment number {number}")
        accepted = False
        if len(self._segments) < _MAX_SEGMENTS and self._process > 0 and fd >= 0:
            with contextlib.suppress(OSError):
                self._segments[number] = _Borrowed(attach(self._process, fd, total, cookie), slot_bytes, count)
                accepted = True
        return control_frame(ANSWER, number, b"\1" if accepted else b"\0")

    def retired(self, number: int) -> None:
        """The sender has let go of a segment."""
        if self._segments.pop(number, None) is None:
            raise ProtocolError(f"there is no segment {number}")

    def close(self) -> None:
        """The channel is lost. Slots in use stay so."""
        self._segments.clear()

    def borrow(self, place: int, size: int) -> Buffer:
        """The buffer of ``size`` bytes at ``place``; the slot goes back when nothing refers to it any more."""
        segment, index = self._segments.get(place >> 32), place & 0xFFFFFFFF
        if segment is None or index >= len(segment.taken) or not 0 < size <= segment.slot_bytes:
            raise ProtocolError(f"there are no {size} bytes at place {place:#x}")
        if segment.taken[index] or segment.states[index] != LENT:
            raise ProtocolError(f"place {place:#x} was not lent")
        segment.taken[index] = 1
        block: Buffer = segment.mapping.block(PAGE + index * segment.slot_bytes, size)
        lease = _HostLease(block, _end)
        lease.segment, lease.index = segment, index
        _leases[id(lease)] = lease
        return block


def _end(lease: _HostLease) -> None:
    """Called wherever the last reference happens to go: takes no lock."""
    if _leases.pop(id(lease), None) is None:
        return
    if _forks.under_way:
        _forks.ended.append(lease)
        return
    # In this order: after the second, the sender may lend the slot again.
    lease.segment.taken[lease.index] = 0
    lease.segment.states[lease.index] = FREE


class _Forks(threading.local):
    """See [Note: fork]."""

    pipe: tuple[int, int] | None = None


class _ForkWatch:
    def __init__(self) -> None:
        self.under_way: collections.deque[int] = collections.deque()  # one item for each fork
        self.ended: collections.deque[_HostLease] = collections.deque()
        self._mine = _Forks()
        os.register_at_fork(before=self._before, after_in_parent=self._in_parent, after_in_child=self._in_child)

    def _before(self) -> None:
        self._mine.pipe = None
        if _leases:
            self._mine.pipe = os.pipe()
            self.under_way.append(1)

    def _in_parent(self) -> None:
        pipe, self._mine.pipe = self._mine.pipe, None
        if pipe is None:
            return
        os.close(pipe[1])
        poller = select.poll()
        poller.register(pipe[0], select.POLLIN)
        poller.poll(_FORK_PATIENCE * 1000)
        os.close(pipe[0])
        self.under_way.pop()
        while self.ended and not self.under_way:
            lease = self.ended.popleft()
            _leases[id(lease)] = lease
            _end(lease)

    def _in_child(self) -> None:
        pipe, self._mine.pipe = self._mine.pipe, None
        self.under_way.clear()
        self.ended.clear()
        for lease in list(_leases.values()):
            block = lease()
            if block is not None:
                _privatize(ctypes.addressof(block), len(block))
        _leases.clear()  # the parent's to return
        if pipe is not None:
            os.write(pipe[1], b"\0")
            os.close(pipe[0])
            os.close(pipe[1])


def _privatize(address: int, size: int) -> None:
    size = -(-size // PAGE) * PAGE
    copy = _map(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    ctypes.memmove(copy, address, size)
    if _libc.mremap(copy, size, size, _ONTO, address) == _FAILED:
        raise OSError(ctypes.get_errno(), "cannot give a forked process its own memory")


_forks = _ForkWatch()
