"""How workers find each other: each puts its record into a c10d store and waits for the records of the others. The
store holds addresses, and the secret where none was given; nothing else goes through it.
"""

from __future__ import annotations

import datetime
import itertools
import logging
import os
import secrets as random_secrets
import socket
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from backhaul._options import Options
from backhaul._rpc.cluster.addressing import Offer, settle
from backhaul._rpc.cluster.membership_table import WorkerRecord, choose
from backhaul._runtime import interrupts
from backhaul._types import MAX_WORKERS
from backhaul.errors import RendezvousError

log = logging.getLogger("backhaul")

_NOTICE_SECONDS = 5.0  # after which a worker logs which workers it waits for
_POLL_SECONDS, _POLL_SECONDS_PER_KEY = 0.25, 0.001  # between queries of the store after that
_CONNECT_SECONDS = 1.0  # for an attempt to connect to the store
_MIN_RANGE = 4  # consecutive ranks that are written as a range

_read_offer = msgspec.json.Decoder(Offer)


def open_store(
    rank: int | None, world_size: int | None, options: Options, *, alone: bool = False
) -> tuple[Store, int, int]:
    """The store that ``options.init_method`` names (default: torchrun's environment), the worker's rank, and the size.

    ``alone``: the store exists already, and this worker must not serve it, whatever its rank is.
    """
    rank = _from_environment("RANK", rank)
    world_size = _from_environment("WORLD_SIZE", world_size)
    method = options.init_method or "env://"
    if rank is None or world_size is None:
        raise ValueError(
            "init needs a rank and a world_size: pass them, or start under torchrun, which sets RANK and WORLD_SIZE; "
            "for workers inside this process use backhaul.cluster()"
        )
    check_rank(rank, world_size)
    if method == "env://":
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ValueError(
                f"init does not know where the workers meet: set {' and '.join(missing)} (torchrun does), or pass "
                "Options(init_method='tcp://host:port' or 'file:///path'), or a store"
            )
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
            return TCPStore(host or "", port, is_master=False, timeout=limit)
        # With the true world_size, torch would let rank 0 wait for all clients, and could not say which are missing.
        query = "&".join(filter(None, (where.query, f"rank={rank}", "world_size=-1")))
        return _first(rendezvous(where._replace(query=query).geturl(), timeout=limit))
    except (DistError, RuntimeError, OSError) as error:
        if isinstance(error, RendezvousError):
            raise
        raise RendezvousError(f"cannot meet at {method}: {error}") from error


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


def _from_environment(name: str, given: int | None) -> int | None:
    if given is not None:
        return given
    value = os.environ.get(name)
    try:
        return int(value) if value is not None else None
    except ValueError:
        raise ValueError(f"the environment's {name} is not a number: {value!r}") from None


class StoreRendezvous:
    """One rendezvous of all workers at a store. A second ``init`` on the same store is a rendezvous of its own.

    Args:
        store: The store.
        rank: This worker's rank.
        world_size: How many workers there are.
        timeout: Seconds to wait for the others.
        running: This worker looks up the members of the last rendezvous, which is over.
        began: When the ``timeout`` began; now, if it is None.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        timeout: float,
        *,
        running: bool = False,
        began: float | None = None,
    ) -> None:
        self._rank = rank
        self._size = world_size
        self._timeout = timeout
        self._began = time.monotonic() if began is None else began
        self._running = running
        try:
            store.set_timeout(datetime.timedelta(seconds=timeout))
            if running:
                times = max(store.add(f"backhaul/times/{other}", 0) for other in range(world_size))
            else:
                times = store.add(f"backhaul/times/{rank}", 1)  # every worker takes part equally often
        except (DistError, RuntimeError) as error:
            raise RendezvousError(f"the store does not answer: {error}") from error
        self._store = PrefixStore(f"backhaul/{times}", store)
        if not running:
            self._store.set(f"here/{rank}", "")

    def addresses(self, host: str) -> list[str]:
        """The addresses at which the members of this rendezvous can be reached from ``host``."""
        keys = [f"worker/{rank}" for rank in range(self._size) if self._store.check([f"worker/{rank}"])]
        offers = [_read_offer.decode(self._store.get(key)) for key in keys]
        found = [choose(record, host) for record in settle(offers)]
        if not any(found):
            raise RendezvousError("the store has no member of a running cluster that can be reached from this host")
        return [address for address in found if address is not None]

    def replace(self, record: WorkerRecord) -> None:
        """Put a new record of this worker into the store, so that later workers find it."""
        self._store.set(f"worker/{self._rank}", msgspec.json.encode(Offer(record, own_secret=True)).decode())

    def agree_on_secret(self, given: bytes | None) -> bytes:
        """The given secret, or one that rank 0 makes: then any process that can read the store may take part."""
        if given is not None:
            return given
        if self._rank == 0 and not self._running:
            self._store.set("secret", random_secrets.token_hex(32))
        return self._get(["secret"], "here")[0]

    def exchange(self, offer: Offer) -> list[Offer]:
        """Put this worker's offer into the store and return all offers by rank. Raises ``RendezvousError``."""
        self._store.set(f"worker/{self._rank}", msgspec.json.encode(offer).decode())
        return [
            _read_offer.decode(text) for text in self._get([f"worker/{rank}" for rank in range(self._size)], "worker")
        ]

    def _get(self, keys: list[str], sign: str) -> list[bytes]:
        return values_of(self._store, keys, sign, self._size, self._timeout, self._began)


@interrupts.waits
def values_of(  # noqa: PLR0917 (each is needed)
    store: Store, keys: list[str], sign: str, size: int, timeout: float, began: float
) -> list[bytes]:
    """Wait for all keys and return their values.

    Args:
        store: The store.
        keys: The keys.
        sign: The keys that show which ranks have come are ``sign/rank``.
        size: How many workers are expected.
        timeout: Seconds to wait.
        began: When the ``timeout`` began.

    Raises:
        RendezvousError: The keys did not come in time. Names the ranks that are missing.
    """
    deadline = began + timeout
    now = time.monotonic()
    try:
        # First all keys at once: a TCP store answers that in one message, however many workers there are.
        store.wait(keys, datetime.timedelta(seconds=max(min(deadline - now, _NOTICE_SECONDS), 0.001)))
        values: list[bytes] = store.multi_get(keys)
        return values
    except (DistError, RuntimeError) as error:
        absent = _absent(store, sign, size)
        if deadline - time.monotonic() > 0 and absent != _GONE:
            log.warning("still waiting for workers: %s; giving up after %g s (rendezvous_timeout)", absent, timeout)
            return _poll_until(store, keys, sign, size, timeout, deadline)
        raise _not_met(timeout, absent) from error


def _poll_until(  # noqa: PLR0917 (those of values_of)
    store: Store, keys: list[str], sign: str, size: int, timeout: float, deadline: float
) -> list[bytes]:
    """Query the store at intervals. Unlike a wait in the store, that can be interrupted and prints nothing."""
    try:
        while not store.check(keys):
            left = deadline - time.monotonic()
            if left <= 0:
                raise _not_met(timeout, _absent(store, sign, size))
            time.sleep(min(_POLL_SECONDS + _POLL_SECONDS_PER_KEY * len(keys), left))
        values: list[bytes] = store.multi_get(keys)
        return values
    except (DistError, RuntimeError) as error:
        if isinstance(error, RendezvousError):
            raise
        raise _not_met(timeout, _GONE) from error


_GONE = "the store is gone"


def _not_met(timeout: float, absent: str) -> RendezvousError:
    return RendezvousError(f"waited {timeout:g} s for the other workers (rendezvous_timeout): {absent}")


def _absent(store: Store, sign: str, size: int) -> str:
    """Which ranks have not come, for people."""
    try:
        missing = [rank for rank in range(size) if not store.check([f"{sign}/{rank}"])]
    except (DistError, RuntimeError):
        return _GONE
    if not missing:
        return "all came, but one of them has ended or hangs"
    return f"{len(missing)} of {size} did not come: ranks {_listed(missing)}"


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
