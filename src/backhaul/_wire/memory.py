"""Memory for what is received. Large blocks are used again once the tensors on them are gone: the first touch of fresh
memory costs several times what copying into it does.
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

_SMALL = 128 << 10  # below this, malloc does well
_HUGE = 4 << 20  # from here on in huge pages, where the system has them
_KEEP = 256 << 20  # how much unused memory is kept
_HELD = 256 << 10  # a copy up to this size is over sooner than the interpreter could be given away


class Recycler:
    """Hands out writable blocks and takes them back when nothing refers to them any more. Thread-safe, no locks:
    a block may come back in the middle of anything, whenever its last tensor dies.
    """

    def __init__(self, keep: int = _KEEP) -> None:
        self._keep = keep
        self._free: dict[int, collections.deque[mmap.mmap]] = {}
        self._leases: dict[int, _BlockLease] = {}  # by id: what they refer to has no hash

    @property
    def kept(self) -> int:
        """Bytes that wait to be used again."""
        return sum(size * len(blocks) for size, blocks in list(self._free.items()))

    def allocate(self, size: int) -> Buffer:
        """A block of ``size`` bytes with undefined content."""
        if size < _SMALL:
            return bytearray(size)
        rounded = round_up(size)
        try:
            memory = self._free[rounded].pop()
        except (KeyError, IndexError):
            memory = mmap.mmap(-1, rounded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if rounded >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
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
        """Let go of the largest blocks first."""
        for size in sorted(self._free, reverse=True):
            while self._free[size] and self.kept > self._keep:
                try:
                    self._free[size].popleft()
                except IndexError:
                    break


class _BlockLease(weakref.ref[Any]):
    """Tells the recycler when a block is no longer used."""

    __slots__ = ("memory",)
    memory: mmap.mmap


@functools.lru_cache(256)
def block_type(size: int) -> type[ctypes.Array[Any]]:
    """Blocks of ``size`` bytes. Making a type costs 8 us, and messages of one size come often."""
    return ctypes.c_ubyte * size


def round_up(size: int) -> int:
    """Up to a quarter of the next lower power of two, so that sizes that vary a little share blocks."""
    step = 1 << max(size.bit_length() - 3, 12)
    return (size + step - 1) // step * step


def copy_into(block: Buffer, buffer: Buffer) -> None:
    """Copy ``buffer`` into ``block``, which is writable and has its size. A large copy is made without the
    interpreter's lock: other threads, heartbeats among them, run meanwhile.
    """
    if len(block) <= _HELD:
        memoryview(block).cast("B")[:] = memoryview(buffer).cast("B")
        return
    with address_of(block) as target, address_of(buffer) as source:
        ctypes.memmove(target, source, len(block))


@contextlib.contextmanager
def address_of(buffer: Buffer) -> Iterator[int]:
    """Where the memory of ``buffer`` is. It stays there inside the ``with``."""
    view = _View()
    _get_buffer(buffer, ctypes.byref(view), 0)
    try:
        yield view.buf
    finally:
        _release_buffer(ctypes.byref(view))


class _View(ctypes.Structure):
    """``Py_buffer``: the one way to the address of memory that is not writable."""

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
