"""Copies of large buffers. Knows memory only, no slots and no channels."""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import os
from collections.abc import Sequence
from typing import Any

from backhaul._transport.processors import PROCESSORS
from backhaul._wire.memory import Buffer, Recycler, address_of

_LOCKED_BYTES = 256 << 10  # a copy up to this size ends before another thread could take the interpreter's lock
# From these sizes on helper threads copy too; see docs/design/transport.md.
_PARALLEL_BYTES = 32 << 20
_FREE_PARALLEL_BYTES = 8 << 20  # if there is a free processor for each
_PIECE_BYTES = 4 << 20  # what a thread copies at a time
_MAX_HELPERS = 3


def copy_into(block: ctypes.Array[Any], buffer: Buffer) -> None:
    """Copy ``buffer`` into ``block``, which has the same size."""
    size = len(block)
    if size <= _LOCKED_BYTES:
        memoryview(block).cast("B")[:] = memoryview(buffer).cast("B")
        return
    with address_of(buffer) as source:
        move(ctypes.addressof(block), source, size)


def join(parts: Sequence[Buffer], recycler: Recycler) -> Buffer:
    """One buffer with the bytes of all ``parts``. A large one is filled without the interpreter's lock; ``bytes.join``
    would hold the lock for seconds.
    """
    size = sum(map(len, parts))
    if size <= _LOCKED_BYTES:
        return b"".join(parts)
    joined = recycler.allocate(size)
    with address_of(joined) as start:
        filled = 0
        for part in parts:
            with address_of(part) as source:
                move(start + filled, source, len(part))
            filled += len(part)
    return joined


def move(target: int, source: int, size: int) -> None:
    """Copy without the interpreter's lock. Once this returns or raises, no thread uses the memory any more."""
    helpers = _count_helpers(size)
    if not helpers and size < _PARALLEL_BYTES:
        ctypes.memmove(target, source, size)
        return
    # On a busy machine a helper thread may take longer to start than the whole copy takes. So nobody waits for a helper
    # to start: helpers take pieces while there are any, and a helper that starts too late finds none.
    pieces = list(range(0, size, _PIECE_BYTES))

    def copy_pieces() -> None:
        with contextlib.suppress(IndexError):
            while True:
                first = pieces.pop()
                ctypes.memmove(target + first, source + first, min(_PIECE_BYTES, size - first))
                os.sched_yield()  # else threads with little to do wait for the end of this thread's time slice

    def help_copy(working: _thread.LockType) -> None:
        with working:
            copy_pieces()

    helping = [_thread.allocate_lock() for _ in range(helpers)]  # a helper holds its lock while it may copy a piece
    try:
        with contextlib.suppress(RuntimeError):  # no thread can start: the interpreter is ending, or there are too many
            for working in helping:
                _thread.start_new_thread(help_copy, (working,))
        copy_pieces()
    finally:
        pieces.clear()
        for working in helping:
            with working:
                pass


def _count_helpers(size: int) -> int:
    """How many threads are to help with a copy."""
    if size >= _PARALLEL_BYTES:
        return min(_MAX_HELPERS, len(os.sched_getaffinity(0)) - 1)
    if size >= _FREE_PARALLEL_BYTES and PROCESSORS.free() > _MAX_HELPERS:
        return min(_MAX_HELPERS, size // _PIECE_BYTES - 1)
    return 0
