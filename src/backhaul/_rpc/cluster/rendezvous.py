"""How workers find each other: at a c10d store, by the protocol of ``generations``. The store holds addresses, and the
secret where none was given; nothing else goes through it.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import logging
import os
import secrets as random_secrets
import socket
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from torch.distributed import DistError, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from backhaul._options import Options
from backhaul._rpc.cluster.addressing import SECRET_NEEDED, AddressOffer, records_of
from backhaul._rpc.cluster.bounded_calls import call_within
from backhaul._rpc.cluster.environment import find_place
from backhaul._rpc.cluster.generations import (
    AddToKey,
    Answer,
    AwaitKeys,
    GetKeys,
    Operation,
    Participant,
    SetKey,
    Steps,
    SupersededError,
    add_member,
    agree_on_secret,
    count_reader,
    find_members,
    find_secret,
    follow,
    keep_secret,
    lead,
)
from backhaul._rpc.cluster.membership_table import WorkerRecord, choose
from backhaul._runtime import interrupts
from backhaul._types import MAX_WORKERS
from backhaul.errors import RendezvousError

T = TypeVar("T")

log = logging.getLogger("backhaul")

_NOTICE_SECONDS = 5.0  # after which a worker logs which workers it waits for
_POLL_SECONDS, _POLL_SECONDS_PER_KEY = 0.25, 0.001  # between queries of the store after that
_READERS_SECONDS, _READERS_POLL_SECONDS = 2.0, 0.02  # for the others to read why this worker fails
_ANSWER_SECONDS = 1.0  # that the store has to answer at least
_CONNECT_SECONDS = 1.0  # for an attempt to connect to the store
_MIN_RANGE = 4  # consecutive ranks that are written as a range

_read_offer = msgspec.json.Decoder(AddressOffer)


def open_store(
    rank: int | None, world_size: int | None, options: Options, *, alone: bool = False
) -> tuple[Store, int, int]:
    """The store that ``options.init_method`` or the environment names, the worker's rank, and the number of workers.

    ``alone``: the store exists already, and this worker must not serve it, whatever its rank is.
    """
    place = find_place(os.environ, rank, world_size, parent=os.getppid())
    rank, world_size = place.rank, place.size
    if rank is None or world_size is None:
        unknown = " and ".join(what for what, value in (("rank", rank), ("world_size", world_size)) if value is None)
        says = f"; the environment of {place.source} does not say it" if place.source else ""
        raise ValueError(
            f"init does not know the {unknown}{says}: start the script with `backhaul run`, torchrun, mpirun or srun "
            "(an Indexed Job of Kubernetes needs WORLD_SIZE), or pass rank and world_size, or set RANK and WORLD_SIZE; "
            "for workers inside this process use backhaul.cluster()"
        )
    check_rank(rank, world_size)
    method = options.init_method if options.init_method not in (None, "env://") else place.method
    if method is None:
        values = (("MASTER_ADDR", place.address), ("MASTER_PORT", place.port))
        missing = " and ".join(name for name, value in values if value is None)
        raise ValueError(
            f"init does not know where the workers meet: set {missing} to the host of rank 0 and a free port there (as "
            "torchrun does), or pass Options(init_method='tcp://host:port' or 'file:///path'), or a store"
        )
    log.info("rank %d of %d, as %s says; the workers meet at %s", rank, world_size, place.source, method)
    if method.startswith("file://"):
        # Torch would wait until the folder appears, and stop every thread of the process meanwhile.
        folder = Path(urllib.parse.urlparse(method).path).parent
        if not folder.is_dir():
            raise RendezvousError(f"cannot meet at {method}: there is no folder {folder}; create it first")
    return store_at(method, rank, world_size, options.rendezvous_timeout, alone=alone), rank, world_size


def store_at(method: str, rank: int, world_size: int, timeout: float, *, alone: bool = False) -> Store:
    """The store that ``method`` names. Rank 0 serves it if no other process does, and does not wait for the others.
    Raises ``RendezvousError`` if the store cannot be reached within ``timeout`` seconds.
    """
    where, deadline = urllib.parse.urlparse(method), time.monotonic() + timeout
    try:
        if where.scheme not in ("env", "tcp"):
            return _first(rendezvous(method, rank, world_size, timeout=datetime.timedelta(seconds=timeout)))
        host, port = where.hostname, where.port or 0
        if where.scheme == "env":
            host, port = os.environ.get("MASTER_ADDR"), int(os.environ.get("MASTER_PORT", "0"))
        served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
        if alone or served or rank != 0:
            why = "" if alone or served else ": rank 0, which serves it, did not come"
            _await_server(host or "", port, timeout, why)
        limit = datetime.timedelta(seconds=max(deadline - time.monotonic(), 0.001))
        if alone:
            return call_within(
                limit.total_seconds(), lambda: TCPStore(host or "", port, is_master=False, timeout=limit)
            )
        # With the true world_size, torch would let rank 0 wait for all clients, and could not say which are missing.
        query = "&".join(filter(None, (where.query, f"rank={rank}", "world_size=-1")))
        found = rendezvous(where._replace(query=query).geturl(), timeout=limit)
        return call_within(limit.total_seconds(), lambda: _first(found))
    except (DistError, RuntimeError, OSError) as error:
        if isinstance(error, RendezvousError):
            raise
        raise RendezvousError(f"cannot meet at {method}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """What torch says, or what to do about it. Only the name of the system's error is in the text."""
    if "EADDRINUSE" in str(error):
        return "the port is in use on this host; end the program that has it, or set another MASTER_PORT everywhere"
    return str(error)


def _first(found: Iterator[tuple[Store, int, int]]) -> Store:
    return next(found)[0]


@interrupts.waits
def _await_server(host: str, port: int, timeout: float, why: str) -> None:
    """Wait until a process listens there. Torch's store would wait twice as long and print a stack at each attempt."""
    deadline, pause = time.monotonic() + timeout, 0.01
    while True:
        left = deadline - time.monotonic()
        try:
            socket.create_connection((host, port), timeout=max(min(left, _CONNECT_SECONDS), 0.001)).close()
            return
        except OSError as error:
            if time.monotonic() + pause >= deadline:
                where = f"the store at {host}:{port}"
                raise RendezvousError(
                    f"waited {timeout:g} s for {where} (rendezvous_timeout){why}; last error: {error}"
                ) from error
        time.sleep(pause)
        pause = min(2 * pause, _POLL_SECONDS)


def check_rank(rank: int, world_size: int) -> None:
    """Raise ``ValueError`` unless ``0 <= rank < world_size <= 65536``."""
    if not 0 < world_size <= MAX_WORKERS:
        raise ValueError(f"world_size must be 1 to {MAX_WORKERS}, got {world_size}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be 0 to {world_size - 1}, got {rank}")


class StoreRendezvous:
    """One rendezvous of all workers at a store. A second ``init`` on the same store is a rendezvous of its own.

    ``generations`` has the protocol; this carries out its operations.

    Args:
        store: The store.
        rank: This worker's rank.
        world_size: How many workers there are.
        timeout: Seconds for the whole rendezvous.
        began: When the ``timeout`` began; now, if it is None.
    """

    def __init__(self, store: Store, rank: int, world_size: int, timeout: float, *, began: float | None = None) -> None:
        self._store = store
        self._rank = rank
        self._size = world_size
        self._timeout = timeout
        self._deadline = (time.monotonic() if began is None else began) + timeout
        self._noticed = False
        self._token = ""  # that rank 0 had in the rendezvous
        self._generation = 0  # the one that this worker has joined later

    def agree_on_secret(self, given: bytes | None) -> bytes:
        """The given secret, or one that rank 0 makes: then any process that can read the store may take part."""
        if given is not None:
            if self._rank == 0:
                self._run(keep_secret())
            return given
        found = self._run(agree_on_secret(self._rank, self._size, random_secrets.token_hex(32).encode()))
        if not found:
            raise RendezvousError(f"rank 0 has a secret of its user's, and rank {self._rank} has none; {SECRET_NEEDED}")
        return found

    def find_secret(self, given: bytes | None) -> bytes:
        """The given secret, or the one of a cluster that is running."""
        found = given if given is not None else self._run(find_secret())
        if not found:
            raise RendezvousError(f"the members were given a secret, which the store does not have; {SECRET_NEEDED}")
        return found

    def exchange(self, offer: AddressOffer) -> list[AddressOffer]:
        """Meet the workers of all ranks; return their offers by rank. Raises ``RendezvousError``."""
        return [_read_offer.decode(payload) for payload in self.meet(msgspec.json.encode(offer))]

    def meet(self, payload: bytes) -> list[bytes]:
        """As ``exchange``, with any JSON in place of offers."""
        own = Participant(random_secrets.token_hex(16), self._size, msgspec.Raw(payload))
        try:
            arrivals = self._run(lead(own) if self._rank == 0 else follow(self._rank, own))
        except SupersededError:
            raise RendezvousError(
                "another process with rank 0 has come to the same store; start each rank once, or end this process"
            ) from None
        self._token = arrivals[0].token
        if self._rank:
            self._run(count_reader(self._token, 1))
        for rank, arrival in enumerate(arrivals):
            if arrival.size != len(arrivals):
                raise RendezvousError(
                    f"rank 0 was started with world_size={len(arrivals)}, and rank {rank} with "
                    f"world_size={arrival.size}; give all workers the same number"
                )
        return [bytes(arrival.payload) for arrival in arrivals]

    @interrupts.waits
    def wait_for_readers(self) -> None:
        """Rank 0, before it fails on what the others offer: wait a little until they know it too. The store may end
        with this process, and then they could not tell why.
        """
        deadline = time.monotonic() + _READERS_SECONDS
        with contextlib.suppress(RendezvousError):
            while self._rank == 0 and self._token and self._run(count_reader(self._token, 0)) < self._size - 1:
                if time.monotonic() >= deadline:
                    return
                time.sleep(_READERS_POLL_SECONDS)

    def addresses(self, host: str) -> list[str]:
        """The addresses at which the members of the newest cluster at this store can be reached from ``host``. Waits
        until there is a cluster.
        """
        self._generation, payloads = self._run(find_members())
        found = [choose(record, host) for record in records_of([_read_offer.decode(payload) for payload in payloads])]
        if not any(found):
            raise RendezvousError("the store has no member of a running cluster that can be reached from this host")
        return list(dict.fromkeys(address for address in found if address is not None))

    def add_member(self, record: WorkerRecord) -> None:
        """This worker has joined the cluster that ``addresses`` found: put it into the store for later workers."""
        self._run(add_member(self._generation, msgspec.json.encode(AddressOffer(record))))

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self._deadline - time.monotonic()

    def _run(self, steps: Steps[T]) -> T:
        """Carry out a protocol."""
        try:
            operation = next(steps)
            while True:
                operation = steps.send(self._carry_out(operation))
        except StopIteration as end:
            result: T = end.value
            return result
        except (DistError, RuntimeError) as error:
            if isinstance(error, RendezvousError):
                raise
            raise RendezvousError(f"the store does not answer: {error}") from error

    def _carry_out(self, operation: Operation) -> Answer:
        self._store.set_timeout(datetime.timedelta(seconds=max(self.left, _ANSWER_SECONDS)))
        if isinstance(operation, AddToKey):
            key, amount = operation.key, operation.amount
            return self._call(lambda: self._store.add(key, amount))
        if isinstance(operation, SetKey):
            key, value = operation.key, operation.value.decode()
            self._call(lambda: self._store.set(key, value))
            return None
        keys = list(operation.keys)
        if isinstance(operation, AwaitKeys) and not self._wait(keys, operation.signs):
            return None
        if isinstance(operation, GetKeys) and not self._call(lambda: self._store.check(keys)):
            return None
        values: list[bytes] = self._call(lambda: self._store.multi_get(keys))
        return values

    def _call(self, method: Callable[[], T]) -> T:
        return call_within(max(self.left, _ANSWER_SECONDS), method)

    @interrupts.waits
    def _wait(self, keys: list[str], signs: Sequence[str]) -> bool:
        """Wait a while until all keys are there. Raises ``RendezvousError`` at the deadline."""
        if self._noticed:
            # Unlike a wait in the store, this can be interrupted and prints nothing.
            if self._call(lambda: self._store.check(keys)):
                return True
            if self.left <= 0:
                raise self._not_met(self._missing(signs))
            time.sleep(min(_POLL_SECONDS + _POLL_SECONDS_PER_KEY * len(keys), self.left))
            return False
        try:
            # First all keys at once: a TCP store answers that in one message, however many workers there are.
            limit = datetime.timedelta(seconds=max(min(self.left, _NOTICE_SECONDS), 0.001))
            self._call(lambda: self._store.wait(keys, limit))
            return True
        except (DistError, RuntimeError) as error:
            missing = self._missing(signs)
            if self.left <= 0 or missing == _GONE:
                raise self._not_met(missing) from error
            level = logging.INFO if getattr(self._store, "names_missing", False) else logging.WARNING
            log.log(level, "waits for workers: %s; gives up after %g s (rendezvous_timeout)", missing, self._timeout)
            self._noticed = True
            return False

    def _not_met(self, missing: str) -> RendezvousError:
        return RendezvousError(f"waited {self._timeout:g} s for the other workers (rendezvous_timeout): {missing}")

    def _missing(self, signs: Sequence[str]) -> str:
        """Which ranks have not come, for people."""
        if not signs:
            return "no cluster has started at this store"
        try:
            come = self._call(lambda: [not sign or self._store.check([sign]) for sign in signs])
        except (DistError, RuntimeError):
            return _GONE
        ranks = [rank for rank, came in enumerate(come) if not came]
        if not ranks:
            return "all came, but one of them has ended or hangs"
        return f"{len(ranks)} of {len(signs)} did not come: ranks {_listed(ranks)}"


_GONE = "the store is gone, or does not answer"


def _listed(ranks: Sequence[int]) -> str:
    """Ranks for people.

    Example:
        >>> _listed([1, 2, 3]), _listed([0, 4, 5, 6, 7, 9])
        ('1, 2, 3', '0, 4-7, 9')
    """
    found: list[str] = []
    for _, run in itertools.groupby(enumerate(ranks), lambda item: item[1] - item[0]):
        row = [rank for _, rank in run]
        found += [f"{row[0]}-{row[-1]}"] if len(row) >= _MIN_RANGE else map(str, row)
    return ", ".join(found)
