"""The protocol of a rendezvous: what each rank puts into the store, and what it waits for there. Pure: no I/O, no
threads, no clock. ``rendezvous`` carries out the operations.

1. Rank 0 opens a *generation*: it takes the next number, and closes the generation before if that has no table.
2. Every other rank posts its *arrival*, with a fresh token, in the newest generation.
3. Once rank 0 finds an arrival of every rank, it publishes all of them as one value, the *table* of the generation.
4. A process takes part if the table holds its token. Otherwise it waits for the next generation.

So nothing depends on how often a rank has come. A process that was restarted posts a new arrival in the place of the
old one. A rank 0 that was restarted opens a new generation, and all that waited in the old one post again.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeVar

import msgspec

T = TypeVar("T")

_GENERATION = "backhaul/generation"  # the number of the newest generation; 0: there is none yet
_SECRET = "backhaul/secret"
_CLOSED = b"closed"  # in place of a table: the generation never gets one


class Participant(msgspec.Struct, frozen=True):
    """What one process says about itself in one rendezvous.

    Attributes:
        token: Made anew by every process for every rendezvous.
        size: How many ranks the process expects.
        payload: JSON of the layer above.
    """

    token: str
    size: int
    payload: msgspec.Raw


_read_arrival = msgspec.json.Decoder(Participant)
_read_table = msgspec.json.Decoder(list[Participant])


@dataclass(frozen=True, slots=True)
class AddToKey:
    """Add to the number that a key holds. The answer is the sum."""

    key: str
    amount: int


@dataclass(frozen=True, slots=True)
class SetKey:
    """Set the value of a key."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class GetKeys:
    """Read keys. The answer is their values, or None if one of them is missing."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AwaitKeys:
    """Wait for keys. The answer is their values, or None after a while if one of them is still missing.

    Attributes:
        keys: The keys.
        signs: By rank, the key that shows that the rank has come; empty: it has come.
    """

    keys: tuple[str, ...]
    signs: tuple[str, ...]


Operation = AddToKey | SetKey | GetKeys | AwaitKeys
Answer = int | list[bytes] | None
Steps = Generator[Operation, Answer, T]  # yields operations, is sent their answers, and returns the result


class SupersededError(Exception):
    """Another process with rank 0 has opened a newer generation."""


def lead(own: Participant) -> Steps[list[Participant]]:
    """Rank 0: open a generation, and return its table. Raises ``SupersededError``."""
    generation = yield from _add(_GENERATION, 1)
    before = generation - 1
    if before > 0 and (yield from _add(_decided(before), 1)) == 1:
        yield SetKey(_table(before), _CLOSED)
    yield SetKey(_over(before), b"")  # wakes the ranks that wait for this generation
    signs = _arrivals(generation, own.size)
    while (found := (yield from _await(signs[1:], signs))) is None:
        if (yield from _newest()) != generation:
            raise SupersededError
    if (yield from _add(_decided(generation), 1)) != 1:
        raise SupersededError
    arrivals = [own, *map(_read_arrival.decode, found)]
    yield SetKey(_table(generation), msgspec.json.encode(arrivals))
    return arrivals


def follow(rank: int, own: Participant) -> Steps[list[Participant]]:
    """Another rank: post an arrival in each new generation, and return the first table that holds it."""
    generation = yield from _newest()
    while True:
        if generation > 0:
            yield SetKey(_arrival(generation, rank), msgspec.json.encode(own))
            value = yield from _await_in(generation, _table(generation), _arrivals(generation, own.size))
            arrivals = [] if value in (None, _CLOSED) else _read_table.decode(value or b"")
            if rank < len(arrivals) and arrivals[rank].token == own.token:
                return arrivals
        signs = yield from _announce(rank, own.size)
        yield from _await_in(generation, _over(generation), signs)
        generation = yield from _newest()


def agree_on_secret(rank: int, size: int, fresh: bytes) -> Steps[bytes]:
    """The secret of all clusters at this store: ``fresh`` of the first rank 0. A rank 0 that is restarted keeps it.
    Empty: rank 0 keeps its secret to itself.
    """
    found = yield from find_secret()
    if not found and rank == 0:
        yield SetKey(_SECRET, fresh)
        return fresh
    if found is None:
        signs = yield from _announce(rank, size)
        while (values := (yield from _await((_SECRET,), signs))) is None:
            pass
        found = values[0]
    return found


def count_reader(token: str, amount: int) -> Steps[int]:
    """Count the ranks that have read the table of the rank 0 with that token. ``amount``: 1 for one more, or 0."""
    return _add(f"backhaul/readers/{token}", amount)


def keep_secret() -> Steps[None]:
    """Rank 0 was given a secret: tell the ranks that were not."""
    yield SetKey(_SECRET, b"")


def find_secret() -> Steps[bytes | None]:
    """The secret, if rank 0 has put one into the store. Empty: rank 0 keeps its secret to itself."""
    values = yield from _get((_SECRET,))
    return values[0] if values else None


def find_members() -> Steps[tuple[int, list[bytes]]]:
    """For a process that joins later: the newest generation with a table, and the payloads of its members, without
    those that have joined since by an address alone.
    """
    while True:
        newest = yield from _newest()
        for generation in range(newest, 0, -1):
            found = yield from _get((_table(generation),))
            if found is not None and found[0] != _CLOSED:
                members = [bytes(arrival.payload) for arrival in _read_table.decode(found[0])]
                for number in range((yield from _add(_joined(generation), 0)), 0, -1):
                    members += (yield from _get((f"{_joined(generation)}/{number}",))) or []
                return generation, members
        yield from _await_in(newest, _table(newest) if newest > 0 else _over(0), ())


def add_member(generation: int, payload: bytes) -> Steps[None]:
    """A process has joined the cluster of a generation: later joiners find it."""
    number = yield from _add(_joined(generation), 1)
    yield SetKey(f"{_joined(generation)}/{number}", payload)


def _announce(rank: int, size: int) -> Steps[tuple[str, ...]]:
    """Say that this rank waits for the next generation. Returns the keys by which all ranks say so."""
    newest = yield from _newest()
    signs = tuple(f"backhaul/{newest}/after/{other}" for other in range(size))
    yield SetKey(signs[rank], b"")
    return signs


def _await_in(generation: int, key: str, signs: tuple[str, ...]) -> Steps[bytes | None]:
    """The value of a key; None: it is missing, and there is a newer generation.

    Rank 0 may die between opening a generation and waking those that wait for it, so waiting for the key is not enough.
    """
    while (found := (yield from _await((key,), signs))) is None:
        if (yield from _newest()) != generation:
            return None
    return found[0]


def _newest() -> Steps[int]:
    return _add(_GENERATION, 0)


def _add(key: str, amount: int) -> Steps[int]:
    answer = yield AddToKey(key, amount)
    assert isinstance(answer, int)
    return answer


def _get(keys: tuple[str, ...]) -> Steps[list[bytes] | None]:
    answer = yield GetKeys(keys)
    assert not isinstance(answer, int)
    return answer


def _await(keys: tuple[str, ...], signs: tuple[str, ...]) -> Steps[list[bytes] | None]:
    if not keys:
        return []
    answer = yield AwaitKeys(keys, signs)
    assert not isinstance(answer, int)
    return answer


# The keys of a generation.


def _arrivals(generation: int, size: int) -> tuple[str, ...]:
    """By rank; rank 0 shows that it has come by opening the generation."""
    return ("", *(_arrival(generation, rank) for rank in range(1, size)))


def _arrival(generation: int, rank: int) -> str:
    return f"backhaul/{generation}/arrival/{rank}"


def _decided(generation: int) -> str:
    """Counts who has decided whether the generation gets a table. The first decides."""
    return f"backhaul/{generation}/decided"


def _table(generation: int) -> str:
    return f"backhaul/{generation}/table"


def _over(generation: int) -> str:
    """There is a newer generation."""
    return f"backhaul/{generation}/over"


def _joined(generation: int) -> str:
    return f"backhaul/{generation}/joined"
