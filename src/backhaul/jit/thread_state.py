"""Values that go with a strand of execution, whatever thread it is on: in the state that ATen carries along."""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from typing import Any

import torch


def save(key: str, value: Any) -> None:
    """Keep a value with this strand of execution: the engine and the interpreter of scripts carry it along.

    Sparingly, for a key can be set to None but not taken away, and the state of a thread that has one is costly to
    others: whoever takes a copy of it, as Gloo does with each operation, needs the interpreter's lock to let go of it.
    That may be on a thread that somebody joins who holds this lock: torch ends process groups so.
    """
    if not _does_stash_count():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    torch._C._stash_obj_in_tls(key, value)


@functools.cache
def _does_stash_count() -> bool:
    """Whether torch counts the reference that it keeps there. Up to 2.11 it did not, and gave one back all the same."""
    counts = []

    def probe() -> None:  # on a thread of its own, which leaves nothing behind
        kept = object()
        before = sys.getrefcount(kept)
        torch._C._stash_obj_in_tls("backhaul_probe", kept)
        counts.append(sys.getrefcount(kept) > before)
        if not counts[0]:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))

    thread = threading.Thread(target=probe)
    thread.start()
    thread.join()
    return counts[0]


def saved(key: str) -> Any:
    """What ``save`` has kept; None if there is nothing."""
    return torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else None
