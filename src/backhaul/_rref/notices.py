"""Numbered notices from one worker to one owner: delivered in order, each applied once. Pure: no I/O, no threads."""

from __future__ import annotations

from collections.abc import Iterable

from backhaul._rref.ownership import Update

Notice = tuple[int, list[Update]]
"""Updates, with the number that their sender gave them for this owner."""


class NoticeOutbox:
    """The notices for one owner. Numbers them, and keeps each until the owner has acknowledged it.

    Example:
        >>> outbox = NoticeOutbox()
        >>> notices = [outbox.add([]), outbox.add([])]
        >>> outbox.mark_undelivered(notices)
        >>> outbox.acknowledge(notices[:1])
        >>> outbox.take_undelivered()
        [(1, [])]
    """

    def __init__(self) -> None:
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

    def awaits(self, number: int) -> bool:
        """Whether the owner has not acknowledged that notice yet."""
        return number in self._unacknowledged


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

    def has_received(self, number: int) -> bool:
        """Whether the notice of that number, and all before it, were received."""
        return number < self._next
