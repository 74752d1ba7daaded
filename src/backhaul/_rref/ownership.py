"""Who refers to a value, as its owner knows it. Pure: no I/O, no threads, no clock.

A value lives as long as its owner holds it or a *fork* of its reference exists on some worker. A worker that passes a
reference on makes a fork: it tells the owner of the new fork, then sends it. When the handle of a fork is deleted, its
holder tells the owner. Workers are named by their *identity* (id and incarnation): a restarted worker is another one.

[Note: loans] A call keeps the references among its arguments until it is over. So two kinds of references in requests
need no notice:

- The value is the receiver's own. The message names the fork of the sender, and the receiver holds the value itself.
- The value is the sender's own. The fork is *lent*: the owner does not hear of it. If the receiver still has it when it
  is about to reply, it announces the fork first. If the call fails, nobody knows what the receiver has: the owner
  counts the fork as announced, and asks the receiver.

[Note: order] Updates of one worker reach the owner in the order in which that worker made them, each once, because
notices are numbered (see ``notices``). So the owner knows of a fork that was passed on before it hears that the fork
it was made from was released, and it knows of the first fork of a value (``created``) before that fork's release: a
value is never dropped too early. Updates of different workers arrive in any order. So a fork may be released before
the owner has heard that it was made (``_released_early``), and a fork may be used before the value itself was asked for
(``early_uses``).

[Note: losses] What happens when something is lost:

- A channel is lost, and both workers live on. Forks that were sent through it may have arrived or not; the sender does
  not know. It tells the owner (``lost``). The owner asks the receiver about all forks that the sender made for it
  (``suspects``). The receiver says which of them it does not hold (``absent``), and from then on refuses those forks.
- An incarnation is over. Its forks are gone. Forks that it made for others may have been lost on the way, so they are
  suspects. Updates from it or to it are void, and nobody waits for them.
- A worker cannot be reached. The owner gives it up as if it were gone, but it may come back. The owner remembers the
  forks that it held until the worker has released each of them, or is gone for good.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, Literal, NewType, TypeVar

from backhaul._types import first_number

RRefId = NewType("RRefId", int)
"""Names one value in the cluster: 16 bits of the worker that asked for it, 48 bits of counter."""

ForkId = NewType("ForkId", int)
"""Names one reference to a value in the cluster: 16 bits of the worker that made it, 48 bits of counter."""

Identity = tuple[int, str]
"""One incarnation of a worker: its id and its incarnation."""

Update = tuple[Literal["created", "forked", "released", "absent", "lost"], RRefId, ForkId, Identity]
"""What happened to a fork of a value, and who holds the fork. ``created``: it is the value's first fork. ``lost`` is
about all forks that the sender made for that holder, and about no single value.
"""

_MAX_IDS = 1 << 31  # ids that one incarnation gives out

V = TypeVar("V")


def maker_of(number: int) -> int:
    """The worker that gave out an id."""
    return number >> 48


def is_of(number: int, identity: Identity) -> bool:
    """Whether that incarnation gave out an id."""
    return maker_of(number) == identity[0] and 0 <= (number & (1 << 48) - 1) - first_number(identity[1]) < _MAX_IDS


class OwnerEntry(Generic[V]):
    """A value and who refers to it.

    Attributes:
        handles: The owner's handles, by their ids. A destructor may remove its handle at any time, without a lock. It
            then looks whether anything else is left. What is removed after that finds that no handle is left.
    """

    __slots__ = ("early_uses", "forks", "handles", "holds", "id", "value")

    def __init__(self, number: RRefId, value: V) -> None:
        self.id = number
        self.value = value
        self.holds = 0  # references of the owner's own that are no handles
        self.handles: dict[int, None] = {}
        self.forks: dict[ForkId, Identity] = {}  # fork -> its holder
        self.early_uses: dict[ForkId, Identity] = {}  # the same, for forks used before the value was asked for

    def __repr__(self) -> str:
        return f"OwnerEntry({self.id})"

    @property
    def unreferenced(self) -> bool:
        """Whether nobody refers to the value."""
        return not (self.handles or self.forks or self.holds or self.early_uses)


class Owned(Generic[V]):
    """All values that one worker owns.

    Args:
        make: Makes the place for a value that is still to come.
        own: The owner.
        present: Whether the worker that asked for a value is a member of the cluster.

    Attributes:
        suspects: Forks that may have been lost on their way, with their values, by the worker that was to receive
            them. The caller that asks that worker takes them out.

    Example:
        >>> owned, alice, bob = Owned(list, (0, "a")), (1, "b"), (2, "c")
        >>> value, first, second = RRefId(1), ForkId(6), ForkId(7)
        >>> owned.apply(alice, [("created", value, first, alice), ("forked", value, second, bob)])
        []
        >>> owned.apply(alice, [("released", value, first, alice)])
        []
        >>> owned.apply(bob, [("released", value, second, bob)])
        [OwnerEntry(1)]
    """

    def __init__(
        self, make: Callable[[], V], own: Identity, present: Callable[[RRefId], bool] = lambda number: True
    ) -> None:
        self.entries: dict[RRefId, OwnerEntry[V]] = {}
        self.suspects: dict[Identity, dict[ForkId, RRefId]] = {}
        self._make = make
        self._own = own
        self._present = present
        self._released_early: set[ForkId] = set()  # released before the owner heard that they were made
        self._given_up: dict[Identity, set[ForkId]] = {}  # forks of workers that cannot be reached, but may come back
        self._last_created: dict[Identity, RRefId] = {}  # the last value that each worker has said it asked for

    def entry(self, number: RRefId) -> OwnerEntry[V]:
        """The entry of a value, made if there is none."""
        found = self.entries.get(number)
        if found is None:
            found = self.entries[number] = OwnerEntry(number, self._make())
        return found

    def hold(self, number: RRefId) -> OwnerEntry[V]:
        """Count one more reference of the owner's own."""
        entry = self.entry(number)
        entry.holds += 1
        return entry

    def release(self, entry: OwnerEntry[V]) -> list[OwnerEntry[V]]:
        """Count one less reference of the owner's own. Returns the entry if nobody refers to the value any more."""
        entry.holds -= 1
        return self._free([entry])

    def drop(self, entry: OwnerEntry[V]) -> list[OwnerEntry[V]]:
        """Handles of the owner were deleted. Returns the entry if nobody refers to the value any more."""
        return self._free([entry])

    def expects(self, number: RRefId) -> bool:
        """Whether the value is still to be asked for, as far as the owner knows."""
        if maker_of(number) == self._own[0] or not self._present(number):
            return False
        return not any(number <= last and is_of(number, identity) for identity, last in self._last_created.items())

    def use(self, number: RRefId, fork: ForkId, holder: Identity) -> OwnerEntry[V] | None:
        """A worker uses a fork. If the value is still to be asked for, its place stays until the owner knows whether it
        will be. If the value is there, another fork keeps it ([Note: order]). None: the value is not there any more.
        """
        found = self.entries.get(number)
        if found is not None and fork in found.forks:
            return found
        if not self.expects(number):
            return found
        entry = self.entry(number)
        if fork not in entry.forks and fork not in self._released_early:
            entry.early_uses[fork] = holder
        return entry

    def apply(self, sender: Identity, updates: Iterable[Update]) -> list[OwnerEntry[V]]:
        """Apply updates in order. Returns the entries that nobody refers to any more."""
        touched: dict[RRefId, OwnerEntry[V]] = {}
        for what, number, fork, holder in updates:
            if what == "lost":
                self._suspect(sender, holder)
                continue
            entry = self.entries.get(number)
            if what == "created":
                self._last_created[sender] = max(number, self._last_created.get(sender, number))
            if what in ("created", "forked"):
                entry = self._add(number, fork, holder, first=what == "created")
            elif entry is not None and self._remove(entry, fork):
                pass
            elif not self._forget_given_up(fork) and what == "released":
                self._released_early.add(fork)
            if entry is not None:
                touched[number] = entry
        return self._free(touched.values())

    def _add(self, number: RRefId, fork: ForkId, holder: Identity, *, first: bool) -> OwnerEntry[V] | None:
        if not first and number not in self.entries and not self.expects(number):
            # The value was dropped when the owner gave up the worker that passed the reference on.
            if fork in self._released_early:
                self._released_early.discard(fork)
            else:
                self._given_up.setdefault(holder, set()).add(fork)
            return None
        entry = self.entry(number)
        if first:
            entry.early_uses.clear()
        entry.early_uses.pop(fork, None)
        if fork in self._released_early:
            self._released_early.discard(fork)
        else:
            entry.forks[fork] = holder
        return entry

    @staticmethod
    def _remove(entry: OwnerEntry[V], fork: ForkId) -> bool:
        """Remove a fork; whether the owner had heard that it was made."""
        entry.early_uses.pop(fork, None)
        return entry.forks.pop(fork, None) is not None

    def _forget_given_up(self, fork: ForkId) -> bool:
        """Whether the fork was given up; its holder says now that it is released."""
        for identity, forks in self._given_up.items():
            if fork in forks:
                forks.discard(fork)
                if not forks:
                    del self._given_up[identity]
                return True
        return False

    def ask_for(self, lent: Iterable[tuple[RRefId, ForkId]], holder: Identity) -> None:
        """A call with lent forks has failed: ask its receiver whether it has them; see [Note: loans]."""
        forks = [(number, fork) for number, fork in lent if number in self.entries]
        self.apply(self._own, [("forked", number, fork, holder) for number, fork in forks])
        for number, fork in forks:
            self.suspects.setdefault(holder, {})[fork] = number

    def _suspect(self, maker: Identity, holder: Identity | None = None) -> None:
        for entry in self.entries.values():
            for fork, known in entry.forks.items():
                if known != maker and known == (holder or known) and is_of(fork, maker):
                    self.suspects.setdefault(known, {})[fork] = entry.id

    def is_holder(self, identity: Identity) -> bool:
        """Whether a worker refers to any value."""
        return any(
            identity in table.values() for entry in self.entries.values() for table in (entry.forks, entry.early_uses)
        )

    def lose(self, identity: Identity, *, for_good: bool = True) -> list[OwnerEntry[V]]:
        """A worker is gone, and its forks with it. Unless ``for_good``, it may come back. Returns the entries that
        nobody refers to any more.
        """
        touched = {}
        for entry in self.entries.values():
            for table in (entry.forks, entry.early_uses):
                for fork in [fork for fork, holder in table.items() if holder == identity]:
                    del table[fork]
                    touched[entry.id] = entry
                    if table is entry.forks and not for_good:
                        self._given_up.setdefault(identity, set()).add(fork)
            if entry.early_uses and is_of(entry.id, identity):
                entry.early_uses.clear()  # nobody will ask for the value any more
                touched[entry.id] = entry
        if for_good:
            self._released_early = {fork for fork in self._released_early if not is_of(fork, identity)}
            self._given_up.pop(identity, None)
            self._last_created.pop(identity, None)
            self.suspects.pop(identity, None)
        self._suspect(identity)
        return self._free(touched.values())

    def _free(self, entries: Iterable[OwnerEntry[V]]) -> list[OwnerEntry[V]]:
        return [
            entry
            for entry in entries
            if entry.unreferenced
            and self.entries.get(entry.id) is entry
            and self.entries.pop(entry.id, None) is not None
        ]
