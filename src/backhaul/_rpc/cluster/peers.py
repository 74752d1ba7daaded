"""The table of members, as one worker knows them: lookup by name, id and channel, and who joins, leaves and is lost.

Does not decide who may become a member: ``admission`` does. Does not open channels: ``connections`` does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

from backhaul._devices.seam import PeerLink
from backhaul._rpc.cluster.connections import Connections
from backhaul._rpc.cluster.membership_table import MembershipTable, Refusal, Standing, WorkerRecord
from backhaul._rpc.cluster.reconnecting import SilentPeer
from backhaul._rpc.compression import PeerCompression
from backhaul._runtime.runtime import Lock
from backhaul._transport.base import Channel
from backhaul._types import WorkerInfo
from backhaul._wire.messages import Departure
from backhaul._worker.listeners import Listeners
from backhaul._worker.worker import Worker
from backhaul.errors import UnknownWorkerError

_SMALL_BYTES = 1 << 15  # every worker accepts frames of this size


class ConnectAttempts:
    """The attempts to open a channel to one peer. Only ``Connections`` uses it."""

    __slots__ = ("failures", "lock", "silence")

    def __init__(self, lock: Lock) -> None:
        self.lock = lock  # held by the thread that opens a channel
        self.failures = 0  # attempts that failed; guarded by the lock
        self.silence = SilentPeer()


# Over the limit because a call reads most of these attributes, and an attribute of its own is the cheapest to read.
class Peer:
    """One worker as another sees it. Other rooms only read it.

    Attributes:
        record: What the worker says about itself.
        info: Its name and id.
        main_shared: Whether it runs the same ``__main__`` as this worker.
        plain: Whether nothing may be pickled between the two workers. A worker that does not trust others takes no
            pickles and sends none.
        link: Takes tensors on devices; the null link where there are none.
        unchecked_bytes: The peer accepts every frame of at most this size; -1: each frame must be checked.
        channel: The channel through which this worker sends; None: the next use opens one.
        incoming: The channel that the peer opened. Two workers that call each other at once have two channels.
        channels: All channels that are not known to be lost. A peer that connects again has several.
        suspicion: Why the failure detector suspects the peer; empty if it does not.
        lost: Why the peer cannot be reached; empty once it can be again.
        gone: Why the peer is no member any more, for good.
        attempts: For ``Connections``.
        compression: How what this worker sends to the peer is compressed.
        examined: Whether gradients are compressed, or checked against the peer's limits, before they are sent.
    """

    __slots__ = (
        "attempts",
        "channel",
        "channels",
        "compression",
        "examined",
        "gone",
        "incoming",
        "info",
        "link",
        "lost",
        "main_shared",
        "plain",
        "record",
        "suspicion",
        "unchecked_bytes",
    )

    def __init__(self, record: WorkerRecord, own: WorkerRecord, worker: Worker) -> None:
        self.record = record
        self.info = record.info
        self.main_shared = record.id == own.id or (record.main == own.main and record.main != "")
        self.plain = record.id != own.id and not (record.trusting and own.trusting)
        self.link: PeerLink = worker.devices.link_to(own, record, open=not self.plain)
        self.unchecked_bytes = -1 if self.plain or record.bounds is not None else _SMALL_BYTES
        self.channel: Channel | None = None
        self.incoming: Channel | None = None
        self.channels: tuple[Channel, ...] = ()
        self.suspicion = ""
        self.lost = ""
        self.gone = ""
        self.attempts = ConnectAttempts(worker.runtime.lock())
        self.compression = PeerCompression(worker.options, own, record)
        self.examined = self.plain or bool(self.compression.backward)

    def add_channel(self, channel: Channel) -> None:
        """There is another channel to the peer."""
        if channel not in self.channels:
            self.channels = (*self.channels, channel)

    def use_incoming(self, channel: Channel) -> None:
        """The peer has opened a channel. It opens a second one only after it has lost the first."""
        if self.channel is None or self.channel is self.incoming:
            self.channel = channel
        self.incoming = channel

    def remove_channel(self, channel: Channel) -> None:
        """A channel is lost. The peer may have opened it before the channel that is left, and given it up later."""
        self.channels = tuple(other for other in self.channels if other is not channel)
        other = self.channels[-1] if self.channels else None
        if self.channel is channel:
            self.channel = other
        if self.incoming is channel:
            self.incoming = other


# Over the limit because the rooms above find members, their channels and their events in this one place.
class Peers:
    """The members of the cluster as one worker knows them. Thread-safe.

    Attributes:
        own: This worker itself.
        table: The pure table of records. Guarded by ``changing``.
        changing: Held while members come and go, also by ``Admission``, which decides before it changes.
        connections: The channels to the members.
        plain: The ids of the members with ``Peer.plain``.
        shutting_down: Whether this worker ends or waits for the cluster's shutdown. Members that go are no news for
            the user then.
        ending: Whether this worker ends: all are done, or it does not wait for them. Nobody may join any more. A worker
            that only waits may serve the others for days, and goes on as a member.
        with_id, of, link_of, channel_to, on_lost: Bound functions: the member with an id or None, the link of a
            channel, and those of ``Connections``.
    """

    with_id: Callable[[int], Peer | None]
    of: Callable[[Channel], Peer | None]
    link_of: Callable[[Channel], PeerLink]

    def __init__(self, worker: Worker, own: WorkerRecord, records: Iterable[WorkerRecord]) -> None:
        self._worker = worker
        self.table = MembershipTable(own)
        self.changing = worker.runtime.lock()
        self._lock = threading.Lock()  # guards _by_id, _by_name and plain
        # What happened to a member (``joined``, ``left``, ``lost`` or ``replaced``), the member, and why. Listeners are
        # called before the change has any other effect. They must not block.
        self.on_change: Listeners[[str, Peer, str], None] = Listeners()
        self.on_regained: Listeners[[Peer], None] = Listeners()  # a lost member can be reached again; must not block
        self._by_id: dict[int, Peer] = {}
        self._by_name: dict[str, Peer] = {}
        self.plain: set[int] = set()
        self.shutting_down = self.ending = False
        self.connections = Connections(worker, own, self)
        self.with_id = self._by_id.get
        self.of = self.connections.of
        self.link_of = self.connections.links.__getitem__
        self.channel_to = self.connections.channel_to
        self.on_lost = self.connections.on_lost
        self.own = self._by_id[own.id] = self._by_name[own.name] = Peer(own, own, worker)
        for record in records:
            self.admit(record)
        self.own.channel = worker.loopback
        self.connections.adopt(worker.loopback, self.own)

    # Finding members.

    def __iter__(self) -> Iterator[Peer]:
        """By seniority: by id, and those that do not listen last."""
        with self._lock:
            return iter(sorted(self._by_id.values(), key=lambda peer: peer.record.seniority))

    def find(self, to: str | int | WorkerInfo) -> Peer:
        """The worker that ``to`` names. Raises ``UnknownWorkerError``."""
        peer = self._by_name.get(to) if type(to) is str else self._by_id.get(to) if type(to) is int else None
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
            why = self.table.why_gone(str(who))
            what = f"worker {who!r} {why}" if why else f"no worker {who!r} in this cluster"
            raise UnknownWorkerError(f"{what}; there are: {names}", worker=str(who))
        return peer

    def in_life(self, number: int, incarnation: str) -> Peer | tuple[str, str] | None:
        """The worker with that id, if it has that incarnation. If the incarnation is gone for good: its name, and why.
        None: it is not known yet.
        """
        peer = self._by_id.get(number)
        if peer is not None and peer.record.incarnation == incarnation:
            return peer
        return self.table.gone(incarnation)

    def rivals(self, name: str, number: int) -> list[Peer]:
        """The members that have that name or that id."""
        with self.changing:
            return [self._by_id[record.id] for record in self.table.rivals(name, number)]

    @property
    def records(self) -> tuple[WorkerRecord, ...]:
        """The records of all members."""
        return tuple(peer.record for peer in self)

    @property
    def standing(self) -> Standing:
        """Which workers this worker knows as members, and which it knows to have left."""
        with self.changing:
            return self.table.standing

    @property
    def predecessors(self) -> tuple[Departure, ...]:
        """Workers that have left and had the name or the id of this worker."""
        with self.changing:
            return self.table.predecessors

    @property
    def epoch(self) -> int:
        """The latest epoch that this worker has heard of."""
        return self.table.epoch

    # Members come and go.

    def admit(self, record: WorkerRecord) -> str:
        """Add a worker; returns the reason if it cannot be added. A worker whose place it takes is gone."""
        with self.changing:
            return self.place(record, heard=True)

    def place(self, record: WorkerRecord, *, heard: bool, decided: bool = False) -> str:
        """As ``admit``, for a caller that holds ``changing``. ``heard`` and ``decided``: see ``MembershipTable``."""
        verdict = self.table.admit(record, heard=heard, decided=decided)
        if isinstance(verdict, Refusal):
            return verdict.reason
        if verdict is None:
            return ""
        replaced = [self._by_id[old.id] for old in verdict.instead_of]
        for old in replaced:
            old.gone = (self.table.gone(old.record.incarnation) or ("", "was restarted"))[1]
        # In this order: nothing that belongs to the new worker has begun when the calls to the old one end.
        for old in replaced:
            why = f"worker '{old.info.name}' {old.gone}"
            self.on_change.notify("replaced", old, why)
            for channel in old.channels:
                channel.abort(why)
        peer = Peer(record, self.own.record, self._worker)
        with self._lock:
            # First the new one, so that the name is never missing from the table.
            self._by_id[record.id] = self._by_name[record.name] = peer
            for old in replaced:
                self._remove(old)
            if peer.plain:
                self.plain.add(record.id)
        self.on_change.notify("joined", peer, "")
        return ""

    def dismiss(self, peer: Peer, proof: str = "") -> None:
        """Remove a worker that has left. ``proof`` lets others check that, see ``departure``."""
        with self.changing:
            self._dismiss(peer, proof)

    def take_proofs(self, departures: Iterable[Departure]) -> None:
        """Remove the workers that these proofs show to have left. It does not matter who brings a proof: only the
        worker itself can have made it.
        """
        for left in departures:
            self.take_proof(left.incarnation, left.proof)

    def take_proof(self, incarnation: str, proof: str) -> None:
        """As ``take_proofs``, for one worker."""
        with self.changing:
            record = self.table.proven_gone(incarnation, proof)
            if record is not None:
                self._dismiss(self._by_id[record.id], proof)

    def _dismiss(self, peer: Peer, proof: str) -> None:
        if self.table.dismiss(peer.record, proof=proof):
            with self._lock:
                peer.gone = "has left the cluster"
                self._remove(peer)
            self.on_change.notify("left", peer, f"worker '{peer.info.name}' has left the cluster")

    def _remove(self, peer: Peer) -> None:
        """Take a worker off the tables, except where another has taken its place."""
        self.plain.discard(peer.record.id)
        if self._by_id.get(peer.record.id) is peer:
            del self._by_id[peer.record.id]
        if self._by_name.get(peer.info.name) is peer:
            del self._by_name[peer.info.name]

    def lose(self, peer: Peer, reason: str) -> None:
        """A member cannot be reached."""
        with self.changing:
            if not peer.lost and not peer.gone and peer is not self.own:
                peer.lost = reason
                self.on_change.notify("lost", peer, reason)

    def regain(self, peer: Peer) -> None:
        """A member can be reached. If it was lost, listeners hear that it is back."""
        with self.changing:
            if peer.lost and not peer.gone and peer.channels:
                peer.lost = ""
                self.on_change.notify("joined", peer, "it is there again")
                self.on_regained.notify(peer)
