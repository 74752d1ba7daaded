"""Enrolls joiners: the members' side of joining. The joiner's side is in ``joining``.

Every member answers the question of a joiner. A member that is not the leader names the leader. The leader enrolls one
joiner at a time: it gives the joiner an id and an epoch, tells the members to expect it, and tells it who they are. The
joiner then says hello to all members, which admit it (``admission``).
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
from backhaul._wire.frames import Frame
from backhaul._wire.messages import Join, Kind, Refuse, Welcome, pack, unpack
from backhaul._worker.thread_pool import Task
from backhaul._worker.worker import Worker, current_worker
from backhaul.errors import ProtocolError

log = logging.getLogger("backhaul")

_TELL_SECONDS = 3.0  # for the members to hear of a joiner
_MAX_JOINERS = 16  # whose questions are answered at the same time


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
        self._lock = threading.Lock()  # guards _asking
        self._asking: set[Channel] = set()  # over which joiners ask; each has one question under way
        worker.attach(self)
        worker.on_frame(Kind.JOIN, self._on_join)

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
        try:
            answer = (
                self._consider(record)
                if certificates.allow(channel, record.name)
                else Refuse(certificates.mismatch(channel, record.name))
            )
        finally:
            with self._lock:
                self._asking.discard(channel)
        if isinstance(answer, Refuse):
            log.warning("refused to let %.130r join: %s", record.name, answer.reason)
        self._send(channel, answer)

    @staticmethod
    def _send(channel: Channel, answer: Welcome | Refuse) -> None:
        kind = Kind.REFUSE if isinstance(answer, Refuse) else Kind.WELCOME
        with contextlib.suppress(ChannelClosedError):  # the joiner has given up, or is gone
            channel.send(Frame(kind, 0, pack(answer)), timeout=0)

    def _consider(self, record: WorkerRecord) -> Welcome | Refuse:
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
                enrolled = self._enroll(record, rivals)
            if isinstance(enrolled, Refuse):
                return enrolled
            others = [o for o in (*self._peers.records, *self._admission.expected) if _compatible(o, enrolled)]
            self._worker.run(self._tell_members, enrolled, {other.id for other in others})
            return Welcome(pack(enrolled), tuple(map(pack, others)), self._peers.standing.proven)

    def _enroll(self, record: WorkerRecord, rivals: list[Peer]) -> WorkerRecord | Refuse:
        if self._peers.shutting_down:
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

    def _tell_members(self, enrolled: WorkerRecord, members: set[int]) -> None:
        """Tell the members of a joiner: some let it take another worker's place only if the leader says so."""
        told = (pack(enrolled),)
        asked = (
            (peer, told)
            for peer in self._peers
            if peer.record.id in members and peer is not self._peers.own and not peer.lost and not peer.suspicion
        )
        self._calls.call_each(asked, expect, self._worker.runtime.now() + _TELL_SECONDS)

    def expect(self, caller: Peer, record: WorkerRecord) -> None:
        """A member says that it has enrolled a joiner."""
        with self._worker.thread_pool.blocking():
            if not self._membership.believes(caller):
                log.warning("ignored worker '%s', which announced a joiner and is not the leader", caller.info.name)
                return
        if flaw := self._admission.expect(record, by=caller.record):
            log.warning("worker '%s' announced a joiner with a record that is not valid: %s", caller.info.name, flaw)


def _compatible(one: WorkerRecord, other: WorkerRecord) -> bool:
    """Whether both can be members at the same time."""
    return one.name != other.name and one.id != other.id


@internal(bytes)
def expect(record: bytes) -> None:
    """Called by the leader on all members before it lets a joiner in."""
    leader = caller()
    if leader is not None:
        current_worker().part(Enrollment).expect(leader, unpack(record, WorkerRecord))
