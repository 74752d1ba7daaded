"""What a member does about other members: finds the leader, tests whether a worker is alive, introduces itself, and
investigates a worker that claims another member's place.

The leader is the member with the lowest id that can be reached, of those that listen if there are any.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable

from backhaul._rpc.cluster.admission import Admission
from backhaul._rpc.cluster.internal_calls import InternalCalls
from backhaul._rpc.cluster.joining import Enrolled
from backhaul._rpc.cluster.membership_table import WorkerRecord
from backhaul._rpc.cluster.peers import Peer, Peers
from backhaul._rpc.security.policy import internal
from backhaul._wire.messages import pack, unpack
from backhaul._worker.thread_pool import Task
from backhaul._worker.worker import Worker, current_worker
from backhaul.errors import BackhaulError, CallTimeoutError, PeerLostError, RendezvousError, UnknownWorkerError

_LOST_PROBE_SECONDS = 2.0  # for a worker that is thought lost to show that it is alive
_INQUIRY_SECONDS = 3.0  # for members to say whether they know a worker
_RETRY_SECONDS = 0.2  # before this worker introduces itself again
_REFUSED_SECONDS = 5.0  # for a member that refuses this worker to hear of it from the leader
_EXPECT_AGAIN_SECONDS = 60.0  # for a worker that was refused, and then found to be a member, to say hello again
_MAX_INVESTIGATIONS = 8  # workers that this worker investigates at the same time
_MAX_INTRODUCTIONS = 32  # members to which this worker introduces itself at the same time


class Membership:
    """One worker's view of the other members. Thread-safe."""

    def __init__(self, worker: Worker, peers: Peers, admission: Admission, calls: InternalCalls) -> None:
        self._worker = worker
        self._peers = peers
        self._admission = admission
        self._calls = calls
        self._lock = threading.Lock()  # guards _investigated
        self._investigated: set[str] = set()  # incarnations
        admission.investigate = self._investigate
        worker.attach(self)

    # The leader.

    def leader(self) -> Peer:
        """The first member, by seniority, that can be reached. May take as long as it takes to connect."""
        for peer in self._peers:
            if peer is self._peers.own or self._reachable(peer):
                return peer
        return self._peers.own

    def believes(self, caller: Peer) -> bool:
        """Whether what a member says about other workers counts here. May take as long as ``leader``."""
        return self._admission.trusts_any_member or self.leader() is caller

    def _reachable(self, peer: Peer) -> bool:
        try:
            self._peers.channel_to(peer, self._peers.connections.answer_seconds)
            return True
        except BackhaulError:
            return False

    def probe(self, rival: Peer) -> str | None:
        """Call a worker to see whether it is alive. None: it is gone, even if nobody has noticed yet. Otherwise what
        to add to a refusal: empty if it answered.
        """
        if rival is self._peers.own:
            return ""
        lost, seconds = bool(rival.lost), self._peers.connections.answer_seconds
        try:
            self._calls.call(rival, greet, (), min(seconds, _LOST_PROBE_SECONDS) if lost else seconds)
        except (PeerLostError, UnknownWorkerError):
            return None
        except CallTimeoutError:
            if lost:
                return None  # it hangs or is cut off; if it comes back after it was replaced, it is refused
            return "; it may be lost, since it does not answer"
        except BackhaulError:  # it answered with a refusal
            pass
        return ""

    # This worker introduces itself.

    def introduce(self, timeout: float, enrolled: Enrolled | None = None) -> None:
        """Say hello to all members. Raises ``RendezvousError`` if one of them does not accept this worker.

        A joiner says hello only to the members that its leader has named, if the others know it already.

        Args:
            timeout: Seconds for each member.
            enrolled: What the leader has told this worker, which is a joiner.
        """
        peers = [peer for peer in self._peers if peer is not self._peers.own]
        if enrolled is not None and enrolled.leader is not None and enrolled.greeted is not None:
            greeted = {enrolled.leader.id, *enrolled.greeted}
            self._introduce_to_all([peer for peer in peers if peer.record.id in greeted], timeout)
            if self._catch_up(enrolled.leader.id, enrolled.epoch, timeout):
                return
            peers = [peer for peer in peers if peer.record.id not in greeted]
        self._introduce_to_all(peers, timeout)

    def _catch_up(self, leader: int, since: int, timeout: float) -> bool:
        """Learn of workers that were enrolled while this one joined. False: the leader does not tell."""
        peer = self._peers.with_id(leader)
        try:
            records = [] if peer is None else self._calls.call(peer, enrolled_since, (since,), timeout)
        except BackhaulError:
            return False
        for record in records:
            self._admission.learn(unpack(record, WorkerRecord))
        return peer is not None

    def enrolled_since(self, epoch: int) -> list[WorkerRecord]:
        """The workers that were enrolled after the one of that epoch."""
        return [record for record in self._admission.known if record.epoch > epoch]

    def _introduce_to_all(self, peers: list[Peer], timeout: float) -> None:
        refused: dict[str, str] = {}
        remaining = iter(peers)  # each thread takes the next; a member that does not answer delays one thread only
        taking = threading.Lock()  # guards remaining
        worker, runtime = self._worker, self._worker.runtime
        deadline = runtime.now() + timeout

        def introduce_to_next() -> None:
            while True:
                with taking:
                    peer = next(remaining, None)
                if peer is None:
                    return
                time_left = max(deadline - runtime.now(), 0.01)
                if (reason := worker.run(self.introduce_to, peer, time_left)) is not None:
                    refused[peer.info.name] = reason

        count = min(len(peers), _MAX_INTRODUCTIONS)
        threads = [runtime.spawn(introduce_to_next, name=f"introduce-{number}") for number in range(count)]
        for thread in threads:
            runtime.join(thread)
        for name, reason in refused.items():
            why = f"worker '{worker.name}' cannot join: worker '{name}' {reason}"
            raise RendezvousError(why, worker=worker.name)

    def introduce_to(self, peer: Peer, timeout: float) -> str | None:
        """Say hello to a member. Returns the reason if it refuses; None if it accepts or cannot be reached."""
        if not self._peers.connections.reaches(peer.record):
            return None  # it cannot be reached from this host
        now, refusal = self._worker.runtime.now, None
        deadline = now() + min(timeout, _REFUSED_SECONDS)
        while True:
            try:
                self._calls.call(peer, greet, (), timeout)
                return None
            except UnknownWorkerError:  # another worker takes its place right now, and will say hello here
                return None
            except PeerLostError as error:
                if peer.gone or isinstance(error.__cause__, ConnectionError):
                    return None  # nobody is there
                if (error.reason or "").startswith("refused: "):
                    refusal = error.reason
            except BackhaulError:  # it does not answer in time, and may yet be lost
                return None
            if now() > deadline:
                return refusal
            # The member asks the leader about this worker; or only a channel was lost.
            self._worker.runtime.one_shot().wait(_RETRY_SECONDS)

    # Workers that claim the place of another member.

    def _investigate(self, record: WorkerRecord) -> Task | None:
        """An unknown worker claims the place of a member: the task that finds out whether it may have it."""
        if not self._peers.rivals(record.name, record.id):
            return None
        with self._lock:
            if record.incarnation in self._investigated or len(self._investigated) >= _MAX_INVESTIGATIONS:
                return None
            self._investigated.add(record.incarnation)
        return functools.partial(self._find_out, record)

    def _find_out(self, record: WorkerRecord) -> None:
        try:
            with self._worker.thread_pool.blocking():
                leader, rivals = self.leader(), self._peers.rivals(record.name, record.id)
                # After a partition several leaders may have enrolled workers. Where any member's word counts, all
                # members are asked, so that everywhere the same worker wins: the one with the later epoch.
                others = [peer for peer in self._peers if peer is not leader and peer not in rivals]
                others.sort(key=lambda peer: bool(peer.lost))
                trusting = self._admission.trusts_any_member
                asked = [[leader], others] if trusting else [[leader]]
                if any(self._worker.run(self._is_known, record, members) for members in asked):
                    for rival in [] if trusting else rivals:
                        # Only the leader's word counts, and it counts more than epochs: anybody can claim a late one.
                        if self._admission.yields(rival, leader) or self.probe(rival) != "":
                            self._admission.overrule(rival, record)
                    self._admission.expect(record, by=leader.record, seconds=_EXPECT_AGAIN_SECONDS)
                else:
                    for rival in rivals:
                        self.probe(rival)  # if it is gone, this worker notices that now
        finally:
            with self._lock:
                self._investigated.discard(record.incarnation)

    def _is_known(self, record: WorkerRecord, members: Iterable[Peer]) -> bool:
        """Whether one of these members, other than this worker, has admitted a worker with exactly that record."""
        now = self._worker.runtime.now
        deadline = now() + _INQUIRY_SECONDS
        asked = ((peer, (record.incarnation,)) for peer in members if peer is not self._peers.own and now() < deadline)
        packed = pack(record)
        return any(answer == packed for _, answer in self._calls.call_each(asked, enrollment_of, deadline))

    def enrollment_of(self, incarnation: str) -> WorkerRecord | None:
        """What this worker knows of a joiner."""
        return self._admission.enrollment_of(incarnation)


@internal(str)
def enrollment_of(incarnation: str) -> bytes:
    """Called by a member to which an unknown worker has said hello. The worker's record; empty if it is unknown."""
    record = current_worker().part(Membership).enrollment_of(incarnation)
    return b"" if record is None else pack(record)


@internal(int)
def enrolled_since(epoch: int) -> list[bytes]:
    """Called by a joiner on the leader: the records of the workers that were enrolled after that epoch."""
    return [pack(record) for record in current_worker().part(Membership).enrolled_since(epoch)]


@internal()
def greet() -> None:
    """Called by a joiner: when this runs, the member has admitted it. Also called to see whether a worker is alive."""
