"""Enrolls joiners: the members' side of joining. The joiner's side is in ``joining``.

Every member answers the question of a joiner. A member that is not the leader names the leader. The leader enrolls the
joiners: it gives each an id and an epoch, tells the members to expect it, and tells it who they are. The members hear
of all joiners that came meanwhile in one message. Where members trust each other, they admit the joiners at that word;
elsewhere each joiner says hello to all members, which admit it then (``admission``).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading

from backhaul._rpc.cluster.admission import Admission
from backhaul._rpc.cluster.internal_calls import InternalCalls, caller
from backhaul._rpc.cluster.membership import Membership
from backhaul._rpc.cluster.membership_table import WorkerRecord
from backhaul._rpc.cluster.peers import Peer, Peers
from backhaul._rpc.security.policy import internal
from backhaul._transport.base import Channel, ChannelClosedError
from backhaul._types import MAX_WORKERS
from backhaul._wire.frames import Frame
from backhaul._wire.messages import Join, Kind, Refuse, Welcome, pack, unpack
from backhaul._worker.frame_receiver import before_hello
from backhaul._worker.thread_pool import Task
from backhaul._worker.worker import Worker, current_worker
from backhaul.errors import ProtocolError

log = logging.getLogger("backhaul")

_TELL_SECONDS = 3.0  # for the members to hear of a joiner
_MAX_JOINERS = 1024  # whose questions are answered at the same time
_NEIGHBORS = 32  # members to which a joiner says hello although they know it
_ARRIVAL_SECONDS = 1.0  # that a joiner gets beyond the time that it has to say hello


class Enrollment:
    """One member's part in enrolling joiners. Thread-safe."""

    def __init__(
        self, worker: Worker, peers: Peers, admission: Admission, membership: Membership, calls: InternalCalls
    ) -> None:
        self._worker = worker
        self._peers = peers
        self._admission = admission
        self._membership = membership
        self._calls = calls
        self._enrolling = worker.runtime.lock()  # held while a joiner is enrolled: one at a time
        self._lock = threading.Lock()  # guards the three below
        self._asking: set[Channel] = set()  # over which joiners ask; each has one question under way
        self._enrolled: list[tuple[Channel, WorkerRecord]] = []  # joiners of which the members have to hear
        self._telling = False  # a thread tells the members
        worker.attach(self)
        worker.on_frame(Kind.JOIN, self._on_join, check=before_hello)

    def _on_join(self, channel: Channel, frame: Frame) -> Task | None:
        record = unpack(unpack(frame.body, Join).record, WorkerRecord)
        with self._lock:
            if channel in self._asking:
                raise ProtocolError("a second question to join before the first was answered")
            if busy := len(self._asking) >= _MAX_JOINERS:
                log.debug("too many workers want to join at the same time")
            else:
                self._asking.add(channel)
        if not busy:
            return functools.partial(self._answer, channel, record)
        self._send(channel, Refuse("too many want to join at the same time", later=True))
        channel.close()  # a joiner that does not read answers could otherwise let them pile up
        return None

    def _answer(self, channel: Channel, record: WorkerRecord) -> None:
        certificates = self._peers.connections.certificates
        answer: WorkerRecord | Welcome | Refuse = Refuse("the leader failed to answer", later=True)
        try:
            if not certificates.allow(channel, record.name):
                answer = Refuse(certificates.mismatch(channel, record.name))
            elif not certificates.holds_key(channel, record):
                answer = Refuse(f"the certificate is not that of worker '{record.name}'")
            else:
                answer = self._consider(record)
        finally:
            with self._lock:
                self._asking.discard(channel)
                if isinstance(answer, WorkerRecord):
                    self._enrolled.append((channel, answer))
                    tell, self._telling = not self._telling, True
        if isinstance(answer, WorkerRecord):
            if tell:
                self._tell_all()
            return
        if isinstance(answer, Refuse):
            log.warning("refused to let %.130r join: %s", record.name, answer.reason, extra=self._fields(record.name))
        self._send(channel, answer)

    def _fields(self, peer: str) -> dict[str, str]:
        """The fields of a log record about a peer."""
        return {"worker": self._worker.name, "peer": peer}

    @staticmethod
    def _send(channel: Channel, answer: Welcome | Refuse) -> None:
        kind = Kind.REFUSE if isinstance(answer, Refuse) else Kind.WELCOME
        with contextlib.suppress(ChannelClosedError):  # the joiner has given up, or is gone
            channel.send(Frame(kind, 0, pack(answer)), timeout=0)

    def _consider(self, record: WorkerRecord) -> WorkerRecord | Welcome | Refuse:
        leader = self._membership.leader()
        if leader is not self._peers.own:
            return Welcome(pack(leader.record))
        with self._worker.thread_pool.blocking():
            rivals = self._peers.rivals(record.name, record.id)
            for rival in rivals:  # without a lock: a probe may take a while
                what = f"there is a worker '{rival.info.name}' (id {rival.info.id}) already"
                if rival.suspicion and rival.channel is not None:
                    return Refuse(f"{what}; it may be lost: {rival.suspicion}", later=True)
                if (answer := self._membership.probe(rival)) is not None:
                    return Refuse(f"{what}{answer}", later=bool(answer))
            with self._enrolling:
                return self._enroll(record, rivals)

    def _enroll(self, record: WorkerRecord, rivals: list[Peer]) -> WorkerRecord | Refuse:
        if self._peers.ending:
            return Refuse("the cluster is being shut down")
        for other in self._admission.expected:
            if other.incarnation == record.incarnation:
                return other  # it asks again
            if not _compatible(other, record):
                return Refuse(f"a worker '{other.name}' (id {other.id}) is just joining", later=True)
        if self._peers.rivals(record.name, record.id) != rivals:
            return Refuse("another worker has come meanwhile", later=True)
        enrolled = self._admission.enroll(record)
        return Refuse(enrolled) if isinstance(enrolled, str) else enrolled

    # Telling the members, and welcoming the joiners.

    def _tell_all(self) -> None:
        """Tell the members of the joiners, as many at once as there are, until there are no more."""
        with self._worker.thread_pool.blocking():
            while batch := self._next_batch():
                try:
                    self._worker.run(self._welcome, batch)
                except Exception:  # the joiners ask again
                    log.exception("could not welcome %d workers", len(batch))

    def _next_batch(self) -> list[tuple[Channel, WorkerRecord]]:
        with self._lock:
            batch, self._enrolled = self._enrolled, []
            self._telling = bool(batch)
            return batch

    def _welcome(self, batch: list[tuple[Channel, WorkerRecord]]) -> None:
        enrolled = [record for _, record in batch]
        unaware = self._tell_members(enrolled)
        known = [(record, pack(record)) for record in self._admission.known]
        left = self._peers.standing.proven
        for channel, record in batch:
            others = tuple(packed for other, packed in known if _compatible(other, record))
            self._send(channel, Welcome(pack(record), others, left, self._greeted(record, unaware)))
        if unaware is not None:
            at = self._worker.runtime.now() + self._peers.connections.answer_seconds + _ARRIVAL_SECONDS
            check = functools.partial(self._worker.run, functools.partial(self._check_arrival, enrolled))
            self._worker.thread_pool.call_at(at, functools.partial(self._worker.thread_pool.submit, check))

    def _tell_members(self, enrolled: list[WorkerRecord]) -> set[int] | None:
        """Tell the members of joiners: some let a joiner take another worker's place only if the leader says so.
        Returns the ids of the members to which all of them have to say hello; None: to all.

        A member that does not answer in time is slow, or its channel was lost. It hears of the joiners when it reads
        on, or when it compares with the leader.
        """
        names, ids = {record.name for record in enrolled}, {record.id for record in enrolled}
        others = [
            peer
            for peer in self._peers
            if peer is not self._peers.own and peer.info.name not in names and peer.record.id not in ids
        ]
        told = ([pack(record) for record in enrolled],)
        doubtful = {peer.record.id for peer in others if peer.lost or peer.suspicion}
        asked = ((peer, told) for peer in others if peer.record.id not in doubtful)
        answers = self._calls.call_each(asked, expect, self._worker.runtime.now() + _TELL_SECONDS)
        if not self._admission.trusts_any_member:
            return None
        return doubtful | {peer.record.id for peer, admitted in answers if admitted is not True}

    def _greeted(self, joiner: WorkerRecord, unaware: set[int] | None) -> tuple[int, ...] | None:
        """To which members a joiner says hello: those that do not know it, and the members of the ids below its own,
        which then watch it. Not to workers that join at the same time: they may not listen yet.
        """
        if unaware is None:
            return None
        members = [peer.record.id for peer in self._peers if peer.record.id != joiner.id]
        members.sort(key=lambda number: (joiner.id - number) % MAX_WORKERS)
        return tuple(number for place, number in enumerate(members) if place < _NEIGHBORS or number in unaware)

    def _check_arrival(self, enrolled: list[WorkerRecord]) -> None:
        """Tell the members which joiners have not come although they were welcomed."""
        absent = [record.incarnation for record in enrolled if not self._admission.has_come(record)]
        if absent and not self._peers.ending:
            asked = ((peer, (absent,)) for peer in self._peers if peer is not self._peers.own and not peer.lost)
            with self._worker.thread_pool.blocking():
                self._calls.call_each(asked, not_come, self._worker.runtime.now() + _TELL_SECONDS)

    # What the leader tells.

    def expect(self, caller: Peer, records: list[WorkerRecord]) -> bool:
        """A member says that it has enrolled joiners. Returns whether all of them are members here now."""
        with self._worker.thread_pool.blocking():
            if not self._membership.believes(caller):
                name = caller.info.name
                log.warning(
                    "ignored worker '%s', which announced a joiner and is not the leader",
                    name,
                    extra=self._fields(name),
                )
                return False
        admitted = True
        for record in records:
            if flaw := self._admission.expect(record, by=caller.record):
                log.warning(
                    "worker '%s' announced a joiner with a record that is not valid: %s",
                    *(caller.info.name, flaw),
                    extra=self._fields(caller.info.name),
                )
            admitted &= not flaw and self._admission.trusts_any_member and self._admission.learn(record) is not None
        return admitted

    def not_come(self, caller: Peer, incarnations: set[str]) -> None:
        """A member says that joiners which it has enrolled have not come."""
        for peer in self._peers:
            if peer.record.incarnation in incarnations and not peer.channels and self._admission.trusts_any_member:
                self._peers.lose(peer, f"it was welcomed by worker '{caller.info.name}' and has not come")


def _compatible(one: WorkerRecord, other: WorkerRecord) -> bool:
    """Whether both can be members at the same time."""
    return one.name != other.name and one.id != other.id


@internal(list)
def expect(records: list[bytes]) -> bool:
    """Called by the leader on all members before it lets joiners in."""
    leader = caller()
    enrolled = [unpack(record, WorkerRecord) for record in records]
    return leader is not None and current_worker().part(Enrollment).expect(leader, enrolled)


@internal(list)
def not_come(incarnations: list[str]) -> None:
    """Called by the leader on all members: it has let these joiners in, and they have not come."""
    leader = caller()
    if leader is not None:
        current_worker().part(Enrollment).not_come(leader, {each for each in incarnations if type(each) is str})
