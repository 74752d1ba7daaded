"""Who refers to a value, as its owner knows it. Pure: no I/O, no threads, no clock.

A value lives as long as its owner holds it or a *fork* of its reference exists somewhere. A fork is made by whoever
passes a reference on: the sender tells the owner of the new fork, then sends it. When a fork dies, its holder tells the
owner. Everybody is named by the *life* of a worker, so one that was restarted is another.

[Note: order] A worker's news reach the owner in the order in which they were told, each once, because they are numbered
(``NoticeOutbox``, ``NoticeInbox``). So a fork that was passed on is known before the one it was made of is
gone, and the first of a
value (``born``) before its end: a value never dies too early. News of different workers come in any order: a fork may
be gone before the owner has heard that it was made (``_early``), and used before the value itself was asked for
(``joined``).

[Note: losses] Who owes what when something is lost:

- A channel, and both ends live on. Forks that were sent through it may have arrived or not; the sender does not know.
  It tells the owner (``lost``), which asks the receiver about all forks that the sender made for it (``suspects``). The
  receiver says which it does not hold (``absent``), after what it has said before, and takes none of those any more.
- A life that is over. Its forks are gone. What it made for others may have been lost on the way: suspects again. News
  of it, or to it, are void, and so is what waits for them.
- A worker that cannot be reached. It is given up as if it were gone, but may come back: what it had is remembered until
  it has said of each that it is gone, or is gone itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, Literal, NewType, TypeVar

from backhaul._types import first_number

RRefId = NewType("RRefId", int)
"""Names a value among all of the cluster: 16 bits of the worker that asked for it, 48 of counter."""

ForkId = NewType("ForkId", int)
"""Names one reference to a value, likewise, by the worker that made it."""

Life = tuple[int, str]
"""One life of a worker: its id and its incarnation."""

Update = tuple[Literal["born", "made", "gone", "absent", "lost"], RRefId, ForkId, Life]
"""What happened to a fork of a value, and who holds it. ``born``: it is the first one. ``lost`` is about all forks that
the sender made for that holder, and no value.
"""

_SPAN = 1 << 31  # of numbers that one life gives out

V = TypeVar("V")


def maker_of(number: int) -> int:
    """The worker that gave out an id."""
    return number >> 48


def is_of(number: int, life: Life) -> bool:
    """Whether an id was given out in that life."""
    return maker_of(number) == life[0] and 0 <= (number & (1 << 48) - 1) - first_number(life[1]) < _SPAN


class OwnerEntry(Generic[V]):
    """A value and who refers to it."""

    __slots__ = ("forks", "holds", "id", "joined", "value")

    def __init__(self, number: RRefId, value: V) -> None:
        self.id = number
        self.value = value
        self.holds = 0  # references of the owner's own
        self.forks: dict[ForkId, Life] = {}  # fork -> who holds it
        self.joined: dict[ForkId, Life] = {}  # the same, for those seen before the value was heard of

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
        own: The owner.
        present: Whether who asked for a value is a member of the cluster.

    Attributes:
        suspects: Forks that may have been lost on their way, with their values, by who was to get them. Whoever asks
            takes them out.

    Example:
        >>> owned, alice, bob = Owned(list, (0, "a")), (1, "b"), (2, "c")
        >>> value, first, second = RRefId(1), ForkId(6), ForkId(7)
        >>> owned.hear(alice, [("born", value, first, alice), ("made", value, second, bob)])  # she passed one to bob
        []
        >>> owned.hear(alice, [("gone", value, first, alice)]), owned.hear(bob, [("gone", value, second, bob)])
        ([], [Entry(1)])
    """

    def __init__(
        self, make: Callable[[], V], own: Life, present: Callable[[RRefId], bool] = lambda number: True
    ) -> None:
        self.entries: dict[RRefId, OwnerEntry[V]] = {}
        self.suspects: dict[Life, dict[ForkId, RRefId]] = {}
        self._make = make
        self._own = own
        self._present = present
        self._early: set[ForkId] = set()  # gone before they were made
        self._given_up: dict[Life, set[ForkId]] = {}  # forks of those that cannot be reached, but may come back
        self._born: dict[Life, RRefId] = {}  # the last value that each has said it asked for

    def entry(self, number: RRefId) -> OwnerEntry[V]:
        """The entry of that number, made if there is none."""
        found = self.entries.get(number)
        if found is None:
            found = self.entries[number] = OwnerEntry(number, self._make())
        return found

    def hold(self, number: RRefId) -> OwnerEntry[V]:
        """The owner refers to the value once more."""
        entry = self.entry(number)
        entry.holds += 1
        return entry

    def let_go(self, entry: OwnerEntry[V]) -> list[OwnerEntry[V]]:
        """The owner refers to the value once less. Returns the entry if that was the end of it."""
        entry.holds -= 1
        return self._free([entry])

    def expects(self, number: RRefId) -> bool:
        """Whether the value is still to be asked for, as far as is known."""
        if maker_of(number) == self._own[0] or not self._present(number):
            return False
        return not any(number <= last and is_of(number, life) for life, last in self._born.items())

    def join(self, number: RRefId, fork: ForkId, holder: Life) -> OwnerEntry[V] | None:
        """A fork is being used. If the value is still to be asked for, its place stays until that is certain, one way
        or the other. If it is there, somebody keeps it ([Note: order]); None: it is not there any more.
        """
        if not self.expects(number):
            return self.entries.get(number)
        entry = self.entry(number)
        if fork not in entry.forks and fork not in self._early:
            entry.joined[fork] = holder
        return entry

    def hear(self, sender: Life, news: Iterable[Update]) -> list[OwnerEntry[V]]:
        """Take in news, in order. Returns the entries that this was the end of."""
        touched: dict[RRefId, OwnerEntry[V]] = {}
        for what, number, fork, holder in news:
            if what == "lost":
                self._suspect(sender, holder)
                continue
            entry = self.entries.get(number)
            if what == "born":
                self._born[sender] = max(number, self._born.get(sender, number))
            if what in ("born", "made"):
                entry = self._add(number, fork, holder, first=what == "born")
            elif entry is not None and self._remove(entry, fork):
                pass
            elif not self._settle(fork) and what == "gone":
                self._early.add(fork)
            if entry is not None:
                touched[number] = entry
        return self._free(touched.values())

    def _add(self, number: RRefId, fork: ForkId, holder: Life, *, first: bool) -> OwnerEntry[V] | None:
        if not first and number not in self.entries and not self.expects(number):
            # It was given up with the worker that has passed it on.
            if fork in self._early:
                self._early.discard(fork)
            else:
                self._given_up.setdefault(holder, set()).add(fork)
            return None
        entry = self.entry(number)
        if first:
            entry.joined.clear()
        entry.joined.pop(fork, None)
        if fork in self._early:
            self._early.discard(fork)
        else:
            entry.forks[fork] = holder
        return entry

    @staticmethod
    def _remove(entry: OwnerEntry[V], fork: ForkId) -> bool:
        """Whether the fork was known to be made."""
        entry.joined.pop(fork, None)
        return entry.forks.pop(fork, None) is not None

    def _settle(self, fork: ForkId) -> bool:
        """Whether the fork was one of those given up, of which its holder says now that it is gone."""
        for life, forks in self._given_up.items():
            if fork in forks:
                forks.discard(fork)
                if not forks:
                    del self._given_up[life]
                return True
        return False

    def _suspect(self, maker: Life, holder: Life | None = None) -> None:
        for entry in self.entries.values():
            for fork, known in entry.forks.items():
                if known != maker and known == (holder or known) and is_of(fork, maker):
                    self.suspects.setdefault(known, {})[fork] = entry.id

    def holds_some(self, life: Life) -> bool:
        """Whether somebody refers to values."""
        return any(life in table.values() for entry in self.entries.values() for table in (entry.forks, entry.joined))

    def lose(self, life: Life, *, for_good: bool = True) -> list[OwnerEntry[V]]:
        """A worker is gone, and its references with it; unless ``for_good`` it may come back. Returns the entries that
        this was the end of.
        """
        touched = {}
        for entry in self.entries.values():
            for table in (entry.forks, entry.joined):
                for fork in [fork for fork, holder in table.items() if holder == life]:
                    del table[fork]
                    touched[entry.id] = entry
                    if table is entry.forks and not for_good:
                        self._given_up.setdefault(life, set()).add(fork)
            if entry.joined and is_of(entry.id, life):
                entry.joined.clear()  # nobody is going to ask for the value any more
                touched[entry.id] = entry
        if for_good:
            self._early = {fork for fork in self._early if not is_of(fork, life)}
            self._given_up.pop(life, None)
            self._born.pop(life, None)
            self.suspects.pop(life, None)
        self._suspect(life)
        return self._free(touched.values())

    def _free(self, entries: Iterable[OwnerEntry[V]]) -> list[OwnerEntry[V]]:
        return [entry for entry in entries if entry.idle and self.entries.pop(entry.id, None) is not None]


Notice = tuple[int, list[Update]]
"""News with the number that they were told under."""


class NoticeOutbox:
    """The news for one owner: numbers them, and keeps each until it was heard.

    Example:
        >>> outbox = Outbox()
        >>> letters = [outbox.add([]), outbox.add([])]
        >>> outbox.put_back(letters)  # they did not get there
        >>> outbox.heard(letters[:1])
        >>> outbox.take_back()
        [(1, [])]
    """

    def __init__(self) -> None:
        self._next = 0
        self._unheard: dict[int, list[Update]] = {}
        self._idle: dict[int, None] = {}  # those of them that nobody is trying to deliver

    def add(self, news: list[Update]) -> Notice:
        """Number news; the caller is to deliver them."""
        letter = self._next, news
        self._unheard[self._next] = news
        self._next += 1
        return letter

    def put_back(self, letters: Iterable[Notice]) -> None:
        """They could not be delivered."""
        self._idle.update(dict.fromkeys(number for number, _ in letters if number in self._unheard))

    def take_back(self) -> list[Notice]:
        """Those that could not be delivered, for another try."""
        idle, self._idle = self._idle, {}
        return [(number, self._unheard[number]) for number in idle]

    def heard(self, letters: Iterable[Notice]) -> None:
        """They were delivered."""
        for number, _ in letters:
            self._unheard.pop(number, None)
            self._idle.pop(number, None)

    def waits_for(self, number: int) -> bool:
        """Whether that letter was not heard yet."""
        return number in self._unheard


class NoticeInbox:
    """Puts one worker's numbered news in order, and drops what comes twice.

    Example:
        >>> inbox = Inbox()
        >>> inbox.take(1, ["b"]), inbox.take(0, ["a"]), inbox.take(0, ["a"])
        ([], ['a', 'b'], [])
    """

    def __init__(self) -> None:
        self._next = 0
        self._waiting: dict[int, list[Update]] = {}

    def take(self, number: int, news: list[Update]) -> list[Update]:
        """A message has come: returns what can be heard now."""
        if number >= self._next:
            self._waiting.setdefault(number, news)
        found: list[Update] = []
        while (due := self._waiting.pop(self._next, None)) is not None:
            found += due
            self._next += 1
        return found

    def has_heard(self, number: int) -> bool:
        """Whether the news of that number, and all before, were heard."""
        return number < self._next
