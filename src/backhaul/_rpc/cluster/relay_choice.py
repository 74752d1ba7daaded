"""Which members help to reach a worker that cannot be dialed. Pure: no I/O, no threads, no clock.

Such a worker keeps channels to its *anchors*: a few members that can be dialed. All members compute the same order of
members for it, from its incarnation and theirs, so each knows without asking where the worker can be found, and
different workers have different anchors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence

from backhaul._rpc.cluster.membership_table import WorkerRecord, choose

ANCHORS = 2
"""How many anchors a worker keeps: if one is lost, the other is there already."""

MAX_ASKED = 6
"""How many members are asked for one worker. It is at the first ones, unless it cannot reach these."""


def anchors_of(record: WorkerRecord, members: Iterable[WorkerRecord]) -> list[WorkerRecord]:
    """The members at which a worker that cannot be dialed is to be found, the first choice first.

    Example:
        >>> def member(id, listens=True):
        ...     address = (f"tcp:10.0.0.{id}:7000",) if listens else ()
        ...     return WorkerRecord(id, f"w{id}", str(id), f"host{id}", address, "", 0, listens=listens)
        >>> members = [member(1), member(2), member(3, listens=False), member(4)]
        >>> [found.id for found in anchors_of(members[2], members)]
        [1, 4, 2]
    """
    usable = (member for member in members if member.listens and choose(member, record.host) is not None)
    return sorted(usable, key=lambda member: (_weight(record, member), member.id))


def _weight(record: WorkerRecord, member: WorkerRecord) -> bytes:
    return hashlib.sha256(f"{record.incarnation}/{member.incarnation}".encode()).digest()


def asked_for(
    record: WorkerRecord, own: WorkerRecord, members: Sequence[WorkerRecord], doubtful: Callable[[WorkerRecord], bool]
) -> list[WorkerRecord]:
    """The members that ``own`` asks for a worker that cannot be dialed, in this order. Members that are ``doubtful``,
    because ``own`` has lost them itself, come last.
    """
    found = [
        member
        for member in anchors_of(record, members)
        if member.incarnation != own.incarnation and choose(member, own.host) is not None
    ]
    return sorted(found, key=doubtful)[:MAX_ASKED]
