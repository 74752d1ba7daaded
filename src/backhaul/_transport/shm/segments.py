"""Segments: memory of one host that two processes map. Creates and maps them; knows no slots and no channels.

A segment is an anonymous file (``memfd_create``). It has no name, so the system frees it with the last process that
maps it, however that process ends, and the size of ``/dev/shm`` does not limit it. Its first page holds the cookie and
the states of its slots (``slots``); what follows is up to the caller.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import secrets
from collections.abc import Callable
from typing import Any

from backhaul._wire.memory import block_type

PAGE = 4096
"""Bytes of the first page of a segment, which holds the states of its slots."""

COOKIE_BYTES = 16
_STATES_OFFSET = 64  # in the first page; the cookie is at its beginning
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_FAILED = ctypes.c_void_p(-1).value
_MAYMOVE_AND_FIXED = 1 | 2  # MREMAP_MAYMOVE | MREMAP_FIXED


def _map(fd: int, size: int, flags: int) -> int:
    address: int = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if address == _FAILED:
        raise OSError(ctypes.get_errno(), "cannot map memory")
    return address


class Mapping:
    """A mapped file. It is unmapped when nothing refers to this object; unlike ``mmap.mmap`` it keeps no descriptor."""

    __slots__ = ("address", "size")

    def __init__(self, fd: int, size: int) -> None:
        self.size = 0
        self.address = _map(fd, size, mmap.MAP_SHARED)
        self.size = size

    def __del__(self, unmap: Any = _libc.munmap) -> None:
        if self.size:
            unmap(self.address, self.size)

    def block(self, offset: int, size: int) -> Any:
        """A part of the memory, as a ctypes array. The array keeps the whole mapping alive."""
        block = block_type(size).from_address(self.address + offset)
        block.mapping = self  # type: ignore[attr-defined]
        return block


def states_of(mapping: Mapping, count: int) -> memoryview:
    """The states of a segment's slots, one byte each, in its first page."""
    return memoryview(mapping.block(_STATES_OFFSET, count)).cast("B")


def create(total: int) -> tuple[int, Mapping, bytes]:
    """Create a segment of ``total`` bytes. Raises ``OSError``.

    Returns:
        A descriptor, by which another process can open the segment until the caller closes it; the mapped memory; and
        the random cookie at its beginning.
    """
    fd = os.memfd_create("backhaul", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, total)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        mapping = Mapping(fd, total)
    except BaseException:
        os.close(fd)
        raise
    cookie = secrets.token_bytes(COOKIE_BYTES)
    ctypes.memmove(mapping.address, cookie, len(cookie))
    return fd, mapping, cookie


def attach(
    process: int, fd: int, total: int, cookie: bytes, with_descriptor: Callable[[int], object] | None = None
) -> Mapping:
    """Map a segment that another process has created. Raises ``OSError``.

    Args:
        process: The process that has created the segment.
        fd: Its descriptor in that process.
        total: Its size in bytes.
        cookie: The bytes at its beginning.
        with_descriptor: Called with a descriptor of the segment, which is open only during the call.
    """
    # The peer may name any descriptor. To open it must not block, and a file that can shrink would kill its readers
    # with SIGBUS; so the seals are checked.
    mine = os.open(f"/proc/{process}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        if os.fstat(mine).st_size != total or fcntl.fcntl(mine, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise OSError("the descriptor is not a segment")
        mapping = Mapping(mine, total)
        if ctypes.string_at(mapping.address, len(cookie)) != cookie:
            raise OSError("the descriptor is another segment")
        if with_descriptor is not None:
            with_descriptor(mine)
    finally:
        os.close(mine)
    return mapping


def make_private(address: int, size: int) -> None:
    """Replace shared memory by a private copy at the same address. For a forked child, see ``leases``."""
    size = -(-size // PAGE) * PAGE
    copy = _map(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    ctypes.memmove(copy, address, size)
    if _libc.mremap(copy, size, size, _MAYMOVE_AND_FIXED, address) == _FAILED:
        raise OSError(ctypes.get_errno(), "cannot give a forked process its own copy of shared memory")


def available() -> bool:
    """Whether this system has what segments need."""
    return hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")


def default_ceiling() -> int:
    """An eighth of this machine's memory, or of the part that this process may use; at most 2 GiB."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError), open("/sys/fs/cgroup/memory.max") as limit:
        memory = min(memory, int(limit.read()))
    return min(memory // 8, 2 << 30)
