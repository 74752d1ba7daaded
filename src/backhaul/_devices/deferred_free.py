"""Shared device memory that is no longer lent, and is freed as soon as that is safe.

It is safe when no device work on the memory lies ahead: all flags are passed and no slot is lent. The work of a process
that has ended is never going to be done, so its flags are set for it: by the process at the other end, or, if that
cannot run, by a third process (see ``flag_reaper``).
"""

from __future__ import annotations

import collections
import threading
from typing import Protocol

from backhaul._devices.slot_order import SlotOrder


class DeferredFree(Protocol):
    """Memory of a segment that is no longer lent."""

    def set_flags_of_ended(self) -> None:
        """If the process at the other end has ended, set its flags: streams may wait for them."""

    def can_free(self) -> bool:
        """Whether no device work on it lies ahead."""

    def free_memory(self) -> None:
        """Free it."""


deferred_frees: collections.deque[DeferredFree] = collections.deque()
"""Memory of this process that cannot be freed yet."""

_freeing = threading.Lock()  # held by the one thread that looks which memory can be freed


def free_later(memory: DeferredFree) -> None:
    """Free memory as soon as that is safe."""
    deferred_frees.append(memory)


def free_deferred(slot_order: SlotOrder | None = None) -> bool:
    """Free the memory that can be freed; return whether there is more.

    Nothing is freed while there is work on streams of ``slot_order``: CUDA would first wait for all of it, and that
    work may itself wait for the other process.
    """
    freed: list[DeferredFree] = []
    if not _freeing.acquire(blocking=False):
        return True
    try:
        for memory in list(deferred_frees):
            memory.set_flags_of_ended()
        freed = [memory for memory in list(deferred_frees) if memory.can_free()]
        if freed and slot_order is not None and not slot_order.is_quiet():
            freed = []
        for memory in freed:
            deferred_frees.remove(memory)
    finally:
        _freeing.release()
    for memory in freed:
        memory.free_memory()
    return bool(deferred_frees)
