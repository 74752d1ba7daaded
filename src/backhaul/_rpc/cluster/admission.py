"""Decides who becomes a member here: workers that say hello, and joiners that a leader has enrolled.

A worker that says hello knows the cluster's secret, or it would not get that far. If its name and id are free it is
admitted. It takes the place of another member only if a leader has announced it (``expect``), or if there is no doubt
that it may (``_may_replace``).
"""

from __future__ import annotations

import collections
import contextlib
import logging
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from backhaul._rpc.cluster.membership_table import WorkerRecord, choose
from backhaul._rpc.cluster.peers import Peer, Peers
from backhaul._transport.base import Channel, ChannelClosedError
from backhaul._wire.frames import Frame
from backhaul._wire.messages import Departure, Hello, Kind, unpack
from backhaul._worker.frame_receiver import before_hello
from backhaul._worker.thread_pool import Task
from backhaul._worker.worker import Worker
from backhaul.errors import AuthenticationError

log = logging.getLogger("backhaul")

_APPROACH_SECONDS = 3.0  # for a worker to say hello after this worker has approached it
_POLL_SECONDS = 0.1  # between checks whether that worker has said hello
_MAX_EXPECTED = 1 << 12  # joiners that were announced and have not said hello
_MAX_EXPECTED_UNTRUSTED = 64  # the same where members do not trust each other

Investigation = Callable[[WorkerRecord], Task | None]


class _Expected(NamedTuple):
    """A joiner that a leader has announced."""

    record: WorkerRecord
    until: float  # after that, it may only take the place of members that are lost
    leader: str  # the incarnation of the leader


class Admission:
    """One worker's decisions about who becomes a member. Thread-safe: ``Peers.changing`` guards it.

    Attributes:
        investigate: Called with the record of a worker that was refused because another member is in its place.
            Returns a task that finds out whether it may take that place; the worker tries again later.
    """

    def __init__(self, worker: Worker, peers: Peers) -> None:
        self._worker = worker
        self._peers = peers
        self._table = peers.table
        self._connections = peers.connections
        self._certificates = peers.connections.certificates
        self._expected: collections.OrderedDict[str, _Expected] = collections.OrderedDict()  # by incarnation
        self.investigate: Investigation = lambda record: None
        worker.on_frame(Kind.HELLO, self._on_hello, check=before_hello)

    @property
    def trusts_any_member(self) -> bool:
        """Whether the word of any member counts as much as the leader's: where members are trusted and certificates do
        not name them, any member could do here whatever it likes anyway.
        """
        return self._worker.options.security.trusted and not self._certificates.bound

    # Workers that say hello.

    def _on_hello(self, channel: Channel, frame: Frame) -> Task | None:
        investigation = None
        hello = unpack(frame.body, Hello)
        record, own = unpack(hello.record, WorkerRecord), self._peers.own.record
        if (hello.to, hello.to_incarnation) != (own.name, own.incarnation):
            problem = f"this is worker '{own.name}', not the '{hello.to}' that was meant"
        elif not self._certificates.allow(channel, record.name):
            problem = self._certificates.mismatch(channel, record.name)
        elif not self._certificates.holds_key(channel, self._table.member(record.incarnation) or record):
            problem = f"the certificate is not that of worker '{record.name}'"
        elif (known := self._peers.of(channel)) is not None and known.record.incarnation != record.incarnation:
            problem = f"this channel is that of worker '{known.info.name}'"
        else:
            self._peers.take_proofs(hello.left)
            problem = self._admit_by_hello(channel, record)
            if problem and not self._table.gone(record.incarnation):
                investigation = self.investigate(record)
        peer = self._peers.with_id(record.id)
        if not problem and (peer is None or peer.record.incarnation != record.incarnation):
            problem = f"worker '{record.name}' is gone"  # since a moment ago
        if problem or peer is None:
            self._connections.refuse(channel, record.name, problem)
            return investigation
        if hello.answer:
            # First: once the channel is adopted, another thread may send a heartbeat, which must not come before this.
            with contextlib.suppress(ChannelClosedError):
                channel.send(self._connections.hello_to(record), timeout=0)
        self._connections.adopt_incoming(channel, peer)
        return None

    def _admit_by_hello(self, channel: Channel, record: WorkerRecord) -> str:
        """Admit a worker that has said hello; returns the reason if it is refused."""
        with self._peers.changing:
            if self._table.gone(record.incarnation) is not None:
                return self._admit(record, heard=False)  # which gives the reason
            expected = self._expected.get(record.incarnation)
            rivals = [rival for rival in self._rivals(record) if rival.record.incarnation != record.incarnation]
            # Once its time is over, an announcement holds only against members that are lost.
            heard = (
                expected is not None
                and expected.record == record
                and (self._worker.runtime.now() < expected.until or all(rival.lost for rival in rivals))
            )
            for rival in rivals:
                if heard and expected is not None:
                    accepted = self.trusts_any_member or self._gives_way(rival, record, expected.leader)
                else:
                    accepted = self._may_replace(channel, record, rival)
                if not accepted:
                    return f"there is a worker '{rival.info.name}' (id {rival.info.id}) already"
            overruled = (self._table.overruled(rival.record, record) for rival in rivals)
            return self._admit(record, heard=heard, decided=heard and all(overruled))

    def _admit(self, record: WorkerRecord, *, heard: bool, decided: bool = False) -> str:
        """Admit a worker while ``changing`` is held. If a leader announced it, that leader vouches for it."""
        known = self._table.member(record.incarnation) is not None
        problem = self._peers.place(record, heard=heard, decided=decided)
        if not problem and not known:
            expected = self._expected.pop(record.incarnation, None)
            if expected is not None and expected.record == record:
                self._table.vouch(record.incarnation, expected.leader)
        return problem

    def _rivals(self, record: WorkerRecord) -> list[Peer]:
        found = (self._peers.with_id(rival.id) for rival in self._table.rivals(record.name, record.id))
        return [rival for rival in found if rival is not None]

    def _gives_way(self, rival: Peer, record: WorkerRecord, leader: str) -> bool:
        """Whether a member is replaced by a joiner that a leader has announced."""
        overruled = self._table.overruled(rival.record, record)
        return overruled or bool(rival.lost) or self._table.yields(rival.record, leader)

    def _may_replace(self, channel: Channel, record: WorkerRecord, rival: Peer) -> bool:
        """Whether a worker may take the place of a member without an announcement."""
        same = record.name == rival.info.name
        if same and self._certificates.bound and channel.names is not None:
            return True  # its certificate says that it is that worker
        if not rival.record.listens and not self.trusts_any_member:
            return False  # a relay can make that worker seem lost, and then come under its name: ask the leader
        return bool(rival.lost) and (same or self.trusts_any_member)

    # Workers that others tell of.

    def learn(self, record: WorkerRecord) -> Peer | None:
        """Add a worker that a trusted member has told of, unless it would replace a member that is not lost."""
        with self._peers.changing:
            rivals = [rival for rival in self._rivals(record) if rival.record.incarnation != record.incarnation]
            if not all(rival.lost for rival in rivals) or self._admit(record, heard=True):
                return None
            return self._peers.with_id(record.id)

    def approach(self, record: WorkerRecord) -> None:
        """Say hello to a worker that a member without authority has told of, and ask it to say hello in turn. It is
        then admitted or refused as any worker that says hello. May take some seconds.
        """
        address = choose(record, self._peers.own.record.host)
        if address is None or self._table.flaw_in(record):
            return
        now, timeout = self._worker.runtime.now, min(self._connections.answer_seconds, _APPROACH_SECONDS)
        deadline = now() + timeout
        try:
            channel = self._worker.endpoint.connect(address, timeout=timeout)
        except (ConnectionError, AuthenticationError, ValueError) as error:
            log.debug("cannot approach worker '%.130s': %s", record.name, error)
            return
        with contextlib.suppress(ChannelClosedError):
            if self._certificates.allow(channel, record.name):
                channel.send(self._connections.hello_to(record, answer=True))
                while self._peers.of(channel) is None and not self._worker.closed and now() < deadline:
                    self._worker.runtime.one_shot().wait(_POLL_SECONDS)
        if self._peers.of(channel) is None:
            channel.close()

    def enter(self, leader: WorkerRecord | None, departures: Iterable[Departure]) -> None:
        """This worker was enrolled by ``leader``, which told it who the members are, and who has left."""
        departures = tuple(departures)
        self._peers.take_proofs(departures)
        with self._peers.changing:
            self._table.remember(departures)
            for record in self._peers.records:
                if leader is not None and record.epoch:  # epoch 0: a member from the start
                    self._table.vouch(record.incarnation, leader.incarnation)

    # Joiners.

    def enroll(self, record: WorkerRecord) -> WorkerRecord | str:
        """Give a joiner its id and epoch, and expect it from now on. Returns its record, or the reason for none."""
        with self._peers.changing:
            # Also the ids of joiners whose time is over: they may still come.
            taken = {other.record.id for other in self._expected.values() if other.record.name != record.name}
            place = self._table.enroll(record.name, record.id, taken)
            if place is None:
                return "all ids are taken" if record.id < 0 else f"{record.id} is not the id of a worker"
            enrolled = msgspec.structs.replace(record, id=place[0], epoch=place[1])
            flaw = self._table.flaw_in(enrolled)
            if not flaw:
                self._expect(enrolled, self._peers.own.record)
            return flaw or enrolled

    def expect(self, record: WorkerRecord, *, by: WorkerRecord, seconds: float = 0.0) -> str:
        """The leader ``by`` has enrolled a joiner. It has ``seconds`` to say hello, and at least ``answer_seconds``.
        Returns the reason if there can be no such worker.
        """
        with self._peers.changing:
            flaw = self._table.flaw_in(record)
            if not flaw:
                self._expect(record, by, seconds)
            return flaw

    def _expect(self, record: WorkerRecord, by: WorkerRecord, seconds: float = 0.0) -> None:
        until = self._worker.runtime.now() + max(seconds, self._connections.answer_seconds)
        self._expected[record.incarnation] = _Expected(record, until, by.incarnation)
        while len(self._expected) > (_MAX_EXPECTED if self.trusts_any_member else _MAX_EXPECTED_UNTRUSTED):
            self._expected.popitem(last=False)

    @property
    def expected(self) -> tuple[WorkerRecord, ...]:
        """The joiners that were enrolled recently and have not said hello yet."""
        with self._peers.changing:
            now = self._worker.runtime.now()
            return tuple(expected.record for expected in self._expected.values() if now < expected.until)

    @property
    def known(self) -> tuple[WorkerRecord, ...]:
        """The members and ``expected``, each once."""
        # In this order: a joiner that says hello meanwhile is found in one of the two.
        found = {record.id: record for record in (*self.expected, *self._peers.records)}
        return tuple(found.values())

    def has_come(self, record: WorkerRecord) -> bool:
        """Whether a joiner that was enrolled has said hello, or need not any more."""
        with self._peers.changing:
            come = (
                self._table.member(record.incarnation) is not None or self._table.gone(record.incarnation) is not None
            )
            return come or record.incarnation not in self._expected

    def enrollment_of(self, incarnation: str) -> WorkerRecord | None:
        """The record of a worker that is a member or has been enrolled."""
        with self._peers.changing:
            member, expected = self._table.member(incarnation), self._expected.get(incarnation)
            if member is not None or expected is None:
                return member
            rivals = self._table.rivals(expected.record.name, expected.record.id)
            return expected.record if all(map(expected.record.follows, rivals)) else None  # None: a later one has come

    def yields(self, rival: Peer, leader: Peer) -> bool:
        """Whether a member gives way to another one on the word of a leader."""
        with self._peers.changing:
            return bool(rival.lost) or self._table.yields(rival.record, leader.record.incarnation)

    def overrule(self, rival: Peer, record: WorkerRecord) -> None:
        """The leader has this worker in the place of a member: it replaces that member when it says hello."""
        with self._peers.changing:
            self._table.overrule(rival.record, record)
