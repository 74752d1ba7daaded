"""How a large message reaches many hosts: through a tree of workers, so that it goes over the network once a host.

Pure: the members are known by their numbers in the group.

    caller -> its own host: each member directly
           -> one half of the other hosts  -> the first member of the first host there, which does the same
           -> the other half               -> likewise
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

Hosts: TypeAlias = Sequence[Sequence[int]]
"""The members of each host, by their numbers in the group."""


def by_host(members: Iterable[tuple[int, str]], own: str) -> tuple[list[int], list[list[int]]]:
    """The members of the caller's host, and those of each other host.

    Example:
        >>> by_host([(0, "a"), (1, "b"), (2, "a"), (3, "c"), (4, "b")], "a")
        ([0, 2], [[1, 4], [3]])
    """
    found: dict[str, list[int]] = {}
    for number, host in members:
        found.setdefault(host, []).append(number)
    return found.pop(own, []), list(found.values())


def halves(hosts: Hosts) -> list[Hosts]:
    """At most two parts of the hosts, about equally many in each.

    Example:
        >>> halves([[1, 4], [3], [5]])
        [[[1, 4], [3]], [[5]]]
        >>> halves([[3]])
        [[[3]]]
        >>> halves([])
        []
    """
    middle = (len(hosts) + 1) // 2
    return [part for part in (hosts[:middle], hosts[middle:]) if part]
