"""Workers that come to a running cluster, and workers that go: the members' side. The newcomer's is in ``joining``.

The leader, the member with the lowest id that can be reached, enrols newcomers one at a time. A newcomer then shows its
record to all members, which admit it (``peers``); one that leaves says so to all of them.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from backhaul._rpc.calls.client import CallClient
from backhaul._rpc.calls.served_call import ServedCall, never_dropped
from backhaul._rpc.cluster.departure import secret_of
from backhaul._rpc.cluster.membership_table import WorkerRecord, choose
from backhaul._rpc.cluster.peers import Peer, Peers
from backhaul._rpc.futures import Future
from backhaul._rpc.security.policy import internal
from backhaul._rpc.shutdown.graceful_shutdown import GracefulShutdown
from backhaul._transport.base import Channel, ChannelClosedError
from backhaul._types import WorkerInfo
from backhaul._wire.frames import Frame
from backhaul._wire.messages import Join, Kind, Refuse, Welcome, pack, unpack
from backhaul._worker import deadlines
from backhaul._worker.frame_receiver import before_hello
from backhaul._worker.thread_pool import Task
from backhaul._worker.worker import Worker, current_worker
from backhaul.errors import BackhaulError, CallTimeoutError, PeerLostError, ProtocolError, UnknownWorkerError

log = logging.getLogger("backhaul")

_TOLD = 3.0  # seconds that the members have to hear of a newcomer
_PROBE = 2.0  # seconds in which a worker that is thought lost may show that it is not
_PAUSE = 0.2  # seconds before we show ourselves again
_DOUBT = 5.0  # seconds until a member that has not heard of us should have
_AGAIN = 60.0  # seconds in which one that was refused, and has been found to be a member, may show itself again
_RELAYS = 3  # members that one that leaves asks to tell those that it cannot reach
_MAX_UNTOLD = 1024  # of whom it may ask them that
_MAX_JOINING = 16  # newcomers whose questions are dealt with at the same time
_MAX_ASKING = 8  # newcomers that this worker asks the leader about at the same time


@dataclass(frozen=True, slots=True)
class MembershipEvent:
    """What has happened to a worker of the cluster.

    Attributes:
        kind: ``"joined"``: it can be called from now on, also after it was lost or restarted. ``"left"``: it has called
            ``leave``. ``"lost"``: its channel closed or it was silent for too long.
        worker: Which one.
        reason: For people.
    """

    kind: Literal["joined", "left", "lost"]
    worker: WorkerInfo
    reason: str = ""


Callback = Callable[[MembershipEvent], None]


class Membership:
    """One worker's part in it. Thread-safe.

    Attributes:
        secret: What the worker tells when it leaves; see ``departure``.
    """

    def __init__(self, worker: Worker, client: CallClient, graceful_shutdown: GracefulShutdown) -> None:
        self._worker = worker
        self._agent = client
        self._peers: Peers = client.peers
        self._farewell = graceful_shutdown
        self.secret = secret_of(worker.incarnation)
        self._enrolling = worker.runtime.lock()  # held while a newcomer is enrolled: one at a time
        self._callbacks: list[Callback] = []
        self._lock = threading.Lock()  # guards _events, _telling, _asking and _joining
        self._events: collections.deque[MembershipEvent] = collections.deque()
        self._telling = False
        self._joining: set[Channel] = set()  # over which newcomers ask; each has one question under way
        self._asking: set[str] = set()  # incarnations
        self._peers.inquire = self._inquire
        worker.attach(self)
        worker.on_frame(Kind.JOIN, self._on_join, check=before_hello)
        self._peers.on_change(self._on_change)

    # Events.

    def subscribe(self, callback: Callback) -> Callable[[], None]:
        """Call ``callback`` with each event, one after the other; returns what ends that."""
        self._callbacks.append(callback)

        def end() -> None:
            with contextlib.suppress(ValueError):
                self._callbacks.remove(callback)

        return end

    def _on_change(self, what: str, peer: Peer, reason: str) -> None:
        if self._farewell.started or self._worker.closed:
            return  # everyone goes
        if what == "replaced":
            if peer.lost:
                return  # that has been told
            what = "lost"
        kind: Literal["joined", "left", "lost"] = what  # type: ignore[assignment]
        log.info("worker '%s' has %s: %s", peer.info.name, "been lost" if what == "lost" else what, reason)
        if not self._callbacks:
            return
        with self._lock:
            self._events.append(MembershipEvent(kind, peer.info, reason))
            start, self._telling = not self._telling, True
        if start:
            self._worker.thread_pool.submit(self._tell)

    def _tell(self) -> None:
        while True:
            with self._lock:
                if not self._events:
                    self._telling = False
                    return
                event = self._events.popleft()
            for callback in list(self._callbacks):
                try:
                    self._worker.run(callback, event)
                except BaseException:  # code of the user's may raise anything; the next event is still to be told
                    log.exception("a callback of on_membership failed")

    # Joining.

    def _on_join(self, channel: Channel, frame: Frame) -> Task | None:
        record = unpack(unpack(frame.body, Join).record, WorkerRecord)
        with self._lock:
            if channel in self._joining:
                raise ProtocolError("another question to join before the first was answered")
            if busy := len(self._joining) >= _MAX_JOINING:
                log.debug("too many want to join at the same time")
            else:
                self._joining.add(channel)
        if not busy:
            return functools.partial(self._answer, channel, record)
        self._send(channel, Refuse("too many want to join at the same time", later=True))
        channel.close()  # or one that does not read what we say could let it pile up
        return None

    def _answer(self, channel: Channel, record: WorkerRecord) -> None:
        try:
            answer = (
                self._consider(record)
                if self._peers.may_be(channel, record.name)
                else Refuse(self._peers.not_for(channel, record.name))
            )
        finally:
            with self._lock:
                self._joining.discard(channel)
        if isinstance(answer, Refuse):
            log.warning("refused to let %.130r join: %s", record.name, answer.reason)
        self._send(channel, answer)

    @staticmethod
    def _send(channel: Channel, answer: Welcome | Refuse) -> None:
        kind = Kind.REFUSE if isinstance(answer, Refuse) else Kind.WELCOME
        with contextlib.suppress(ChannelClosedError):  # it has given up, or is gone
            channel.send(Frame(kind, 0, pack(answer)), timeout=0)

    def _consider(self, record: WorkerRecord) -> Welcome | Refuse:
        leader = self._leader()
        if leader is not self._peers.own:
            return Welcome(pack(leader.record))
        with self._worker.thread_pool.blocking():
            rivals = self._peers.rivals(record.name, record.id)
            for rival in rivals:  # not while we hold a lock: it may take a while
                what = f"there is a worker '{rival.info.name}' (id {rival.info.id}) already"
                if rival.suspicion and rival.channel is not None:
                    return Refuse(f"{what}; it may be lost: {rival.suspicion}", later=True)
                if (answer := self._sign_of(rival)) is not None:
                    return Refuse(f"{what}{answer}", later=bool(answer))
            with self._enrolling:
                enrolled = self._enrol(record, rivals)
            if isinstance(enrolled, Refuse):
                return enrolled
            others = [other for other in (*self._peers.records, *self._peers.expected) if _apart(other, enrolled)]
            self._worker.run(self._tell_of, enrolled, {other.id for other in others})
            return Welcome(pack(enrolled), tuple(map(pack, others)), self._peers.standing.proven)

    def _enrol(self, record: WorkerRecord, rivals: list[Peer]) -> WorkerRecord | Refuse:
        if self._farewell.started:
            return Refuse("the cluster is being shut down")
        for other in self._peers.expected:
            if other.incarnation == record.incarnation:
                return other  # it asks again
            if not _apart(other, record):
                return Refuse(f"a worker '{other.name}' (id {other.id}) is just joining", later=True)
        if self._peers.rivals(record.name, record.id) != rivals:
            return Refuse("another has come meanwhile", later=True)
        enrolled = self._peers.enrol(record)
        return Refuse(enrolled) if isinstance(enrolled, str) else enrolled

    def _tell_of(self, enrolled: WorkerRecord, others: set[int]) -> None:
        """Tell the members of a newcomer: some of them take it for somebody else's place only on our word."""
        calls, now = [], self._worker.runtime.now
        deadline, told = now() + _TOLD, (pack(enrolled),)
        for peer in self._peers:
            if peer.record.id in others and peer is not self._peers.own and not peer.lost and not peer.suspicion:
                left = max(deadline - now(), 0.01)
                with contextlib.suppress(BackhaulError):
                    calls.append(self._agent.call_async(peer.info, expect, told, None, left, mode="internal"))
        for call in calls:
            with contextlib.suppress(BackhaulError):
                call.wait()

    def expect(self, caller: Peer, record: WorkerRecord) -> None:
        """A member says that it has enrolled a newcomer."""
        with self._worker.thread_pool.blocking():
            if not self.believes(caller):
                log.warning("worker '%s' speaks for a newcomer, and is not the leader", caller.info.name)
                return
        if flaw := self._peers.expect(record, by=caller.record):
            log.warning("worker '%s' speaks for what cannot be a worker: %s", caller.info.name, flaw)

    def believes(self, caller: Peer) -> bool:
        """Whether what a member says of others counts here. This may take a while."""
        return self._peers.credulous or self._leader() is caller

    def enrolment_of(self, incarnation: str) -> WorkerRecord | None:
        """What this worker knows of a newcomer."""
        return self._peers.enrolment_of(incarnation)

    def _inquire(self, record: WorkerRecord) -> Task | None:
        """One that this worker has not heard of wants to take the place of another: find out whether it may."""
        if not self._peers.rivals(record.name, record.id):
            return None
        with self._lock:
            if record.incarnation in self._asking or len(self._asking) >= _MAX_ASKING:
                return None
            self._asking.add(record.incarnation)
        return functools.partial(self._find_out, record)

    def _find_out(self, record: WorkerRecord) -> None:
        try:
            with self._worker.thread_pool.blocking():
                leader, rivals = self._leader(), self._peers.rivals(record.name, record.id)
                # After a split there may be several who have enrolled others. Where any member's word is as good as the
                # leader's all of them are asked, so that one counts everywhere: that of the later epoch.
                others = [peer for peer in self._peers if peer is not leader and peer not in rivals]
                others.sort(key=lambda peer: bool(peer.lost))
                asked = [[leader], others] if self._peers.credulous else [[leader]]
                if any(self._worker.run(self._is_known, record, members) for members in asked):
                    for rival in [] if self._peers.credulous else rivals:
                        # The leader's word alone counts, and more than epochs: anybody can claim a late one.
                        if self._peers.yields(rival, leader) or self._sign_of(rival) != "":
                            rival.overruled = record.incarnation
                    self._peers.expect(record, by=leader.record, seconds=_AGAIN)
                else:
                    for rival in rivals:
                        self._sign_of(rival)  # if it is gone it is known as lost then
        finally:
            with self._lock:
                self._asking.discard(record.incarnation)

    def _is_known(self, record: WorkerRecord, members: Iterable[Peer]) -> bool:
        """Whether one of these members, other than this worker, has let a worker in under just that record."""
        now, calls = self._worker.runtime.now, []
        deadline = now() + _TOLD
        for peer in members:
            if peer is not self._peers.own and (left := deadline - now()) > 0:
                args = (record.incarnation,)
                with contextlib.suppress(BackhaulError):
                    calls.append(self._agent.call_async(peer.info, enrolment_of, args, None, left, mode="internal"))
        known = []
        for call in calls:
            with contextlib.suppress(BackhaulError):
                known.append(call.wait() == pack(record))
        return any(known)

    def show_to(self, peer: Peer, timeout: float) -> str | None:
        """Show our record to a member; returns why that does not accept it, if it does not."""
        if choose(peer.record, self._peers.own.record.host) is None:
            return None  # it cannot be reached from here
        now, refusal = self._worker.runtime.now, None
        deadline = now() + min(timeout, _DOUBT)
        while True:
            try:
                self._agent.call(peer.info, greet, None, None, timeout, mode="internal")
                return None
            except UnknownWorkerError:  # another takes its place just now, and shows itself to us
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
            self._worker.runtime.one_shot().wait(_PAUSE)  # it asks the leader about us; or we have only lost a channel

    def _leader(self) -> Peer:
        for peer in self._peers:
            if peer is self._peers.own or self._reachable(peer):
                return peer
        return self._peers.own

    def _sign_of(self, rival: Peer) -> str | None:
        """None if a worker is gone, which may not have been noticed yet; else what to say of it."""
        if rival is self._peers.own:
            return ""
        lost = bool(rival.lost)
        timeout = min(self._peers.patience, _PROBE) if lost else self._peers.patience
        try:
            self._agent.call(rival.info, greet, None, None, timeout, mode="internal")
        except (PeerLostError, UnknownWorkerError):
            return None
        except CallTimeoutError:
            if lost:
                return None  # it hangs, or is cut off; who comes back after it was replaced is refused
            return "; it may be lost, since it does not answer"
        except BackhaulError:  # it does not let us
            pass
        return ""

    def _reachable(self, peer: Peer) -> bool:
        if peer is self._peers.own:
            return True
        try:
            self._peers.channel_to(peer, self._peers.patience)
            return True
        except BackhaulError:
            return False

    # Leaving.

    def leave(self, deadline: float) -> None:
        """Tell everyone that this worker goes, once nothing is under way here."""
        self._rest(deadline)
        others = [peer for peer in self._peers if peer is not self._peers.own]
        untold = [peer for peer in others if peer.lost]
        told = self._say_farewell([peer for peer in others if not peer.lost], untold, deadline)
        missed = [peer for peer in others if peer not in told and peer not in untold]
        if missed:
            self._say_farewell(told[:_RELAYS], missed, deadline)
        self._rest(deadline)  # calls that came meanwhile

    def _say_farewell(self, to: list[Peer], untold: list[Peer], deadline: float) -> list[Peer]:
        """Tell members that this worker goes, and ask some of them to tell those that it cannot reach; returns who has
        heard it.
        """
        proof, absent = self.secret, [peer.record.incarnation for peer in untold]
        calls: list[tuple[Peer, Future[Any]]] = []
        for number, peer in enumerate(to):
            left = max(deadline - self._worker.runtime.now(), 0.001)
            args = proof, absent if number < _RELAYS else []
            with contextlib.suppress(BackhaulError):  # it is gone itself
                calls.append((peer, self._agent.call_async(peer.info, forget, args, None, left, mode="internal")))
        told = []
        for peer, call in calls:
            with contextlib.suppress(BackhaulError):
                call.wait()
                told.append(peer)
        return told

    def forget(self, leaver: Peer, proof: str, untold: list[str]) -> None:
        """A member says that it goes, and that it could not tell some others."""
        self._peers.dismiss(leaver, proof)
        if untold and leaver.record.has_left(proof):
            relay = functools.partial(self._relay, leaver.record.incarnation, proof, set(untold[:_MAX_UNTOLD]))
            self._worker.thread_pool.submit(functools.partial(self._worker.run, relay))

    def take_proof(self, incarnation: str, proof: str) -> None:
        """Somebody says that a worker has left."""
        self._peers.take_proof(incarnation, proof)

    def _relay(self, incarnation: str, proof: str, untold: set[str]) -> None:
        """Pass on to members that this worker can reach that another has left."""
        with self._worker.thread_pool.blocking():
            for peer in self._peers:
                if peer.record.incarnation in untold and peer is not self._peers.own and not peer.lost:
                    with contextlib.suppress(BackhaulError):
                        self._agent.call(peer.info, departed, (incarnation, proof), None, _TOLD, mode="internal")

    def _rest(self, deadline: float) -> None:
        idle = self._worker.runtime.one_shot()
        self._agent.idleness.when_idle(idle.open)
        with self._worker.blocking():
            idle.wait(max(deadline - self._worker.runtime.now(), 0.0))


def _apart(one: WorkerRecord, other: WorkerRecord) -> bool:
    """Whether both can be members."""
    return one.name != other.name and one.id != other.id


@never_dropped  # its caller may be gone by then
@internal(str, list)
def forget(proof: str, untold: list[str]) -> None:
    """Called by one that leaves, with its proof and the incarnations of those that it could not tell. It is known by
    its channel: nobody can speak for another.
    """
    answer = deadlines.current.get()
    if isinstance(answer, ServedCall) and answer.peer.record.incarnation != current_worker().incarnation:
        current_worker().part(Membership).forget(answer.peer, proof, [each for each in untold if type(each) is str])


@internal(str, str)
def departed(incarnation: str, proof: str) -> None:
    """Called by any member: a worker has left, which could not tell this one. The proof says so, not the caller."""
    current_worker().part(Membership).take_proof(incarnation, proof)


@internal(bytes)
def expect(record: bytes) -> None:
    """Called by the leader, before it lets a newcomer in."""
    answer = deadlines.current.get()
    if isinstance(answer, ServedCall):
        current_worker().part(Membership).expect(answer.peer, unpack(record, WorkerRecord))


@internal(str)
def enrolment_of(incarnation: str) -> bytes:
    """Called by a member to which a worker has shown itself that it had not heard of."""
    record = current_worker().part(Membership).enrolment_of(incarnation)
    return b"" if record is None else pack(record)


@internal()
def greet() -> None:
    """Called by a newcomer: by then the other has admitted it. And to see whether a worker is there."""
