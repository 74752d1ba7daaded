"""How workers find each other: each puts its record into a c10d store and waits for the others'. The store is used
for addresses (and the secret, where none was given) and for nothing else.
"""

from __future__ import annotations

import datetime
import os
import secrets as random_secrets
import urllib.parse
from pathlib import Path

import msgspec
from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from backhaul import interrupts
from backhaul.errors import RendezvousError
from backhaul.rpc.roster import WorkerRecord, choose
from backhaul.transport.certificates import files_of
from backhaul.transport.tls import Credentials
from backhaul.types import MAX_WORKERS, Options

SECRET_VARIABLE = "BACKHAUL_SECRET"
TLS_VARIABLE = "BACKHAUL_TLS"
"""Names the folder where ``launch`` has put the certificates of its workers."""

_read_record = msgspec.json.Decoder(WorkerRecord)


def open_store(
    rank: int | None, world_size: int | None, options: Options, *, alone: bool = False
) -> tuple[Store, int, int]:
    """The store that ``options.init_method`` names (default: torchrun's environment), our rank and the size.

    ``alone``: the store is there already, and we are not to serve it whatever our rank is.
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
                f"init does not know where to meet: set {' and '.join(missing)} (torchrun does), or give "
                "Options(init_method='tcp://host:port' or 'file:///path'), or a store"
            )
    if method.startswith("file://"):
        # torch would wait for the folder to appear, and stop every thread of the process meanwhile.
        folder = Path(urllib.parse.urlparse(method).path).parent
        if not folder.is_dir():
            raise RendezvousError(f"cannot meet at {method}: there is no folder {folder}")
    timeout = datetime.timedelta(seconds=options.rendezvous_timeout)
    try:
        if alone and not method.startswith("file://"):
            host, port = os.environ.get("MASTER_ADDR"), int(os.environ.get("MASTER_PORT", "0"))
            if method != "env://":
                where = urllib.parse.urlparse(method)
                host, port = where.hostname, where.port or 0
            return TCPStore(host or "", port, is_master=False, timeout=timeout), rank, world_size
        store, _, _ = next(rendezvous(method, rank, world_size, timeout=timeout))
    except (DistError, RuntimeError, OSError) as error:
        raise RendezvousError(f"cannot meet at {method}: {error}") from error
    return store, rank, world_size


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


class Meeting:
    """One meeting of all workers at a store. A second ``init`` on the same store is a meeting of its own.

    ``running``: we come to the last one, which is over.
    """

    def __init__(self, store: Store, rank: int, world_size: int, timeout: float, *, running: bool = False) -> None:
        self._rank = rank
        self._size = world_size
        self._timeout = timeout
        self._running = running
        try:
            store.set_timeout(datetime.timedelta(seconds=timeout))
            if running:
                times = max(store.add(f"backhaul/times/{other}", 0) for other in range(world_size))
            else:
                times = store.add(f"backhaul/times/{rank}", 1)  # every worker comes equally often
        except (DistError, RuntimeError) as error:
            raise RendezvousError(f"the store does not answer: {error}") from error
        self._store = PrefixStore(f"backhaul/{times}", store)

    def addresses(self, host: str) -> list[str]:
        """Where the members of this meeting can be reached from that host."""
        keys = [f"worker/{rank}" for rank in range(self._size) if self._store.check([f"worker/{rank}"])]
        records = [_read_record.decode(self._store.get(key)) for key in keys]
        found = [choose(record, host) for record in records]
        if not any(found):
            raise RendezvousError("the store knows no members of a running cluster that could be reached from here")
        return [address for address in found if address is not None]

    def replace(self, record: WorkerRecord) -> None:
        """Let those who come later find us."""
        self._store.set(f"worker/{self._rank}", msgspec.json.encode(record).decode())

    def agree_on_secret(self, given: bytes | None) -> bytes:
        """The given secret, else one made by rank 0: whoever can read the store may take part."""
        if given is not None:
            return given
        if self._rank == 0 and not self._running:
            self._store.set("secret", random_secrets.token_hex(32))
        return self._get(["secret"], [0])[0]

    def exchange(self, record: WorkerRecord) -> list[WorkerRecord]:
        """Tell the others about us; return everyone's record by rank. Raises ``RendezvousError``."""
        self._store.set(f"worker/{self._rank}", msgspec.json.encode(record).decode())
        everyone = list(range(self._size))
        found = self._get([f"worker/{rank}" for rank in everyone], everyone)
        records = [_read_record.decode(text) for text in found]
        names: dict[str, int] = {}
        for rank, name in enumerate(other.name for other in records):
            if name in names:
                raise RendezvousError(f"two workers are called '{name}': ranks {names[name]} and {rank}", worker=name)
            names[name] = rank
        return records

    @interrupts.waits
    def _get(self, keys: list[str], ranks: list[int]) -> list[bytes]:
        """Wait for all of the keys at once: a TCP store answers that in one go, however many workers there are."""
        try:
            values: list[bytes] = self._store.multi_get(keys)
            return values
        except (DistError, RuntimeError) as error:
            raise RendezvousError(
                f"waited {self._timeout:g} s for the other workers (rendezvous_timeout): {self._missing(ranks)}"
            ) from error

    def _missing(self, ranks: list[int]) -> str:
        try:
            missing = [rank for rank in ranks if not self._store.check([f"worker/{rank}"])]
        except (DistError, RuntimeError):
            return "the store is gone"
        return f"{len(missing)} of {self._size} did not come: ranks {', '.join(map(str, missing))}"


def secret_of(options: Options) -> bytes | None:
    """The secret from the options or the environment, or None."""
    secret = options.secret if options.secret is not None else os.environ.get(SECRET_VARIABLE)
    if secret is None:
        return None
    if not secret:
        raise ValueError("the cluster secret is empty")
    return secret.encode() if isinstance(secret, str) else secret


def credentials_of(options: Options, rank: int) -> Credentials | None:
    """What this worker proves itself with over TCP; None: it has nothing, and TCP is plain."""
    if options.tls != "auto":
        return None if options.tls is None else Credentials(options.tls)
    folder = os.environ.get(TLS_VARIABLE)
    if folder is None:
        raise ValueError(
            "tls='auto' is for workers that backhaul.launch starts, which makes their certificates; others need "
            "Options(tls=Tls(certificate=..., key=..., authority=...))"
        )
    return Credentials(files_of(Path(folder), rank))
