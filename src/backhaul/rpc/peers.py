"""Who belongs to the cluster, and the channel to each. Channels open at the first use."""

from __future__ import annotations

import hashlib
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from backhaul.crew import Task
from backhaul.errors import AuthenticationError, PeerLostError, UnknownWorkerError
from backhaul.runtime import Lock
from backhaul.transport.base import Channel, ChannelClosedError
from backhaul.types import Tls, WorkerId, WorkerInfo
from backhaul.wire.frames import Frame
from backhaul.wire.messages import Hello, Kind, Refuse, pack, prepare, unpack
from backhaul.worker import Worker

log = logging.getLogger("backhaul")


class WorkerRecord(msgspec.Struct, frozen=True):
    """What a worker tells the others about itself when they meet."""

    id: int
    name: str
    incarnation: str
    host: str  # equal: the same host
    addresses: tuple[str, ...]
    main: str  # equal and not empty: the same program
    limit: int  # the largest frame it accepts
    trusting: bool = True  # whether it takes pickles

    @property
    def info(self) -> WorkerInfo:
        """Name and id."""
        return WorkerInfo(self.name, WorkerId(self.id))


prepare(WorkerRecord)


def main_identity() -> str:
    """Names the program this process runs, by its text; empty where there is no file (REPL, notebook)."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else ""
    except OSError:
        return ""


class Peer:
    """One worker as another sees it."""

    __slots__ = (
        "called_at",
        "channel",
        "closely",
        "connecting",
        "incoming",
        "info",
        "main_shared",
        "plain",
        "record",
        "sent_at",
    )

    def __init__(self, record: WorkerRecord, own: WorkerRecord, connecting: Lock) -> None:
        self.record = record
        self.info = record.info
        # A worker shares its main program with itself even where that has no file.
        self.main_shared = record.id == own.id or (record.main == own.main and record.main != "")
        # Whether nothing may be pickled between the two: one that takes no pickles is sent none, and sends none.
        self.plain = record.id != own.id and not (record.trusting and own.trusting)
        self.channel: Channel | None = None  # what this end sends through
        self.incoming: Channel | None = None  # what the other end opened; two that call each other at once have two
        # Of asynchronous calls, for those who may send them together:
        self.called_at = 0.0  # when the last was made
        self.closely = 0  # how many have followed each other closely
        self.sent_at = 0.0  # when one was last sent at once
        self.connecting = connecting  # held while a channel is being opened


LossListener = Callable[[Peer, Channel, str], None]


class Peers:
    """The members of the cluster as one worker knows them. Thread-safe.

    Attributes:
        open: Whether workers may come later: one that is not known yet is admitted when it says who it is. Whoever gets
            as far as that knows the cluster's secret.
        plain: The ids of those with whom nothing may be pickled, see ``Peer.plain``.
    """

    def __init__(self, worker: Worker, own: WorkerRecord, records: Iterable[WorkerRecord]) -> None:
        self._worker = worker
        self._own = own
        self.open = False
        self._lock = threading.Lock()  # guards the tables
        self._listeners: list[LossListener] = []
        self.plain: set[int] = set()
        self._by_id: dict[int, Peer] = {}
        self._by_name: dict[str, Peer] = {}
        self._by_channel: dict[Channel, Peer] = {}
        self._sent_before = 0  # bytes that went over channels that are gone
        for record in records:
            self.admit(record)
        self.own = self._by_id[own.id]
        self.own.channel = worker.loopback
        self._by_channel[worker.loopback] = self.own
        worker.on_frame(Kind.HELLO, self._on_hello)
        worker.on_frame(Kind.REFUSE, self._on_refuse)
        worker.on_lost(self._on_lost)

    def admit(self, record: WorkerRecord) -> Peer | None:
        """Add a worker; None if its name or its id is another's."""
        with self._lock:
            if record.id in self._by_id or record.name in self._by_name:
                return None
            peer = Peer(record, self._own, self._worker.runtime.lock())
            self._by_id[record.id] = self._by_name[record.name] = peer
            if peer.plain:
                self.plain.add(record.id)
            return peer

    def dismiss(self, worker: int) -> None:
        """Forget a worker that has left."""
        with self._lock:
            peer = self._by_id.pop(worker, None)
            if peer is not None:
                self.plain.discard(worker)
                del self._by_name[peer.info.name]

    def __iter__(self) -> Iterator[Peer]:
        with self._lock:
            return iter(sorted(self._by_id.values(), key=lambda peer: peer.record.id))

    def find(self, to: str | int | WorkerInfo) -> Peer:
        """The worker that ``to`` means. Raises ``UnknownWorkerError``."""
        peer = self._by_name.get(to) if type(to) is str else None
        if peer is not None:
            return peer
        if isinstance(to, str):
            peer = self._by_name.get(to)
        elif isinstance(to, WorkerInfo):
            peer = self._by_id.get(to.id)
            peer = peer if peer is not None and peer.info.name == to.name else None
        elif isinstance(to, int) and not isinstance(to, bool):
            peer = self._by_id.get(to)
        else:
            raise TypeError(f"a worker is named by a str, an id or a WorkerInfo, not {type(to).__name__}")
        if peer is None:
            names = ", ".join(sorted(self._by_name))
            who = to.name if isinstance(to, WorkerInfo) else to
            raise UnknownWorkerError(f"no worker {who!r} in this cluster; there are: {names}", worker=str(who))
        return peer

    def of(self, channel: Channel) -> Peer | None:
        """The worker at the other end, or None if it has not said who it is."""
        return self._by_channel.get(channel)

    def channel_to(self, peer: Peer, timeout: float) -> Channel:
        """The channel to ``peer``, opened if need be. Raises ``PeerLostError`` or ``AuthenticationError``."""
        channel = peer.channel
        if channel is not None:
            return channel
        with self._worker.crew.blocking(), peer.connecting:
            if peer.channel is not None:
                return peer.channel
            return self._open(peer, min(timeout, self._worker.options.connect_timeout))

    def _open(self, peer: Peer, timeout: float) -> Channel:
        name, address = peer.info.name, self._choose(peer)
        try:
            channel = self._worker.endpoint.connect(address, timeout=timeout)
            if not self._may_be(channel, name):
                channel.close()
                raise AuthenticationError(f"its certificate is for {_list(channel.names)}, not for '{name}'")
            record = pack(self._own) if self.open else b""
            hello = Hello(self._own.id, self._own.name, self._own.incarnation, name, peer.record.incarnation, record)
            with self._lock:
                self._by_channel[channel] = peer
            channel.send(Frame(Kind.HELLO, 0, pack(hello)))
        except AuthenticationError as error:
            raise AuthenticationError(f"cannot talk to worker '{name}' at {address}: {error}", worker=name) from None
        except (ConnectionError, ChannelClosedError) as error:
            raise PeerLostError(f"cannot reach worker '{name}': {error}", worker=name, reason=str(error)) from error
        peer.channel = channel
        return channel

    def _choose(self, peer: Peer) -> str:
        record = peer.record
        local = record.host == self._own.host
        for address in record.addresses:
            if local or address.startswith("tcp:"):
                return address
        raise PeerLostError(
            f"worker '{record.name}' is on another host but listens only on its own; start it with Options(bind=...)",
            worker=record.name,
            reason="not reachable from this host",
        )

    def _on_hello(self, channel: Channel, frame: Frame) -> Task | None:
        hello = unpack(frame.body, Hello)
        peer = self._by_id.get(hello.worker)
        if peer is None and self.open and hello.record and self._may_be(channel, hello.name):
            peer = self.admit(unpack(hello.record, WorkerRecord))
        problem = None
        if (hello.to, hello.to_incarnation) != (self._own.name, self._own.incarnation):
            problem = f"this is worker '{self._own.name}', not the '{hello.to}' that was meant"
        elif not self._may_be(channel, hello.name):
            problem = f"the certificate of '{hello.name}' is for {_list(channel.names)}"
        elif peer is None or (peer.record.name, peer.record.incarnation) != (hello.name, hello.incarnation):
            problem = f"worker '{self._own.name}' knows no such worker '{hello.name}' (id {hello.worker})"
        if problem is not None:
            log.warning("refused %s at %s: %s", hello.name, channel.peer, problem)
            try:
                channel.send(Frame(Kind.REFUSE, 0, pack(Refuse(problem))), timeout=0)
            except ChannelClosedError:
                pass
            channel.close()
            return None
        assert peer is not None
        with self._lock:
            self._by_channel[channel] = peer
        # It opens another only if it has lost the one before.
        if peer.channel is None or peer.channel is peer.incoming:
            peer.channel = channel
        peer.incoming = channel
        return None

    def _may_be(self, channel: Channel, name: str) -> bool:
        """Whether the certificate at the other end, where there is one, is of the worker of that name."""
        tls = self._worker.options.tls
        bound = tls.names if isinstance(tls, Tls) else tls is not None
        return not bound or channel.names is None or name in channel.names

    def _on_refuse(self, channel: Channel, frame: Frame) -> None:
        log.warning("%s refused this worker: %s", channel.peer, unpack(frame.body, Refuse).reason)
        channel.close()

    def on_lost(self, listener: LossListener) -> None:
        """Call ``listener`` when a channel to a known worker is gone, in the order of registration."""
        self._listeners.append(listener)

    def _on_lost(self, channel: Channel, reason: str) -> None:
        with self._lock:
            peer = self._by_channel.pop(channel, None)
            self._sent_before += channel.bytes_sent
        if peer is None:
            return
        if peer.channel is channel:
            peer.channel = None  # the next use opens another
        if peer.incoming is channel:
            peer.incoming = None
        for listener in self._listeners:
            listener(peer, channel, reason)

    @property
    def bytes_sent(self) -> int:
        """How many bytes went to other workers, over all channels that ever were."""
        with self._lock:
            return self._sent_before + sum(channel.bytes_sent for channel in self._by_channel)

    def close(self) -> None:
        """Close all channels, which wakes whoever reads or writes one."""
        for channel in list(self._by_channel):
            channel.close()


def _list(names: Iterable[str] | None) -> str:
    return ", ".join(f"'{name}'" for name in sorted(names or ())) or "nobody by name"
