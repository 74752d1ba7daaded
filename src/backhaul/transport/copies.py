"""Copies of large buffers. Knows no slots and no channels, only memory."""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import os
from typing import Any

from backhaul.wire.memory import Buffer

_HELD = 256 << 10  # a copy up to this size is over sooner than the interpreter could be given away
_HELPED = 32 << 20  # from this size on others help; below, one thread is as fast, see docs/design.md
_PIECE = 4 << 20  # what a thread copies at a time
_MAX_HELPERS = 3


def copy_into(block: ctypes.Array[Any], buffer: Buffer) -> None:
    """Copy ``buffer`` into ``block``, which has its size."""
    size = len(block)
    if size <= _HELD:
        memoryview(block).cast("B")[:] = memoryview(buffer).cast("B")
        return
    view = _View()
    _get_buffer(buffer, ctypes.byref(view), 0)
    try:
        move(ctypes.addressof(block), view.buf, size)
    finally:
        _release_buffer(ctypes.byref(view))


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
