"""Who belongs to the cluster, and the channel to each. Channels open at the first use."""

from __future__ import annotations

import collections
import contextlib
import hashlib
import logging
import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from backhaul._devices.links import DeviceLink, link_to
from backhaul._rpc.cluster import membership_table
from backhaul._rpc.cluster.membership_table import MembershipTable, Standing, WorkerRecord, choose
from backhaul._runtime import interrupts
from backhaul._runtime.runtime import Lock
from backhaul._transport.base import Channel, ChannelClosedError
from backhaul._types import Tls, WorkerInfo
from backhaul._wire.frames import Frame
from backhaul._wire.messages import Departure, Hello, Kind, Refuse, pack, unpack
from backhaul._worker.frame_receiver import before_hello
from backhaul._worker.listeners import Listeners
from backhaul._worker.thread_pool import Task
from backhaul._worker.worker import Worker
from backhaul.errors import AuthenticationError, PeerLostError, UnknownWorkerError

log = logging.getLogger("backhaul")

_APPROACH = 3.0  # seconds that a worker has to say hello if one that is not believed has told of it
_MOMENT = 0.1  # seconds after which it is looked whether a worker has said hello
_MAX_EXPECTED = 64  # newcomers that have not shown themselves
_PROCESS = secrets.token_hex(8)  # and the id of the process, which a fork changes


def main_identity() -> str:
    """Names the program this process runs: by its text, or where there is no file (REPL, notebook) by the process. The
    workers of one process always share their ``__main__``.
    """
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        if path:
            return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        pass
    return f"{_PROCESS}-{os.getpid()}"


class Peer:
    """One worker as another sees it."""

    __slots__ = (
        "called_at",
        "channel",
        "channels",
        "closely",
        "connecting",
        "failures",
        "gone",
        "incoming",
        "info",
        "link",
        "lost",
        "main_shared",
        "overruled",
        "plain",
        "record",
        "sent_at",
        "suspicion",
    )

    def __init__(self, record: WorkerRecord, own: WorkerRecord, connecting: Lock) -> None:
        self.record = record
        self.info = record.info
        self.main_shared = record.id == own.id or (record.main == own.main and record.main != "")
        # Whether nothing may be pickled between the two: one that takes no pickles is sent none, and sends none.
        self.plain = record.id != own.id and not (record.trusting and own.trusting)
        self.link: DeviceLink | None = None  # for tensors of devices, where there are any
        self.channel: Channel | None = None  # what this end sends through
        self.incoming: Channel | None = None  # what the other end opened; two that call each other at once have two
        self.channels: tuple[Channel, ...] = ()  # all that are not known to be lost; one that connects again has more
        self.suspicion = ""  # why it may be dead, if it is suspected
        self.lost = ""  # why it is thought dead, until it is heard of again
        self.gone = ""  # why it is no member any more, for good
        self.overruled = ""  # the incarnation that the leader has in its place
        # Of asynchronous calls, for those who may send them together:
        self.called_at = 0.0  # when the last was made
        self.closely = 0  # how many have followed each other closely
        self.sent_at = 0.0  # when one was last sent at once
        self.connecting = connecting  # held while a channel is being opened
        self.failures = 0  # attempts that failed; changed while that is held


Inquiry = Callable[[WorkerRecord], Task | None]


class Peers:
    """The members of the cluster as one worker knows them. Thread-safe.

    One that is not known yet is admitted when it says who it is, see ``membership_table``: whoever gets as
    far as that knows the
    cluster's secret. But it takes the place of another only if the leader has told of it, see ``expect``, or if there
    is no doubt that it may, see ``_may_follow``.

    Attributes:
        plain: The ids of those with whom nothing may be pickled, see ``Peer.plain``.
        linked: Those with a link, by id.
    """

    def __init__(self, worker: Worker, own: WorkerRecord, records: Iterable[WorkerRecord]) -> None:
        self._worker = worker
        self._own = own
        self._roster = MembershipTable(own)
        self._changing = worker.runtime.lock()  # held while members come and go, and guards the roster
        self._lock = threading.Lock()  # guards the tables
        self.on_lost: Listeners[[Peer, Channel, str], None] = Listeners()  # of a channel to a known worker, and why
        # What has happened to a worker: ``joined``, ``left``, ``lost`` or ``replaced``; the worker; and why. Listeners
        # are called before the change has any other effect. They must not block.
        self.on_change: Listeners[[str, Peer, str], None] = Listeners()
        self.on_channel: Listeners[[Channel], None] = Listeners()  # a new channel to a worker; must not block
        self.plain: set[int] = set()
        self.linked: dict[int, Peer] = {}
        self._by_id: dict[int, Peer] = {}
        self._by_name: dict[str, Peer] = {}
        self._by_channel: dict[Channel, Peer] = {}
        self._refusals: dict[Channel, str] = {}  # why channels that are about to be lost are
        # Incarnation -> record, until when, and the incarnation of the leader that has said so.
        self._expected: collections.OrderedDict[str, tuple[WorkerRecord, float, str]] = collections.OrderedDict()
        self.inquire: Inquiry = lambda record: None  # what to do about one that was not believed; it may come again
        self.regained: Callable[[Peer], None] = lambda peer: None  # hears of one that was lost; it must not block
        self._sent_before = 0  # bytes that went over channels that are gone
        self.own = self._by_id[own.id] = self._by_name[own.name] = Peer(own, own, worker.runtime.lock())
        self._link(self.own)
        for record in records:
            self.admit(record)
        self.own.channel = worker.loopback
        if self.own.link is not None:
            self.linked[own.id] = self.own
        self._belongs(worker.loopback, self.own)
        worker.on_frame(Kind.HELLO, self._on_hello, check=before_hello)
        worker.on_frame(Kind.REFUSE, self._on_refuse, check=before_hello)
        worker.receiver.on_lost(self._on_lost)

    def admit(self, record: WorkerRecord) -> str:
        """Add a worker; returns why not, if it cannot be. One whose place it takes is gone."""
        with self._changing:
            return self._admit(record, heard=True)

    def _admit(self, record: WorkerRecord, *, heard: bool, decided: bool = False) -> str:
        verdict = self._roster.admit(record, heard=heard, decided=decided)
        if isinstance(verdict, membership_table.Refusal):
            return verdict.reason
        if verdict is None:
            return ""
        expected, _, leader = self._expected.pop(record.incarnation, (None, 0.0, ""))
        if expected == record:
            self._roster.vouch(record.incarnation, leader)
        replaced = [self._by_id[old.id] for old in verdict.instead_of]
        for old in replaced:
            old.gone = (self._roster.fate_in(old.record.incarnation) or ("", "was restarted"))[1]
        # In this order: nothing that belongs to the new one has begun when what waited for the old one ends.
        for old in replaced:
            self.on_change.notify("replaced", old, f"worker '{old.info.name}' {old.gone}")
            self.close_channels(old)
        peer = Peer(record, self._own, self._worker.runtime.lock())
        self._link(peer)
        with self._lock:
            # So that there is somebody of that name throughout, be it one that cannot be reached any more.
            self._by_id[record.id] = self._by_name[record.name] = peer
            for old in replaced:
                self._strike(old)
            if peer.plain:
                self.plain.add(record.id)
            if peer.link is not None:
                self.linked[record.id] = peer
        self.on_change.notify("joined", peer, "")
        return ""

    def _admit_by_hello(self, channel: Channel, record: WorkerRecord) -> str:
        """Add a worker that says itself who it is."""
        with self._changing:
            if self._roster.fate_in(record.incarnation) is not None:
                return self._admit(record, heard=False)  # which says what has become of it
            expected, until, leader = self._expected.get(record.incarnation, (None, 0.0, ""))
            rivals = [self._by_id[rival.id] for rival in self._roster.rivals(record.name, record.id)]
            rivals = [rival for rival in rivals if rival.record.incarnation != record.incarnation]
            # What the leader has said of others that were lost does not hold for ever.
            heard = expected == record and (self._worker.runtime.now() < until or all(rival.lost for rival in rivals))
            for rival in rivals:
                stays = heard and not self.credulous and not self._makes_way(rival, record, leader)
                if stays or (not heard and not self._may_follow(channel, record, rival)):
                    return f"there is a worker '{rival.info.name}' (id {rival.info.id}) already"
            decided = heard and all(rival.overruled == record.incarnation for rival in rivals)
            return self._admit(record, heard=heard, decided=decided)

    def learn(self, record: WorkerRecord) -> Peer | None:
        """Add a worker of which a member has told that is believed; not in place of one that is not lost."""
        with self._changing:
            rivals = self._roster.rivals(record.name, record.id)
            if not all(self._by_id[rival.id].lost for rival in rivals) or self._admit(record, heard=True):
                return None
            return self._by_id[record.id]

    def _makes_way(self, rival: Peer, record: WorkerRecord, leader: str) -> bool:
        """Whether a member is replaced by another of which a leader has told."""
        decided = rival.overruled == record.incarnation  # that was looked into
        return decided or bool(rival.lost) or self._roster.yields(rival.record, leader)

    def _may_follow(self, channel: Channel, record: WorkerRecord, rival: Peer) -> bool:
        """Whether a worker may take the place of another on its own word."""
        same = record.name == rival.info.name
        if same and self._bound and channel.names is not None:
            return True  # its certificate says that it is that one
        return bool(rival.lost) and (same or self.credulous)

    @property
    def _bound(self) -> bool:
        """Whether a certificate is for the worker of its name alone."""
        tls = self._worker.options.tls
        return tls.names if isinstance(tls, Tls) else tls is not None

    @property
    def credulous(self) -> bool:
        """Whether any member's word is as good as the leader's: each could do here what it likes anyway."""
        return self._worker.options.trusted and not self._bound

    def expect(self, record: WorkerRecord, *, by: WorkerRecord, seconds: float = 0.0) -> str:
        """The leader ``by`` has enrolled a worker, which will show itself in that time, or in ``patience`` if that is
        longer. Returns what is wrong with that, if anything.
        """
        with self._changing:
            flaw = self._roster.flaw_in(record)
            if not flaw:
                self._expect(record, by, seconds)
            return flaw

    def _expect(self, record: WorkerRecord, by: WorkerRecord, seconds: float = 0.0) -> None:
        until = self._worker.runtime.now() + max(seconds, self.patience)
        self._expected[record.incarnation] = record, until, by.incarnation
        while len(self._expected) > _MAX_EXPECTED:
            self._expected.popitem(last=False)

    @property
    def expected(self) -> tuple[WorkerRecord, ...]:
        """Those who have been enrolled of late and have not shown themselves yet."""
        with self._changing:
            now = self._worker.runtime.now()
            return tuple(record for record, until, _ in self._expected.values() if now < until)

    def _link(self, peer: Peer) -> None:
        peer.link = link_to(self._own, peer.record, self._worker.device_context, open=not peer.plain)

    def dismiss(self, peer: Peer, proof: str = "") -> None:
        """Forget a worker that has left; ``proof``: what others can check that by."""
        with self._changing:
            self._dismiss(peer, proof)

    def _dismiss(self, peer: Peer, proof: str) -> None:
        if self._roster.dismiss(peer.record, proof=proof):
            with self._lock:
                peer.gone = "has left the cluster"
                self._strike(peer)
            self.on_change.notify("left", peer, f"worker '{peer.info.name}' has left the cluster")

    def take_proof(self, incarnation: str, proof: str) -> None:
        """Somebody says that a worker has left. It does not matter who: only that worker can have made the proof."""
        with self._changing:
            record = self._roster.departed(incarnation, proof)
            if record is not None:
                self._dismiss(self._by_id[record.id], proof)

    def take_proofs(self, departures: Iterable[Departure]) -> None:
        """The same of several."""
        for left in departures:
            self.take_proof(left.incarnation, left.proof)

    def enter(self, leader: WorkerRecord | None, departures: Iterable[Departure]) -> None:
        """This worker has been let in by ``leader``, which has told it who the members are, and who has left."""
        self.take_proofs(departures)
        with self._changing:
            self._roster.keep(departures)
            for record in self.records:
                if leader is not None and record.epoch:  # else it was there from the start
                    self._roster.vouch(record.incarnation, leader.incarnation)

    def yields(self, rival: Peer, leader: Peer) -> bool:
        """Whether a member makes way for another on the word of a leader."""
        with self._changing:
            return bool(rival.lost) or self._roster.yields(rival.record, leader.record.incarnation)

    def _strike(self, peer: Peer) -> None:
        """Take a worker that is gone off the tables, where no other stands in its place."""
        self.plain.discard(peer.record.id)
        if self.linked.get(peer.record.id) is peer:
            del self.linked[peer.record.id]
        if self._by_id.get(peer.record.id) is peer:
            del self._by_id[peer.record.id]
        if self._by_name.get(peer.info.name) is peer:
            del self._by_name[peer.info.name]

    def close_channels(self, peer: Peer) -> None:
        """Close what there is to a worker that is gone, which fails what waits for it."""
        for channel, owner in self.channels():
            if owner is peer:
                channel.abort(f"worker '{peer.info.name}' {peer.gone}")

    def lose(self, peer: Peer, reason: str) -> None:
        """A worker cannot be reached."""
        with self._changing:
            if not peer.lost and not peer.gone and peer is not self.own:
                peer.lost = reason
                self.on_change.notify("lost", peer, reason)

    def _regain(self, peer: Peer) -> None:
        with self._changing:
            if peer.lost and not peer.gone and peer.channels:
                peer.lost = ""
                self.on_change.notify("joined", peer, "it is there again")
                self.regained(peer)

    def rivals(self, name: str, number: int) -> list[Peer]:
        """The members that have that name or that id."""
        with self._changing:
            return [self._by_id[record.id] for record in self._roster.rivals(name, number)]

    def enrolment_of(self, incarnation: str) -> WorkerRecord | None:
        """The record of a worker that is a member, or has been enrolled."""
        with self._changing:
            alive = self._roster.alive(incarnation)
            record, _, _ = self._expected.get(incarnation, (None, 0.0, ""))
            if alive is not None or record is None:
                return alive
            rivals = self._roster.rivals(record.name, record.id)
            return record if all(map(record.follows, rivals)) else None  # else another has come after it

    def enrol(self, record: WorkerRecord) -> WorkerRecord | str:
        """The record of a newcomer with its id and epoch, which is expected from now on; or why there is none."""
        with self._changing:
            # Also of those who take longer than they should: they may yet come.
            taken = {other.id for other, _, _ in self._expected.values() if other.name != record.name}
            place = self._roster.enrol(record.name, record.id, taken)
            if place is None:
                return "all ids are taken" if record.id < 0 else f"{record.id} is not the id of a worker"
            enrolled = msgspec.structs.replace(record, id=place[0], epoch=place[1])
            flaw = self._roster.flaw_in(enrolled)
            if not flaw:
                self._expect(enrolled, self._own)
            return flaw or enrolled

    @property
    def standing(self) -> Standing:
        """Whom this worker knows."""
        with self._changing:
            return self._roster.standing

    @property
    def epoch(self) -> int:
        """When the last one joined that this worker has heard of."""
        return self._roster.epoch

    @property
    def records(self) -> tuple[WorkerRecord, ...]:
        """Of all members."""
        return tuple(peer.record for peer in self)

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
            fate = self._roster.fate_of(str(who))
            what = f"worker {who!r} {fate}" if fate else f"no worker {who!r} in this cluster"
            raise UnknownWorkerError(f"{what}; there are: {names}", worker=str(who))
        return peer

    def in_life(self, number: int, incarnation: str) -> Peer | tuple[str, str] | None:
        """The worker of that id, if it is of that incarnation. Else the name of the one that was, and why it is gone
        for good; or None: it is not known yet.
        """
        peer = self._by_id.get(number)
        if peer is not None and peer.record.incarnation == incarnation:
            return peer
        return self._roster.fate_in(incarnation)

    def of(self, channel: Channel) -> Peer | None:
        """The worker at the other end, or None if it has not said who it is."""
        return self._by_channel.get(channel)

    def channel_to(self, peer: Peer, timeout: float) -> Channel:
        """The channel to ``peer``, opened if need be. Raises ``PeerLostError`` or ``AuthenticationError``."""
        channel = peer.channel
        if channel is not None:
            return channel
        with self._worker.thread_pool.blocking():
            return self._connect(peer, min(timeout, self.patience))

    def _connect(self, peer: Peer, timeout: float) -> Channel:
        """Whoever finds another at it waits for that: if it fails, both have."""
        now, failures = self._worker.runtime.now, peer.failures
        deadline = now() + timeout
        if not interrupts.acquire(peer.connecting, timeout):
            raise self._unreachable(peer, f"no answer within {timeout:g} s")
        try:
            if peer.channel is not None:
                return peer.channel
            if peer.failures > failures:
                raise self._unreachable(peer, peer.lost or peer.gone or "another attempt failed")
            try:
                return self._open(peer, max(deadline - now(), 0.001))
            except PeerLostError:
                peer.failures += 1
                raise
        finally:
            peer.connecting.release()

    @property
    def patience(self) -> float:
        """How long a worker that does not answer is thought to be there."""
        options = self._worker.options
        watched = options.lost_after if options.heartbeat_interval and options.lost_after else options.connect_timeout
        return min(options.connect_timeout, watched)

    @staticmethod
    def _unreachable(peer: Peer, why: str) -> PeerLostError:
        name = peer.info.name
        return PeerLostError(f"cannot reach worker '{name}': {why}", worker=name, reason=why)

    def _open(self, peer: Peer, timeout: float) -> Channel:
        name, address = peer.info.name, self._choose(peer)
        if peer.gone:
            raise PeerLostError(f"lost worker '{name}': it {peer.gone}", worker=name, reason=peer.gone)
        try:
            channel = self._worker.endpoint.connect(address, timeout=timeout)
            if not self.may_be(channel, name):
                channel.close()
                raise AuthenticationError(f"its certificate is for {_list(channel.names)}, not for '{name}'")
            self._belongs(channel, peer)
            channel.send(self._hello_to(peer.record))
        except AuthenticationError as error:
            raise AuthenticationError(f"cannot talk to worker '{name}' at {address}: {error}", worker=name) from None
        except (ConnectionError, ChannelClosedError) as error:
            self.lose(peer, str(error))
            raise self._unreachable(peer, str(error)) from error
        with self._lock:
            kept = channel in self._by_channel
            if kept:
                peer.channel = channel
        # Else its loss, a refusal say, has been told already, and will not be again: the next use opens another.
        if kept:
            self._regain(peer)
            self.on_channel.notify(channel)
        return channel

    def _hello_to(self, record: WorkerRecord, *, answer: bool = False) -> Frame:
        with self._changing:
            predecessors = self._roster.predecessors
        return Frame(Kind.HELLO, 0, pack(Hello(record.name, record.incarnation, pack(self._own), predecessors, answer)))

    def approach(self, record: WorkerRecord) -> None:
        """Somebody who is not believed has told of a worker that is not known here. Say hello to it, and let it do the
        same: it is admitted then, or not, as any that shows itself. May take some seconds.
        """
        address = choose(record, self._own.host)
        if address is None or self._roster.flaw_in(record):
            return
        now, timeout = self._worker.runtime.now, min(self.patience, _APPROACH)
        deadline = now() + timeout
        try:
            channel = self._worker.endpoint.connect(address, timeout=timeout)
        except (ConnectionError, AuthenticationError, ValueError) as error:
            log.debug("worker '%.130s' is not met: %s", record.name, error)
            return
        with contextlib.suppress(ChannelClosedError):
            if self.may_be(channel, record.name):
                channel.send(self._hello_to(record, answer=True))
                while self.of(channel) is None and not self._worker.closed and now() < deadline:
                    self._worker.runtime.one_shot().wait(_MOMENT)
        if self.of(channel) is None:
            channel.close()

    def _belongs(self, channel: Channel, peer: Peer) -> None:
        with self._lock:
            self._by_channel[channel] = peer
            if channel not in peer.channels:
                peer.channels = (*peer.channels, channel)
        if peer.link is not None:
            peer.link.opened(channel)
            if channel not in self._by_channel:  # lost meanwhile, which nobody tells again
                peer.link.lost(channel)

    def _choose(self, peer: Peer) -> str:
        record = peer.record
        address = choose(record, self._own.host)
        if address is not None:
            return address
        raise PeerLostError(
            f"worker '{record.name}' is on another host but listens only on its own; start it with Options(bind=...)",
            worker=record.name,
            reason="not reachable from this host",
        )

    def _on_hello(self, channel: Channel, frame: Frame) -> Task | None:
        inquiry = None
        hello = unpack(frame.body, Hello)
        record = unpack(hello.record, WorkerRecord)
        if (hello.to, hello.to_incarnation) != (self._own.name, self._own.incarnation):
            problem = f"this is worker '{self._own.name}', not the '{hello.to}' that was meant"
        elif not self.may_be(channel, record.name):
            problem = self.not_for(channel, record.name)
        elif (known := self.of(channel)) is not None and known.record.incarnation != record.incarnation:
            problem = f"this channel is that of worker '{known.info.name}'"
        else:
            self.take_proofs(hello.left)
            problem = self._admit_by_hello(channel, record)
            inquiry = self.inquire(record) if problem and not self._roster.fate_in(record.incarnation) else None
        peer = self._by_id.get(record.id)
        if not problem and (peer is None or peer.record.incarnation != record.incarnation):
            problem = f"worker '{record.name}' is gone"  # just now
        if problem or peer is None:
            self.refuse(channel, record.name, problem)
            return inquiry
        self._belongs(channel, peer)
        # It opens another only if it has lost the one before.
        if peer.channel is None or peer.channel is peer.incoming:
            peer.channel = channel
        peer.incoming = channel
        self._regain(peer)
        self.on_channel.notify(channel)
        if hello.answer:
            with contextlib.suppress(ChannelClosedError):
                channel.send(self._hello_to(record), timeout=0)
        return None

    def may_be(self, channel: Channel, name: str) -> bool:
        """Whether the certificate at the other end, where there is one, is of the worker of that name."""
        return not self._bound or channel.names is None or name in channel.names

    @staticmethod
    def not_for(channel: Channel, name: str) -> str:
        """What is wrong with the certificate of a worker that it is not for."""
        return f"the certificate of '{name}' is for {_list(channel.names)}"

    @staticmethod
    def refuse(channel: Channel, name: str, problem: str) -> None:
        """Tell a worker that it is not listened to, and why."""
        log.warning("refused %.130r at %s: %s", name, channel.peer, problem)
        try:
            channel.send(Frame(Kind.REFUSE, 0, pack(Refuse(problem))), timeout=0)
        except ChannelClosedError:
            pass
        channel.close()

    def _on_refuse(self, channel: Channel, frame: Frame) -> None:
        reason = unpack(frame.body, Refuse).reason
        log.warning("%s refused this worker: %s", channel.peer, reason)
        with self._lock:
            if channel in self._by_channel:
                self._refusals[channel] = f"refused: {reason}"
        channel.abort(f"refused: {reason}")  # which the other end may have done before

    def channels(self) -> list[tuple[Channel, Peer]]:
        """All channels to other workers that are known to be theirs."""
        with self._lock:
            return [(channel, peer) for channel, peer in self._by_channel.items() if peer is not self.own]

    def _on_lost(self, channel: Channel, reason: str) -> None:
        with self._lock:
            peer = self._by_channel.pop(channel, None)
            reason = self._refusals.pop(channel, reason)
            if peer is not None:
                peer.channels = tuple(other for other in peer.channels if other is not channel)
            self._sent_before += channel.bytes_sent
        if peer is None:
            return
        # One that was opened and given up may have shown itself after the one that followed it.
        other = peer.channels[-1] if peer.channels else None
        if peer.channel is channel:
            peer.channel = other  # if there is none, the next use opens another
        if peer.incoming is channel:
            peer.incoming = other
        if not peer.channels:
            peer.suspicion = ""
            self.lose(peer, reason)
        if peer.gone:
            reason = f"worker '{peer.info.name}' {peer.gone}"
        self.on_lost.notify(peer, channel, reason)
        if peer.link is not None:
            peer.link.lost(channel)

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
