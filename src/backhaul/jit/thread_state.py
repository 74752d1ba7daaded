"""Values that follow one flow of execution across threads, in the thread-local state that ATen carries along."""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from typing import Any

import torch


def save(key: str, value: Any) -> None:
    """Store a value in this thread's state. Torch's autograd engine and script interpreter carry it along.

    Use few keys. A key can be set to None but not removed, and a thread state with a key is costly for others: Gloo
    copies the state with each operation, and needs Python's global interpreter lock to free the copy. It may free the
    copy on a thread that is being joined by a thread that holds that lock: this is how torch ends process groups.
    """
    if not _does_torch_count_references():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    torch._C._stash_obj_in_tls(key, value)


@functools.cache
def _does_torch_count_references() -> bool:
    """Whether torch takes a reference to the value it stores.

    Up to 2.11 torch takes none, but releases one all the same.
    """
    counts = []

    def probe() -> None:  # runs on its own thread, whose state ends with it
        value = object()
        before = sys.getrefcount(value)
        torch._C._stash_obj_in_tls("backhaul_probe", value)
        counts.append(sys.getrefcount(value) > before)
        if not counts[0]:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))

    thread = threading.Thread(target=probe)
    thread.start()
    thread.join()
    return counts[0]


def saved(key: str) -> Any:
    """The value that ``save`` stored; None if there is none."""
    return torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else None
