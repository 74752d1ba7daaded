"""Which worker of ``backhaul run`` runs on which host, and with which environment. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from backhaul._rpc.cluster.environment import (
    ADDRESS_VARIABLE,
    NAME_VARIABLE,
    PORT_VARIABLE,
    RANK_VARIABLE,
    SIZE_VARIABLE,
)
from backhaul._types import check_name

LOCALHOST = "localhost"
"""The name of this host: its workers are started without ssh."""

_HOST = re.compile(r"(?P<host>\[[0-9a-fA-F:%.]+\]|[^\s:,]+)(?::(?P<count>[0-9]+))?")


@dataclass(frozen=True, slots=True)
class HostEntry:
    """A host of ``--hosts``, and how many workers it gets; None: that is not said."""

    host: str
    count: int | None


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """One worker: its name, its rank, its host, and its number on that host."""

    name: str
    rank: int
    host: str
    local_rank: int
    local_size: int


def read_hosts(text: str) -> list[HostEntry]:
    """Hosts, separated by commas or line breaks. ``host:4`` gets 4 workers. ``#`` begins a comment.

    Example:
        >>> read_hosts("node1:4, user@node2")
        [HostEntry(host='node1', count=4), HostEntry(host='user@node2', count=None)]
    """
    found = []
    for line in text.splitlines():
        for part in filter(None, (each.strip() for each in line.partition("#")[0].split(","))):
            match = _HOST.fullmatch(part)
            if match is None or match["count"] == "0":
                raise ValueError(f"{part!r} is not a host; write a name or an address, and perhaps :COUNT")
            found.append(HostEntry(match["host"], None if match["count"] is None else int(match["count"])))
    if not found:
        raise ValueError("there is no host in the list")
    names = [each.host for each in found]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{repeated[0]} is in the list of hosts more than once; write {repeated[0]}:COUNT")
    return found


def place_workers(workers: int | None, names: Sequence[str], hosts: Sequence[HostEntry]) -> list[WorkerPlace]:
    """Place the workers in blocks, by rank: as many on each host as it says, or as evenly as possible.

    Example:
        >>> places = place_workers(3, [], read_hosts("a,b"))
        >>> [(place.name, place.host, place.local_rank) for place in places]
        [('worker0', 'a', 0), ('worker1', 'a', 1), ('worker2', 'b', 0)]
    """
    counted = [each.count for each in hosts]
    said = sum(count for count in counted if count is not None)
    if workers is None:
        workers = len(names) or (said + counted.count(None))
    if workers < 1:
        raise ValueError(f"there must be one worker or more, not {workers}")
    if names and len(names) != workers:
        raise ValueError(f"there are {len(names)} names for {workers} workers; give a name to each, or leave out -n")
    for name in names:
        if names.count(check_name(name)) > 1:
            raise ValueError(f"the name {name!r} is given more than once; each worker needs a name of its own")
    open_hosts, left = counted.count(None), workers - said
    if left < open_hosts or (left > 0 and not open_hosts):
        raise ValueError(
            f"the hosts have places for {said} workers and {open_hosts} others; there are {workers}; "
            "change -n, or the numbers behind the hosts"
        )
    shares = iter([left // open_hosts + (n < left % open_hosts) for n in range(open_hosts)] if open_hosts else [])
    places: list[WorkerPlace] = []
    for entry, count in zip(hosts, counted, strict=True):
        size = next(shares) if count is None else count
        for local in range(size):
            rank = len(places)
            name = names[rank] if names else f"worker{rank}"
            places.append(WorkerPlace(name, rank, entry.host, local, size))
    return places


def environment_of(place: WorkerPlace, size: int, address: str, port: int, *, named: bool) -> dict[str, str]:
    """What ``bh.init()`` reads in the worker. ``named``: whether the user has given names."""
    made = {
        RANK_VARIABLE: str(place.rank),
        SIZE_VARIABLE: str(size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_size),
        ADDRESS_VARIABLE: address,
        PORT_VARIABLE: str(port),
    }
    return {**made, NAME_VARIABLE: place.name} if named else made
