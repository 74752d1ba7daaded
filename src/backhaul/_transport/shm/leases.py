"""Leases: which borrowed slots of this process are in use, and what happens to them in a fork.

A borrower makes an object on the memory of a slot. Its lease ends when nothing refers to that object any more, and the
slot then goes back to the sender. Leases outlive their channel: a tensor stays valid when the channel is lost.

[Note: fork] The sender writes into slots again when the parent returns them, and a forked child would see that. So
before the child goes on it replaces all borrowed host memory by private copies at the same addresses. The parent waits
for that, and returns no slot meanwhile.
"""

from __future__ import annotations

import collections
import os
import select
import threading
import weakref
from typing import Any, Protocol

_FORK_SECONDS = 5.0  # that the parent waits for the child's copies


class LeasedFrom(Protocol):
    """The segment that a leased slot belongs to."""

    def give_back(self, index: int) -> None:
        """Nothing in this process refers to the slot any more. Called in destructors: takes no lock."""

    def copy_in_child(self, owner: Any) -> None:
        """Called in a forked child: make the memory of ``owner``, a leased object, the child's own."""


class SlotLease(weakref.ref[Any]):
    """Notices when the object on a slot's memory is gone."""

    __slots__ = ("index", "segment")
    segment: LeasedFrom
    index: int


_leases: dict[int, SlotLease] = {}  # of this process, by id: what a lease refers to may have no hash


def lease(segment: LeasedFrom, index: int, owner: Any) -> None:
    """Give a slot back when ``owner`` is gone."""
    made = SlotLease(owner, _end)
    made.segment, made.index = segment, index
    _leases[id(made)] = made


def _end(ended: SlotLease) -> None:
    """Called by whichever thread drops the last reference: takes no lock."""
    if _leases.pop(id(ended), None) is None:
        return
    if fork_guard.under_way:
        fork_guard.ended.append(ended)
        return
    ended.segment.give_back(ended.index)


class _ForkingThread(threading.local):
    pipe: tuple[int, int] | None = None  # by which the child says that it has its copies


class ForkGuard:
    """Holds back the return of slots during a fork. See [Note: fork].

    Attributes:
        under_way: One item for each fork that is under way.
        ended: Leases that ended meanwhile.
    """

    def __init__(self) -> None:
        self.under_way: collections.deque[int] = collections.deque()
        self.ended: collections.deque[SlotLease] = collections.deque()
        self._thread = _ForkingThread()
        os.register_at_fork(before=self.before, after_in_parent=self.in_parent, after_in_child=self.in_child)

    def before(self) -> None:
        """The calling thread is about to fork."""
        self._thread.pipe = None
        if _leases:
            self._thread.pipe = os.pipe()
            self.under_way.append(1)

    def in_parent(self) -> None:
        """Wait for the child's copies, and return the slots that were held back."""
        pipe, self._thread.pipe = self._thread.pipe, None
        if pipe is None:
            return
        os.close(pipe[1])
        poller = select.poll()
        poller.register(pipe[0], select.POLLIN)
        poller.poll(_FORK_SECONDS * 1000)
        os.close(pipe[0])
        self.under_way.pop()
        while self.ended and not self.under_way:
            ended = self.ended.popleft()
            _leases[id(ended)] = ended
            _end(ended)

    def in_child(self) -> None:
        """Make copies of all borrowed memory, and tell the parent."""
        pipe, self._thread.pipe = self._thread.pipe, None
        self.under_way.clear()
        self.ended.clear()
        for each in list(_leases.values()):
            owner = each()
            if owner is not None:
                each.segment.copy_in_child(owner)
        _leases.clear()  # only the parent returns slots
        if pipe is not None:
            os.write(pipe[1], b"\0")
            os.close(pipe[0])
            os.close(pipe[1])


fork_guard = ForkGuard()
