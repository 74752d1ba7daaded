"""Copies of large buffers. Knows no slots and no channels, only memory."""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import os
from collections.abc import Sequence
from typing import Any

from backhaul._wire.memory import Buffer, Recycler, address_of

_HELD = 256 << 10  # a copy up to this size is over sooner than the interpreter could be given away
_HELPED = 32 << 20  # from this size on others help; below, one thread is as fast, see docs/design/transport.md
_PIECE = 4 << 20  # what a thread copies at a time
_MAX_HELPERS = 3


def copy_into(block: ctypes.Array[Any], buffer: Buffer) -> None:
    """Copy ``buffer`` into ``block``, which has its size."""
    size = len(block)
    if size <= _HELD:
        memoryview(block).cast("B")[:] = memoryview(buffer).cast("B")
        return
    with address_of(buffer) as source:
        move(ctypes.addressof(block), source, size)


def join(parts: Sequence[Buffer], recycler: Recycler) -> Buffer:
    """One buffer with the bytes of all ``parts``. A large one is filled without the interpreter's lock, which
    ``bytes.join`` would keep for seconds.
    """
    size = sum(map(len, parts))
    if size <= _HELD:
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
    """Copy without the interpreter's lock. When this returns or raises, no thread uses the memory any more."""
    helpers = min(_MAX_HELPERS, len(os.sched_getaffinity(0)) - 1) if size >= _HELPED else 0
    if helpers < 1:
        ctypes.memmove(target, source, size)
        return
    # On a busy machine a thread may take longer to start than the whole copy does. So nobody waits for one: they take
    # pieces while there are any, and one that comes too late finds none.
    pieces = list(range(0, size, _PIECE))

    def take_part() -> None:
        with contextlib.suppress(IndexError):
            while True:
                first = pieces.pop()
                ctypes.memmove(target + first, source + first, min(_PIECE, size - first))

    def help_out(working: _thread.LockType) -> None:
        with working:
            take_part()

    helping = [_thread.allocate_lock() for _ in range(helpers)]  # held by helpers while they may have a piece
    try:
        with contextlib.suppress(RuntimeError):  # no more threads: the interpreter ends, or there are too many
            for working in helping:
                _thread.start_new_thread(help_out, (working,))
        take_part()
    finally:
        pieces.clear()
        for working in helping:
            with working:
                pass
