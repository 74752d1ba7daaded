"""Graceful shutdown: carries the orders of ``quiesce`` out over the channels."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable

from backhaul._rpc.calls.client import CallClient
from backhaul._rpc.calls.server import CallServer
from backhaul._rpc.cluster.peers import Peer
from backhaul._rpc.shutdown.termination import AllowExit, RequestTallies, TerminationDetector
from backhaul._transport.base import Channel, ChannelClosedError
from backhaul._wire.frames import Frame
from backhaul._wire.messages import CallTally, Count, Kind, pack, unpack
from backhaul._worker.frame_receiver import fields_only
from backhaul._worker.thread_pool import Task
from backhaul._worker.worker import Worker
from backhaul.errors import AuthenticationError, PeerLostError, ShutdownTimeoutError

log = logging.getLogger("backhaul")

_PAUSE = 0.1  # seconds before a leader to which a channel was lost is told again
_PARTING = 2.0  # seconds the leader gives the others to hear that it is over


class GracefulShutdown:
    """One worker's part in a graceful shutdown. Thread-safe.

    The leader is the member with the lowest id that can be reached. Every worker keeps a
    ``TerminationDetector``, but only the one
    to which all others say that they are ready gets to use it.
    """

    def __init__(self, worker: Worker, client: CallClient, server: CallServer) -> None:
        self._worker = worker
        self._agent = client
        self._dispatcher = server
        members = {peer.record.id for peer in client.peers}
        self._own = int(worker.info.id)
        self._names = {peer.record.id: peer.info.name for peer in client.peers}  # of all that ever were
        self._leader: int | None = None  # whom this worker has told that it is ready
        self._lock = threading.Lock()  # guards _roundup and _present
        self._roundup = TerminationDetector(members)
        self._present = members - {self._own}  # who has not left
        self._dismissed = worker.runtime.one_shot()
        self._alone = worker.runtime.one_shot()  # the leader's: all others have left
        self._mute: set[int] = set()  # members that did not answer
        self.started = False
        worker.on_frame(Kind.READY, self._on_ready, check=fields_only)
        worker.on_frame(Kind.COUNT, self._on_count, check=fields_only)
        worker.on_frame(Kind.TALLY, self._on_tally, check=fields_only)
        worker.on_frame(Kind.LEAVE, self._on_leave, check=fields_only)
        client.peers.on_lost(self._on_lost)
        client.peers.on_change(self._on_change)

    def wait(self, timeout: float) -> None:
        """Return when every worker is done. Raises ``ShutdownTimeoutError`` after ``timeout`` seconds."""
        deadline = self._worker.runtime.now() + timeout
        self.started = True
        self._report(deadline)
        if not self._dismissed.wait(deadline - self._worker.runtime.now()):
            raise self._too_late(timeout)
        if self._leader == self._own and self._present:
            self._alone.wait(min(_PARTING, max(deadline - self._worker.runtime.now(), 0.0)))

    def _report(self, deadline: float) -> None:
        """Say to the leader that this worker is ready."""
        tried: dict[int, Peer] = {}
        leader = self._find_leader(tried, deadline)
        # In this order; who hears of a newcomer looks for the leader. So one of the two sees the other.
        self._leader = leader.record.id
        lower = [peer for peer in self._agent.peers if peer.record.id < leader.record.id]
        if any(tried.get(peer.record.id) is not peer for peer in lower):
            self._report(deadline)  # another has come in the place of one that could not be reached
            return
        if leader is not self._agent.peers.own:
            self._send(leader, Frame(Kind.READY), deadline)
            return
        for peer in self._agent.peers:  # open a channel to everyone, so that we learn of losses
            if peer.record.id not in tried and peer is not self._agent.peers.own:
                self._worker.thread_pool.submit(functools.partial(self._meet, peer, deadline))
        for who in tried:
            self._gone(who, "it cannot be reached")
        self._send(self._agent.peers.own, Frame(Kind.READY), deadline)

    def _find_leader(self, tried: dict[int, Peer], deadline: float) -> Peer:
        for peer in self._agent.peers:
            if peer is self._agent.peers.own:
                break
            tried[peer.record.id] = peer
            if self._reach(peer, deadline) is not None or self._silent(peer):
                return peer
        return self._agent.peers.own

    def _silent(self, peer: Peer) -> bool:
        """Whether a worker that was not reached did not refuse either: it may yet come."""
        return peer.record.id in self._mute

    def _too_late(self, timeout: float) -> ShutdownTimeoutError:
        if self._leader not in (None, self._own):
            leader = self._names[self._leader]
            return ShutdownTimeoutError(
                f"worker '{self._worker.name}' waited {timeout:g} s for worker '{leader}' to say that everyone is done",
                worker=self._worker.name,
                waiting_for=(leader,),
            )
        with self._lock:
            names = tuple(self._names[who] for who in sorted(self._roundup.waiting_for))
        return ShutdownTimeoutError(
            f"worker '{self._worker.name}' waited {timeout:g} s for everyone to be done; still at work: "
            f"{', '.join(names)}",
            worker=self._worker.name,
            waiting_for=names,
        )

    def _on_change(self, what: str, peer: Peer, reason: str) -> None:
        """Members come and go while some wait for all to be done."""
        who = peer.record.id
        if what == "joined":
            with self._lock:
                self._names[who] = peer.info.name
                if not self._roundup.over:
                    self._roundup.joined(who)
                    self._present.add(who)
                leader = self._leader
            if self.started and leader is not None and who < leader and not self._dismissed.opened:
                self._follow()  # the others may have heard of it earlier, and report to it
        elif what in ("left", "replaced"):
            with self._lock:
                self._present.discard(who)
                order = self._roundup.gone(who)
                follow = self.started and self._leader == who
            # Not here: who tells us has locks.
            if order is not None:
                self._worker.thread_pool.submit(functools.partial(self._carry_out, order))
            if follow:
                self._follow()

    def _follow(self) -> None:
        """There is another leader: report to it."""
        deadline = self._worker.runtime.now() + self._worker.options.connect_timeout
        self._worker.thread_pool.submit(functools.partial(self._report, deadline))

    # Frames.

    def _on_ready(self, channel: Channel, frame: Frame) -> Task | None:
        return self._advance(channel, lambda termination, who: termination.ready(who))

    def _on_tally(self, channel: Channel, frame: Frame) -> Task | None:
        tally = unpack(frame.body, CallTally)
        return self._advance(
            channel, lambda termination, who: termination.counted(who, tally.wave, tally.sent, tally.served)
        )

    def _on_count(self, channel: Channel, frame: Frame) -> Task | None:
        wave = unpack(frame.body, Count).wave
        if not self._is_leader(channel):
            return None

        def answer() -> None:
            tally = CallTally(wave, self._agent.sent, self._dispatcher.served)
            with contextlib.suppress(ChannelClosedError):  # if the leader is there it asks again
                channel.send(Frame(Kind.TALLY, 0, pack(tally)), timeout=0)

        return functools.partial(self._agent.idleness.when_idle, answer)

    def _on_leave(self, channel: Channel, frame: Frame) -> None:
        if self._is_leader(channel):
            self._dismissed.open()

    def _is_leader(self, channel: Channel) -> bool:
        """Whether the one who may ask and dismiss is at the other end."""
        peer = self._agent.peers.of(channel)
        return peer is not None and peer.record.id == self._leader

    def _on_lost(self, peer: Peer, channel: Channel, reason: str) -> None:
        if peer.gone:
            return
        refused = reason.startswith("refused: ")  # it is there and does not listen to us, nor will it
        if self._leader == peer.record.id and not self._dismissed.opened and not refused:
            # Perhaps only the channel is gone: see whether the leader is still there. If one after the other is, not
            # without a pause.
            now = self._worker.runtime.now()
            again = functools.partial(self._send, peer, Frame(Kind.READY), now + self._worker.options.connect_timeout)
            self._worker.thread_pool.call_at(now + _PAUSE, functools.partial(self._worker.thread_pool.submit, again))
        elif self._leader == self._own and not self._roundup.over and not refused:
            look = functools.partial(self._look_for, peer, reason)  # the same
            self._worker.thread_pool.call_at(
                self._worker.runtime.now() + _PAUSE, functools.partial(self._worker.thread_pool.submit, look)
            )
        else:
            self._gone(peer.record.id, reason)

    def _look_for(self, peer: Peer, reason: str) -> None:
        """The leader's: see whether a worker to which a channel was lost is still there, and tell it what it missed."""
        if self._reach(peer, self._worker.runtime.now() + self._worker.options.connect_timeout) is None:
            self._gone(peer.record.id, reason)
            return
        with self._lock:
            order = self._roundup.again(peer.record.id)
        self._carry_out(order)

    def _gone(self, who: int, reason: str) -> None:
        if self._leader == who and not self._dismissed.wait(0):
            log.warning("worker '%s' is gone (%s): not waiting for the others", self._names[who], reason)
            self._dismissed.open()
        if self._leader != self._own:
            return
        with self._lock:
            if who not in self._present:
                return
            self._present.discard(who)
            early = not self._roundup.over
            order = self._roundup.gone(who)
            if not self._present:
                self._alone.open()
        if early:
            log.warning("worker '%s' is gone before everyone was done: %s", self._names[who], reason)
        self._carry_out(order)

    # Orders.

    def _advance(
        self, channel: Channel, event: Callable[[TerminationDetector, int], RequestTallies | AllowExit | None]
    ) -> Task | None:
        peer = self._agent.peers.of(channel)
        if peer is None:
            return None
        with self._lock:
            order = event(self._roundup, peer.record.id)
        return None if order is None else functools.partial(self._carry_out, order)

    def _carry_out(self, order: RequestTallies | AllowExit | None) -> None:
        if order is None:
            return
        frame = (
            Frame(Kind.COUNT, 0, pack(Count(order.wave))) if isinstance(order, RequestTallies) else Frame(Kind.LEAVE)
        )
        deadline = self._worker.runtime.now() + self._worker.options.connect_timeout
        peers = {peer.record.id: peer for peer in self._agent.peers}
        for who in sorted(order.to, key=lambda who: (who == self._own, who)):  # the leader itself last
            if who in peers:
                self._send(peers[who], frame, deadline)

    def _meet(self, peer: Peer, deadline: float) -> None:
        self._reach(peer, deadline)

    def _reach(self, peer: Peer, deadline: float) -> Channel | None:
        try:
            return self._agent.peers.channel_to(peer, max(deadline - self._worker.runtime.now(), 0.001))
        except (PeerLostError, AuthenticationError) as error:
            if isinstance(error.__cause__, TimeoutError):  # one that does not answer may yet come
                self._mute.add(peer.record.id)
            else:
                self._gone(peer.record.id, str(error))
            return None

    def _send(self, peer: Peer, frame: Frame, deadline: float) -> None:
        channel = self._reach(peer, deadline)
        with contextlib.suppress(ChannelClosedError):  # its loss is told, and dealt with then
            if channel is not None:
                channel.send(frame, timeout=0)
