"""Numbered notices from one worker to one owner: delivered in order, each applied once. Pure: no I/O, no threads."""

from __future__ import annotations

import enum
from collections.abc import Iterable

import msgspec

from backhaul._rref.ownership import Update
from backhaul._wire.messages import prepare

Notice = tuple[int, list[Update]]
"""Updates, with the number that their sender gave them for this owner."""


class RRefKind(enum.IntEnum):
    """Kinds of frames that are about references; they follow those of autograd."""

    NOTICES = 22  # from a worker that refers to values, to their owner


class Notices(msgspec.Struct, array_like=True, frozen=True):
    """A frame of notices. It has no answer."""

    notices: list[Notice]


prepare(Notices)


MAX_UNACKNOWLEDGED = 64
"""So many unacknowledged notices are kept before the owner is asked which of them it has."""


class NoticeOutbox:
    """The notices for one owner. Numbers them, and keeps each until the owner has acknowledged it.

    Attributes:
        asks_at: The owner is asked which notices it has when so many are unacknowledged.

    Example:
        >>> outbox = NoticeOutbox()
        >>> notices = [outbox.add([]), outbox.add([])]
        >>> outbox.mark_undelivered(notices)
        >>> outbox.acknowledge(notices[:1])
        >>> outbox.take_undelivered()
        [(1, [])]
    """

    def __init__(self) -> None:
        self.asks_at = MAX_UNACKNOWLEDGED
        self._next = 0
        self._unacknowledged: dict[int, list[Update]] = {}
        self._undelivered: dict[int, None] = {}  # the unacknowledged ones that no thread tries to deliver

    def add(self, updates: list[Update]) -> Notice:
        """Number updates. The caller delivers the notice."""
        notice = self._next, updates
        self._unacknowledged[self._next] = updates
        self._next += 1
        return notice

    def mark_undelivered(self, notices: Iterable[Notice]) -> None:
        """The caller could not deliver these notices and gives up."""
        self._undelivered.update(dict.fromkeys(number for number, _ in notices if number in self._unacknowledged))

    def take_undelivered(self) -> list[Notice]:
        """The undelivered notices, for another try by the caller."""
        undelivered, self._undelivered = self._undelivered, {}
        return [(number, self._unacknowledged[number]) for number in undelivered]

    def acknowledge(self, notices: Iterable[Notice]) -> None:
        """The owner has these notices."""
        for number, _ in notices:
            self._unacknowledged.pop(number, None)
            self._undelivered.pop(number, None)

    def acknowledge_before(self, number: int) -> None:
        """The owner has all notices before that number."""
        for each in list(self._unacknowledged):
            if each >= number:
                return
            del self._unacknowledged[each]
            self._undelivered.pop(each, None)

    def awaits(self, number: int) -> bool:
        """Whether the owner has not acknowledged that notice yet."""
        return number in self._unacknowledged

    def unacknowledged(self) -> list[Notice]:
        """All notices that the owner has not acknowledged, in the order of their numbers."""
        return list(self._unacknowledged.items())

    def __len__(self) -> int:
        """How many notices the owner has not acknowledged."""
        return len(self._unacknowledged)


class NoticeInbox:
    """Puts the notices of one worker in order, and drops those that come twice.

    Example:
        >>> inbox = NoticeInbox()
        >>> inbox.receive(1, ["b"]), inbox.receive(0, ["a"]), inbox.receive(0, ["a"])
        ([], ['a', 'b'], [])
    """

    def __init__(self) -> None:
        self._next = 0
        self._early: dict[int, list[Update]] = {}  # notices that came before the next one

    def receive(self, number: int, updates: list[Update]) -> list[Update]:
        """A notice has come. Returns the updates that can be applied now."""
        if number >= self._next:
            self._early.setdefault(number, updates)
        due: list[Update] = []
        while (following := self._early.pop(self._next, None)) is not None:
            due += following
            self._next += 1
        return due

    @property
    def missing(self) -> int:
        """The number of the first notice that was not received."""
        return self._next

    def has_received(self, number: int) -> bool:
        """Whether the notice of that number, and all before it, were received."""
        return number < self._next
