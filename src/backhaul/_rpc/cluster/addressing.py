"""Decides from what all workers offer at the rendezvous where they can be reached, and who cannot. Pure: no I/O, no
threads, no clock.

Before the rendezvous no worker knows whether the others are on its host. So each offers a *spare* TCP address beside
its record. If the workers turn out to be on several hosts, the spare addresses are used; otherwise they are closed.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from backhaul._rpc.cluster.membership_table import WorkerRecord
from backhaul._transport.sockets.addresses import parse
from backhaul._transport.sockets.certificates import HOW_TO_MAKE_A_SECRET
from backhaul._transport.sockets.interfaces import is_loopback_address
from backhaul.errors import RendezvousError

SECRET_NEEDED = (
    "the cluster needs a secret: set BACKHAUL_SECRET to the same value on every host; make one with: "
    f"{HOW_TO_MAKE_A_SECRET}"
)


class AddressOffer(msgspec.Struct, frozen=True):
    """What a worker brings to the rendezvous.

    Attributes:
        record: The worker, with the addresses that it has in any case.
        spare: The TCP address that it uses if there are several hosts; empty: it has none.
        obstacle: Why it has no spare address; only of workers that need one.
        own_secret: Whether its user has set the secret.
    """

    record: WorkerRecord
    spare: str = ""
    obstacle: str = ""
    own_secret: bool = False


def on_several_hosts(offers: Sequence[AddressOffer]) -> bool:
    """Whether the workers are on more than one host."""
    return len({offer.record.host for offer in offers}) > 1


def settle(offers: Sequence[AddressOffer]) -> list[WorkerRecord]:
    """The records of all workers by rank, with the addresses that they use. All workers come to the same result.

    Raises:
        RendezvousError: Two workers have one name, or a worker cannot be reached from another host.
    """
    _check_names(offers)
    _check_relays(offers)
    if not on_several_hosts(offers):
        return [offer.record for offer in offers]
    for rank, offer in enumerate(offers):
        if not offer.own_secret:
            raise RendezvousError(
                f"the workers are on several hosts, and '{offer.record.name}' (rank {rank}) has no secret of yours; "
                f"{SECRET_NEEDED}",
                worker=offer.record.name,
            )
        if offer.record.listens and not _reachable(offer):
            raise RendezvousError(
                f"the workers are on several hosts, and those on other hosts cannot reach '{offer.record.name}' (rank "
                f"{rank}): {offer.obstacle or _listens_on(offer.record)}",
                worker=offer.record.name,
            )
    return [_with_spare(offer) for offer in offers]


def _reachable(offer: AddressOffer) -> bool:
    """Whether workers on other hosts can connect to a worker."""
    return bool(offer.spare) or any(map(other_host, offer.record.addresses))


def _check_relays(offers: Sequence[AddressOffer]) -> None:
    """Raise ``RendezvousError`` if a worker does not listen, and nobody does who could pass messages on to it."""
    several = on_several_hosts(offers)
    silent = [offer for offer in offers if not offer.record.listens and (several or not offer.record.addresses)]
    if not silent or len(offers) < 2:
        return
    if not any(offer.record.listens and (_reachable(offer) or not several) for offer in offers):
        name = silent[0].record.name
        raise RendezvousError(
            f"worker '{name}' has Options(listen=False), and there is no worker to which it could connect: start at "
            "least one, better two, without listen=False on a host that all others can reach",
            worker=name,
        )


def records_of(offers: Sequence[AddressOffer]) -> list[WorkerRecord]:
    """The records of the members of a running cluster, with the addresses that they use: those of its rendezvous, and
    those that have joined it later.
    """
    first = [offer for offer in offers if offer.record.epoch == 0]
    several = on_several_hosts(first)
    return [_with_spare(offer) if several else offer.record for offer in offers]


def _check_names(offers: Sequence[AddressOffer]) -> None:
    names: dict[str, int] = {}
    for rank, name in enumerate(offer.record.name for offer in offers):
        if name in names:
            raise RendezvousError(f"two workers are called '{name}': ranks {names[name]} and {rank}", worker=name)
        names[name] = rank


def _listens_on(record: WorkerRecord) -> str:
    return (
        f"it listens on {' and '.join(record.addresses)} only; leave bind and transport out of its Options, or bind to "
        "an address of its network"
    )


def _with_spare(offer: AddressOffer) -> WorkerRecord:
    if not offer.spare:
        return offer.record
    kept = (address for address in offer.record.addresses if not address.startswith("tcp:"))
    return msgspec.structs.replace(offer.record, addresses=(*kept, offer.spare))


def other_host(address: str) -> str | None:
    """The host of an address that reaches a worker from other hosts; None if the address is valid on one host only.

    >>> other_host("tcp:10.0.0.5:7000"), other_host("tcp:127.0.0.1:7000"), other_host("unix:@a")
    ('10.0.0.5', None, None)
    """
    _, where = parse(address)
    if isinstance(where, str) or where[0] == "localhost" or is_loopback_address(where[0]):
        return None
    return where[0]


def neighbor_of(own: WorkerRecord, records: Sequence[WorkerRecord]) -> WorkerRecord | None:
    """The worker on another host that this worker connects to when it starts, to see whether that works; None: all
    workers are on one host.

    The hosts form a ring, in the order of their first ranks. Each worker tries one worker of the next host. If all
    hosts have equally many workers, every worker is tried once. Workers that do not listen are not tried.

    Example:
        >>> def record(id, host):
        ...     return WorkerRecord(id, f"worker{id}", str(id), host, (), "", 0)
        >>> records = [record(0, "a"), record(1, "a"), record(2, "b"), record(3, "b")]
        >>> [neighbor_of(each, records).id for each in records]
        [2, 3, 0, 1]
    """
    by_host: dict[str, list[WorkerRecord]] = {}
    for record in records:
        if not record.listens and record.host != own.host:
            continue
        by_host.setdefault(record.host, []).append(record)
    if len(by_host) < 2:
        return None
    hosts = list(by_host)
    place = [record.id for record in by_host[own.host]].index(own.id)
    following = by_host[hosts[(hosts.index(own.host) + 1) % len(hosts)]]
    return following[place % len(following)]
