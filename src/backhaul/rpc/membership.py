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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from backhaul import limits
from backhaul.crew import Task
from backhaul.errors import BackhaulError, CallTimeoutError, PeerLostError, UnknownWorkerError
from backhaul.rpc.agent import Agent
from backhaul.rpc.dispatch import Answer, never_dropped
from backhaul.rpc.farewell import Farewell
from backhaul.rpc.peers import Peer, Peers
from backhaul.rpc.policy import internal
from backhaul.rpc.roster import WorkerRecord
from backhaul.transport.base import Channel, ChannelClosedError
from backhaul.types import WorkerInfo
from backhaul.wire.frames import Frame
from backhaul.wire.messages import Join, Kind, Refuse, Welcome, pack, unpack
from backhaul.worker import Worker, current_worker

log = logging.getLogger("backhaul")


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
    """One worker's part in it. Thread-safe."""

    def __init__(self, worker: Worker, agent: Agent, farewell: Farewell) -> None:
        self._worker = worker
        self._agent = agent
        self._peers: Peers = agent.peers
        self._farewell = farewell
        self._enrolling = worker.runtime.lock()  # held while a newcomer is enrolled: one at a time
        self._callbacks: list[Callback] = []
        self._lock = threading.Lock()  # guards _events and _telling
        self._events: collections.deque[MembershipEvent] = collections.deque()
        self._telling = False
        worker.on_frame(Kind.JOIN, self._on_join)
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
            self._worker.crew.submit(self._tell)

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
                except Exception:
                    log.exception("a callback of on_membership failed")

    # Joining.

    def _on_join(self, channel: Channel, frame: Frame) -> Task:
        record = unpack(unpack(frame.body, Join).record, WorkerRecord)
        return functools.partial(self._answer, channel, record)

    def _answer(self, channel: Channel, record: WorkerRecord) -> None:
        answer = (
            self._consider(record)
            if self._peers.may_be(channel, record.name)
            else Refuse(self._peers.not_for(channel, record.name))
        )
        kind = Kind.REFUSE if isinstance(answer, Refuse) else Kind.WELCOME
        if isinstance(answer, Refuse):
            log.warning("refused to let %s join: %s", record.name, answer.reason)
        with contextlib.suppress(ChannelClosedError):  # it has given up, or is gone
            channel.send(Frame(kind, 0, pack(answer)), timeout=0)

    def _consider(self, record: WorkerRecord) -> Welcome | Refuse:
        leader = self._leader()
        if leader is not self._peers.own:
            return Welcome(pack(leader.record))
        with self._worker.crew.blocking(), self._enrolling:
            if self._farewell.started:
                return Refuse("the cluster is being shut down")
            for rival in self._peers.rivals(record.name, record.id):
                what = f"there is a worker '{rival.info.name}' (id {rival.info.id}) already"
                if rival.suspicion and rival.channel is not None:
                    return Refuse(f"{what}; it may be lost: {rival.suspicion}", later=True)
                if (answer := self._sign_of(rival)) is not None:
                    return Refuse(f"{what}{answer}", later=bool(answer))
            enrolled = self._peers.enrol(record)
            problem = "all ids are taken" if enrolled is None else self._peers.admit(enrolled)
            if enrolled is None or problem:
                return Refuse(problem)
            others = tuple(pack(other) for other in self._peers.records if other.id != enrolled.id)
            return Welcome(pack(enrolled), others)

    def _leader(self) -> Peer:
        for peer in self._peers:
            if peer is self._peers.own or self._reachable(peer):
                return peer
        return self._peers.own

    def _sign_of(self, rival: Peer) -> str | None:
        """None if a worker is gone, which may not have been noticed yet; else what to say of it."""
        if rival is self._peers.own:
            return ""
        try:
            self._agent.call(rival.info, greet, None, None, self._peers.patience, mode="internal")
        except (PeerLostError, UnknownWorkerError):
            return None
        except CallTimeoutError:
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
        calls = []
        for peer in self._peers:
            if peer is not self._peers.own and not peer.lost:
                left = max(deadline - self._worker.runtime.now(), 0.001)
                with contextlib.suppress(BackhaulError):  # it is gone itself
                    calls.append(self._agent.call_async(peer.info, forget, None, None, left, mode="internal"))
        for call in calls:
            with contextlib.suppress(BackhaulError):
                call.wait()
        self._rest(deadline)  # calls that came meanwhile

    def _rest(self, deadline: float) -> None:
        idle = self._worker.runtime.gate()
        self._agent.when_idle(idle.open)
        with self._worker.blocking():
            idle.wait(max(deadline - self._worker.runtime.now(), 0.0))


class _Forgetful:
    """Attached to each worker: finds what ``forget`` acts on."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers


def attach(worker: Worker, peers: Peers) -> None:
    """Let others tell this worker that they leave."""
    worker.attach(_Forgetful(peers))


@never_dropped  # its caller may be gone by then
@internal()
def forget() -> None:
    """Called by one that leaves. It is known by its channel: nobody can speak for another."""
    answer, peers = limits.current.get(), current_worker().part(_Forgetful).peers
    if isinstance(answer, Answer) and answer.peer is not peers.own:
        peers.dismiss(answer.peer)


@internal()
def greet() -> None:
    """Called by a newcomer: by then the other has admitted it. And to see whether a worker is there."""
