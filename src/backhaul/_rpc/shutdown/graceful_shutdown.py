"""Graceful shutdown of the whole cluster: exchanges the messages that ``termination`` asks for.

The leader is the first member by seniority that can be reached. All members tell it that they are ready; it asks for
tallies until nothing is under way anywhere, and then allows all of them to exit.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable

from backhaul._rpc.calls.client import CallClient
from backhaul._rpc.calls.server import CallServer
from backhaul._rpc.cluster.peers import Peer
from backhaul._rpc.shutdown.lost_members import LostMembers
from backhaul._rpc.shutdown.termination import AllowExit, RequestTallies, TerminationDetector
from backhaul._transport.base import Channel, ChannelClosedError
from backhaul._wire.frames import Frame
from backhaul._wire.messages import AllDone, CallTally, Count, Kind, pack, unpack
from backhaul._worker.frame_receiver import fields_only
from backhaul._worker.thread_pool import Task
from backhaul._worker.worker import Worker
from backhaul.errors import AuthenticationError, PeerLostError, ShutdownTimeoutError

log = logging.getLogger("backhaul")

_RETRY_SECONDS = 0.1  # before a worker to which a channel was lost is contacted again
_PARTING_SECONDS = 2.0  # that the leader gives the others to hear that all may exit

_REFUSED = "refused: "  # begins the reason of a worker that is there and does not accept this one

Instruction = RequestTallies | AllowExit | None


# Over the limit because each frame and each event of the protocol has one method.
class GracefulShutdown:
    """One worker's part in a graceful shutdown. Thread-safe.

    Every worker keeps a ``TerminationDetector``, but only the leader's gets to hear of all members.

    Attributes:
        lost: The members that were lost before all were done. Complete once ``wait`` has returned.
    """

    def __init__(self, worker: Worker, client: CallClient, server: CallServer) -> None:
        self._worker = worker
        self._client = client
        self._server = server
        self._peers = client.peers
        members = {peer.record.id for peer in client.peers}
        self._names = {peer.record.id: peer.info.name for peer in client.peers}  # of all workers that ever were members
        self.lost = LostMembers()  # guarded by _lock until wait returns
        self._leader: int | None = None  # the member to which this worker reports
        self._lock = threading.Lock()  # guards _detector and _present
        self._detector = TerminationDetector(members)
        self._present = members - {self._peers.own.record.id}  # members that have not exited
        self._may_exit = worker.runtime.one_shot()
        self._alone = worker.runtime.one_shot()  # on the leader: all others have exited
        self._unanswered: set[int] = set()  # members that did not answer, and did not refuse either
        worker.on_frame(Kind.READY, self._on_ready, check=fields_only)
        worker.on_frame(Kind.COUNT, self._on_count, check=fields_only)
        worker.on_frame(Kind.TALLY, self._on_tally, check=fields_only)
        worker.on_frame(Kind.LEAVE, self._on_leave, check=fields_only)
        client.peers.on_lost(self._on_lost)
        client.peers.on_change(self._on_change)

    def wait(self, timeout: float) -> None:
        """Return when every worker is done. Raises ``ShutdownTimeoutError`` after ``timeout`` seconds."""
        deadline = self._worker.runtime.now() + timeout
        self._peers.shutting_down = True
        self._report(deadline)
        if not self._may_exit.wait(deadline - self._worker.runtime.now()):
            raise self._timed_out(timeout)
        self._peers.ending = True
        if self._leader == self._peers.own.record.id and self._present:
            self._alone.wait(min(_PARTING_SECONDS, max(deadline - self._worker.runtime.now(), 0.0)))

    def _timed_out(self, timeout: float) -> ShutdownTimeoutError:
        waited = f"worker '{self._worker.name}' waited {timeout:g} s"
        if self._leader not in (None, self._peers.own.record.id):
            leader = self._names[self._leader]
            why = f"{waited} for worker '{leader}' to say that everyone is done"
            return ShutdownTimeoutError(why, worker=self._worker.name, waiting_for=(leader,))
        with self._lock:
            names = tuple(self._names[member] for member in sorted(self._detector.waiting_for))
        why = f"{waited} for everyone to be done; still at work: {', '.join(names)}"
        return ShutdownTimeoutError(why, worker=self._worker.name, waiting_for=names)

    # Reporting to the leader.

    def _report(self, deadline: float) -> None:
        """Tell the leader that this worker is ready."""
        tried: dict[int, Peer] = {}
        leader = self._find_leader(tried, deadline)
        # In this order: a thread that hears of a joiner compares it with _leader. So one of the two threads sees what
        # the other has done.
        self._leader = leader.record.id
        lower = [peer for peer in self._peers if peer.record.seniority < leader.record.seniority]
        if any(tried.get(peer.record.id) is not peer for peer in lower):
            self._report(deadline)  # another worker has come in the place of one that could not be reached
            return
        if leader is not self._peers.own:
            self._send(leader, Frame(Kind.READY), deadline)
            return
        # Every member hears that the leader is ready. And the leader has a channel to each, so that it hears of losses.
        for peer in self._peers:
            if peer.record.id not in tried and peer is not self._peers.own:
                self._worker.thread_pool.submit(functools.partial(self._send, peer, Frame(Kind.READY), deadline))
        for member in tried:
            self._on_gone(member, "it cannot be reached")
        self._send(self._peers.own, Frame(Kind.READY), deadline)

    def _find_leader(self, tried: dict[int, Peer], deadline: float) -> Peer:
        """The first member by seniority that can be reached, or that did not answer: such a member may still come."""
        for peer in self._peers:
            if peer is self._peers.own:
                break
            tried[peer.record.id] = peer
            known = bool(peer.lost)  # then the program of this worker has gone on without it
            if self._reach(peer, deadline) is not None or peer.record.id in self._unanswered:
                return peer
            if not known and peer.lost:
                with self._lock:
                    self.lost.add(peer.info.name, peer.lost, leader=True)
        return self._peers.own

    def _report_again(self) -> None:
        """There is another leader: report to it."""
        deadline = self._worker.runtime.now() + self._worker.options.connect_timeout
        self._worker.thread_pool.submit(functools.partial(self._report, deadline))

    # Members come and go.

    def _on_change(self, what: str, peer: Peer, reason: str) -> None:
        """Members may come and go while some wait for all to be done."""
        member = peer.record.id
        if what != "lost":
            with self._lock:
                self.lost.remove(peer.info.name)
        if what == "joined":
            with self._lock:
                self._names[member] = peer.info.name
                if not self._detector.over:
                    self._detector.joined(member)
                    self._present.add(member)
                leader = None if self._leader is None else self._peers.with_id(self._leader)
            senior = leader is not None and peer.record.seniority < leader.record.seniority
            if self._peers.shutting_down and senior and not self._may_exit.opened:
                self._report_again()  # other members may have heard of it earlier, and report to it
        elif what in ("left", "replaced"):
            with self._lock:
                self._present.discard(member)
                instruction = self._detector.gone(member)
                lost_leader = self._peers.shutting_down and self._leader == member
            # On another thread: the caller of this listener holds locks.
            if instruction is not None:
                self._worker.thread_pool.submit(functools.partial(self._carry_out, instruction))
            if lost_leader:
                self._report_again()

    def _on_lost(self, peer: Peer, channel: Channel, reason: str) -> None:
        """A channel is lost. The worker may still be there: find out after a pause, since it may lose several."""
        if peer.gone:
            return
        refused = reason.startswith(_REFUSED)  # the worker is there, and will not accept this one
        if self._leader == peer.record.id and not self._may_exit.opened and not refused:
            deadline = self._worker.runtime.now() + self._worker.options.connect_timeout
            self._retry(functools.partial(self._send, peer, Frame(Kind.READY), deadline))
        elif self._leader == self._peers.own.record.id and not self._detector.over and not refused:
            self._retry(functools.partial(self._look_for, peer, reason))
        else:
            self._on_gone(peer.record.id, reason)

    def _retry(self, task: Task) -> None:
        at = self._worker.runtime.now() + _RETRY_SECONDS
        self._worker.thread_pool.call_at(at, functools.partial(self._worker.thread_pool.submit, task))

    def _look_for(self, peer: Peer, reason: str) -> None:
        """On the leader: see whether a worker to which a channel was lost is still there, and repeat what it missed."""
        if self._reach(peer, self._worker.runtime.now() + self._worker.options.connect_timeout) is None:
            self._on_gone(peer.record.id, reason)
            return
        with self._lock:
            instruction = self._detector.again(peer.record.id)
        self._carry_out(instruction)

    def _on_gone(self, member: int, reason: str) -> None:
        if self._leader == member and not self._may_exit.wait(0):
            name = self._names[member]
            log.warning("worker '%s' is gone (%s): not waiting for the others", name, reason, extra={"peer": name})
            if not reason.startswith(_REFUSED):
                with self._lock:
                    self.lost.add(self._names[member], reason, leader=True)
            self._may_exit.open()
        if self._leader != self._peers.own.record.id:
            return
        with self._lock:
            if member not in self._present:
                return
            self._present.discard(member)
            early = not self._detector.over
            if early and not reason.startswith(_REFUSED):
                self.lost.add(self._names[member], reason)
            instruction = self._detector.gone(member)
            if not self._present:
                self._alone.open()
        if early:
            name = self._names[member]
            log.warning("worker '%s' is gone before everyone was done: %s", name, reason, extra={"peer": name})
        self._carry_out(instruction)

    # Frames.

    def _on_ready(self, channel: Channel, frame: Frame) -> Task | None:
        peer = self._peers.of(channel)
        if peer is not None:
            with self._lock:
                self.lost.ready(peer.info.name)
        return self._advance(channel, lambda detector, member: detector.ready(member))

    def _on_tally(self, channel: Channel, frame: Frame) -> Task | None:
        tally = unpack(frame.body, CallTally)
        return self._advance(
            channel, lambda detector, member: detector.counted(member, tally.wave, tally.sent, tally.served)
        )

    def _on_count(self, channel: Channel, frame: Frame) -> Task | None:
        wave = unpack(frame.body, Count).wave
        if not self._is_leader(channel):
            return None

        def answer() -> None:
            tally = CallTally(wave, self._client.sent, self._server.served)
            with contextlib.suppress(ChannelClosedError):  # if the leader is still there, it asks again
                channel.send(Frame(Kind.TALLY, 0, pack(tally)), timeout=0)

        return functools.partial(self._client.idleness.when_idle, answer)

    def _on_leave(self, channel: Channel, frame: Frame) -> None:
        if self._is_leader(channel):
            with self._lock:
                for name, reason in unpack(frame.body, AllDone).lost.items():
                    self.lost.add(name, reason)
            self._may_exit.open()

    def _is_leader(self, channel: Channel) -> bool:
        """Whether the leader is at the other end. Only the leader may ask for tallies and allow to exit."""
        peer = self._peers.of(channel)
        return peer is not None and peer.record.id == self._leader

    # Instructions of the detector.

    def _advance(self, channel: Channel, event: Callable[[TerminationDetector, int], Instruction]) -> Task | None:
        peer = self._peers.of(channel)
        if peer is None:
            return None
        with self._lock:
            instruction = event(self._detector, peer.record.id)
        return None if instruction is None else functools.partial(self._carry_out, instruction)

    def _carry_out(self, instruction: Instruction) -> None:
        if instruction is None:
            return
        if isinstance(instruction, RequestTallies):
            frame = Frame(Kind.COUNT, 0, pack(Count(instruction.wave)))
        else:
            self._peers.ending = True
            with self._lock:
                frame = Frame(Kind.LEAVE, 0, pack(AllDone(dict(self.lost.reasons))))
        deadline = self._worker.runtime.now() + self._worker.options.connect_timeout
        peers = {peer.record.id: peer for peer in self._peers}
        for member in sorted(
            instruction.to, key=lambda member: (member == self._peers.own.record.id, member)
        ):  # the leader last
            if member in peers:
                self._send(peers[member], frame, deadline)

    def _send(self, peer: Peer, frame: Frame, deadline: float) -> None:
        channel = self._reach(peer, deadline)
        with contextlib.suppress(ChannelClosedError):  # _on_lost hears of it
            if channel is not None:
                channel.send(frame, timeout=0)

    def _reach(self, peer: Peer, deadline: float) -> Channel | None:
        try:
            return self._peers.channel_to(peer, max(deadline - self._worker.runtime.now(), 0.001))
        except (PeerLostError, AuthenticationError) as error:
            if isinstance(error.__cause__, TimeoutError):  # it does not answer, and may still come
                self._unanswered.add(peer.record.id)
            else:
                self._on_gone(peer.record.id, str(error))
            return None
