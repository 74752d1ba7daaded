"""Memory for received data. Large blocks are reused once the tensors on them are gone, because the first touch of new
memory costs several times as much as copying into it.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import mmap
import weakref
from collections.abc import Iterator
from typing import Any

Buffer = bytes | bytearray | memoryview | mmap.mmap | ctypes.Array[Any]

_MIN_RECYCLED_BYTES = 128 << 10  # malloc handles smaller blocks well
_MIN_HUGE_PAGE_BYTES = 4 << 20  # larger blocks use huge pages, if the system has them
_MAX_KEPT_BYTES = 256 << 20  # how much unused memory is kept
_MAX_COPY_WITH_GIL_BYTES = 256 << 10  # copying this much takes less time than releasing the interpreter lock


class Recycler:
    """Hands out writable blocks and takes them back when nothing refers to them. Thread-safe.

    It uses no locks, because a block may come back at any point of the program: when its last tensor is freed.
    """

    def __init__(self, keep: int = _MAX_KEPT_BYTES) -> None:
        self._keep = keep
        self._free: dict[int, collections.deque[mmap.mmap]] = {}
        self._leases: dict[int, _BlockLease] = {}  # by id, because the blocks have no hash

    @property
    def kept(self) -> int:
        """Bytes of unused blocks."""
        return sum(size * len(blocks) for size, blocks in list(self._free.items()))

    def allocate(self, size: int) -> Buffer:
        """A block of ``size`` bytes with undefined content."""
        if size < _MIN_RECYCLED_BYTES:
            return bytearray(size)
        rounded = round_up(size)
        try:
            memory = self._free[rounded].pop()
        except (KeyError, IndexError):
            memory = mmap.mmap(-1, rounded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if rounded >= _MIN_HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
                memory.madvise(mmap.MADV_HUGEPAGE)
        block = block_type(size).from_buffer(memory)
        lease = _BlockLease(block, self._take_back)
        lease.memory = memory
        self._leases[id(lease)] = lease
        return block

    def _take_back(self, lease: _BlockLease) -> None:
        memory = lease.memory
        self._leases.pop(id(lease), None)
        blocks = self._free.setdefault(len(memory), collections.deque())
        blocks.append(memory)
        if self.kept > self._keep:
            self._shrink()

    def _shrink(self) -> None:
        """Free unused blocks, the largest first."""
        for size in sorted(self._free, reverse=True):
            while self._free[size] and self.kept > self._keep:
                try:
                    self._free[size].popleft()
                except IndexError:
                    break


class _BlockLease(weakref.ref[Any]):
    """A weak reference that tells the recycler when a block is no longer used."""

    __slots__ = ("memory",)
    memory: mmap.mmap


@functools.lru_cache(256)
def block_type(size: int) -> type[ctypes.Array[Any]]:
    """The ctypes array type of ``size`` bytes. Cached: making a type costs 8 us, and message sizes repeat."""
    return ctypes.c_ubyte * size


def round_up(size: int) -> int:
    """Round a size up to a multiple of a quarter of the next lower power of two, so that similar sizes share blocks."""
    step = 1 << max(size.bit_length() - 3, 12)
    return (size + step - 1) // step * step


def copy_into(block: Buffer, buffer: Buffer) -> None:
    """Copy ``buffer`` into ``block``, which is writable and has its size.

    A large copy releases the interpreter lock, so that other threads, heartbeats among them, run meanwhile.
    """
    if len(block) <= _MAX_COPY_WITH_GIL_BYTES:
        memoryview(block).cast("B")[:] = memoryview(buffer).cast("B")
        return
    with address_of(block) as target, address_of(buffer) as source:
        ctypes.memmove(target, source, len(block))


@contextlib.contextmanager
def address_of(buffer: Buffer) -> Iterator[int]:
    """The address of the memory of ``buffer``. It is valid inside the ``with`` block."""
    view = _View()
    _get_buffer(buffer, ctypes.byref(view), 0)
    try:
        yield view.buf
    finally:
        _release_buffer(ctypes.byref(view))


class _View(ctypes.Structure):
    """``Py_buffer``. Only this structure gives the address of read-only memory."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_void_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.c_void_p, ctypes.c_int)
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.c_void_p,)
_release_buffer.restype = None
