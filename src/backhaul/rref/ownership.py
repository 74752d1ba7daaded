"""Who refers to a value, as its owner knows it. Pure: no I/O, no threads, no clock.

A value lives as long as its owner holds it or a *fork* of its reference exists somewhere. A fork is made by whoever
passes a reference on: the sender tells the owner of the new fork, then sends it. When a fork dies, its holder tells the
owner.

[Note: order] A worker's news reach the owner in the order in which they were told, because each is numbered
(``Inbox``). So a fork that was passed on is known before the one it was made of is gone, and a value never dies too
early. News of different workers come in any order: a fork may be gone before the owner has heard that it was made
(``_early``), it may be used before that (``joined``), and all of this may happen before the value itself is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, Literal, NewType, TypeVar

RRefId = NewType("RRefId", int)
"""Names a value among all of the cluster: 16 bits of the worker that asked for it, 48 of counter."""

ForkId = NewType("ForkId", int)
"""Names one reference to a value, likewise, by the worker that made it."""

News = tuple[Literal["made", "gone"], RRefId, ForkId, int]
"""What happened to a fork of a value, and the worker that holds it."""

V = TypeVar("V")


class Entry(Generic[V]):
    """A value and who refers to it."""

    __slots__ = ("forks", "holds", "id", "joined", "value")

    def __init__(self, number: RRefId, value: V) -> None:
        self.id = number
        self.value = value
        self.holds = 0  # references of the owner's own
        self.forks: dict[ForkId, int] = {}  # fork -> the worker that holds it
        self.joined: dict[ForkId, int] = {}  # the same, for those seen before they were heard of

    def __repr__(self) -> str:
        return f"Entry({self.id})"

    @property
    def idle(self) -> bool:
        """Whether nobody refers to the value."""
        return not (self.holds or self.forks or self.joined)


class Owned(Generic[V]):
    """All values that one worker owns.

    Args:
        make: Makes the place for a value that is still to come.

    Example:
        >>> owned = Owned(list)
        >>> owned.hear([("made", RRefId(1), ForkId(7), 2)])  # somebody passed a reference to worker 2
        []
        >>> owned.hear([("gone", RRefId(1), ForkId(7), 2)])
        [Entry(1)]
    """

    def __init__(self, make: Callable[[], V]) -> None:
        self.entries: dict[RRefId, Entry[V]] = {}
        self._make = make
        self._early: set[ForkId] = set()  # gone before they were made

    def entry(self, number: RRefId) -> Entry[V]:
        """The entry of that number, made if there is none."""
        found = self.entries.get(number)
        if found is None:
            found = self.entries[number] = Entry(number, self._make())
        return found

    def hold(self, number: RRefId) -> Entry[V]:
        """The owner refers to the value once more."""
        entry = self.entry(number)
        entry.holds += 1
        return entry

    def let_go(self, entry: Entry[V]) -> list[Entry[V]]:
        """The owner refers to the value once less. Returns the entry if that was the end of it."""
        entry.holds -= 1
        return self._free([entry])

    def join(self, number: RRefId, fork: ForkId, holder: int) -> Entry[V]:
        """A fork is being used, so it exists: the value has to stay until it is gone."""
        entry = self.entry(number)
        if fork not in entry.forks and fork not in self._early:
            entry.joined[fork] = holder
        return entry

    def hear(self, news: Iterable[News]) -> list[Entry[V]]:
        """Take in news, in order. Returns the entries that this was the end of."""
        touched: dict[RRefId, Entry[V]] = {}
        for what, number, fork, holder in news:
            entry = self.entries.get(number)
            if what == "made":
                if fork in self._early:
                    self._early.discard(fork)
                else:
                    entry = self.entry(number)
                    entry.joined.pop(fork, None)
                    entry.forks[fork] = holder
            elif entry is None or entry.forks.pop(fork, None) is None:
                self._early.add(fork)
                if entry is not None:
                    entry.joined.pop(fork, None)
            if entry is not None:
                touched[number] = entry
        return self._free(touched.values())

    def lose(self, worker: int) -> list[Entry[V]]:
        """A worker is gone, and its references with it. Returns the entries that this was the end of."""
        self._early = {fork for fork in self._early if maker_of(fork) != worker}
        touched = []
        for entry in self.entries.values():
            for table in (entry.forks, entry.joined):
                for fork in [fork for fork, holder in table.items() if holder == worker]:
                    del table[fork]
                    touched.append(entry)
        return self._free(touched)

    def _free(self, entries: Iterable[Entry[V]]) -> list[Entry[V]]:
        return [entry for entry in entries if entry.idle and self.entries.pop(entry.id, None) is not None]


def maker_of(number: int) -> int:
    """The worker that gave out an id."""
    return number >> 48


class Inbox:
    """Puts one worker's numbered news in order, and drops what comes twice.

    Example:
        >>> inbox = Inbox()
        >>> inbox.take(1, ["b"]), inbox.take(0, ["a"]), inbox.take(0, ["a"])
        ([], ['a', 'b'], [])
    """

    def __init__(self) -> None:
        self._next = 0
        self._waiting: dict[int, list[News]] = {}

    def take(self, number: int, news: list[News]) -> list[News]:
        """A message has come: returns what can be heard now."""
        if number >= self._next:
            self._waiting.setdefault(number, news)
        found: list[News] = []
        while (due := self._waiting.pop(self._next, None)) is not None:
            found += due
            self._next += 1
        return found
