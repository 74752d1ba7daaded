"""Graceful shutdown: carries the orders of ``quiesce`` out over the channels."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable

from backhaul.crew import Task
from backhaul.errors import AuthenticationError, PeerLostError, ShutdownTimeoutError
from backhaul.rpc.agent import Agent
from backhaul.rpc.dispatch import Dispatcher
from backhaul.rpc.peers import Peer
from backhaul.rpc.quiesce import Ask, Dismiss, Roundup
from backhaul.transport.base import Channel, ChannelClosedError
from backhaul.wire.frames import Frame
from backhaul.wire.messages import Count, Kind, Tally, pack, unpack
from backhaul.worker import Worker

log = logging.getLogger("backhaul")

_PARTING = 2.0  # seconds the leader gives the others to hear that it is over


class Farewell:
    """One worker's part in a graceful shutdown. Thread-safe."""

    def __init__(self, worker: Worker, agent: Agent, dispatcher: Dispatcher) -> None:
        self._worker = worker
        self._agent = agent
        self._dispatcher = dispatcher
        self._peers = {peer.record.id: peer for peer in agent.peers}
        self._leader = min(self._peers)
        self._lock = threading.Lock()  # guards _roundup and _present
        self._roundup = Roundup(self._peers) if worker.info.id == self._leader else None
        self._present = set(self._peers) - {self._leader}  # the leader's view: who has not left
        self._dismissed = worker.runtime.gate()
        self._alone = worker.runtime.gate()  # the leader's: all others have left
        self._started = False
        worker.on_frame(Kind.READY, self._on_ready)
        worker.on_frame(Kind.COUNT, self._on_count)
        worker.on_frame(Kind.TALLY, self._on_tally)
        worker.on_frame(Kind.LEAVE, self._on_leave)
        agent.peers.on_lost(self._on_lost)

    def wait(self, timeout: float) -> None:
        """Return when every worker is done. Raises ``ShutdownTimeoutError`` after ``timeout`` seconds."""
        deadline = self._worker.runtime.now() + timeout
        self._started = True
        if self._roundup is not None:
            for peer in self._peers.values():  # open a channel to everyone, so that we learn of losses
                self._worker.crew.submit(functools.partial(self._meet, peer, deadline))
        self._send(self._peers[self._leader], Frame(Kind.READY), deadline)
        if not self._dismissed.wait(deadline - self._worker.runtime.now()):
            raise self._too_late(timeout)
        if self._roundup is not None and self._present:
            self._alone.wait(min(_PARTING, max(deadline - self._worker.runtime.now(), 0.0)))

    def _too_late(self, timeout: float) -> ShutdownTimeoutError:
        if self._roundup is None:
            return ShutdownTimeoutError(
                f"worker '{self._worker.name}' waited {timeout:g} s for worker '{self._peers[self._leader].info.name}' "
                "to say that everyone is done",
                worker=self._worker.name,
                waiting_for=(self._peers[self._leader].info.name,),
            )
        with self._lock:
            names = tuple(self._peers[who].info.name for who in sorted(self._roundup.waiting_for))
        return ShutdownTimeoutError(
            f"worker '{self._worker.name}' waited {timeout:g} s for everyone to be done; still at work: "
            f"{', '.join(names)}",
            worker=self._worker.name,
            waiting_for=names,
        )

    # Frames.

    def _on_ready(self, channel: Channel, frame: Frame) -> Task | None:
        return self._advance(channel, lambda roundup, who: roundup.ready(who))

    def _on_tally(self, channel: Channel, frame: Frame) -> Task | None:
        tally = unpack(frame.body, Tally)
        return self._advance(channel, lambda roundup, who: roundup.counted(who, tally.wave, tally.sent, tally.served))

    def _on_count(self, channel: Channel, frame: Frame) -> Task | None:
        if not self._is_leader(channel):
            return None
        wave = unpack(frame.body, Count).wave

        def answer() -> None:
            tally = Tally(wave, self._agent.sent, self._dispatcher.served)
            try:
                channel.send(Frame(Kind.TALLY, 0, pack(tally)), timeout=0)
            except ChannelClosedError:
                self._dismissed.open()  # the leader is gone: nothing to wait for

        return functools.partial(self._agent.when_idle, answer)

    def _on_leave(self, channel: Channel, frame: Frame) -> None:
        if self._is_leader(channel):
            self._dismissed.open()

    def _is_leader(self, channel: Channel) -> bool:
        """Whether the one who may ask and dismiss is at the other end."""
        peer = self._agent.peers.of(channel)
        return peer is not None and peer.record.id == self._leader

    def _on_lost(self, peer: Peer, channel: Channel, reason: str) -> None:
        self._gone(peer.record.id, reason)

    def _gone(self, who: int, reason: str) -> None:
        if self._roundup is None:
            if who == self._leader and self._started and not self._dismissed.wait(0):
                log.warning("worker '%s' is gone (%s): not waiting for the others", self._peers[who].info.name, reason)
                self._dismissed.open()
            return
        with self._lock:
            left = who in self._present and (self._started or self._roundup.over)
            if not left:
                return
            self._present.discard(who)
            early = not self._roundup.over
            order = self._roundup.gone(who)
            if not self._present:
                self._alone.open()
        if early:
            log.warning("worker '%s' is gone before everyone was done: %s", self._peers[who].info.name, reason)
        self._carry_out(order)

    # Orders.

    def _advance(self, channel: Channel, event: Callable[[Roundup, int], Ask | Dismiss | None]) -> Task | None:
        peer = self._agent.peers.of(channel)
        if peer is None or self._roundup is None:
            return None
        with self._lock:
            order = event(self._roundup, peer.record.id)
        return None if order is None else functools.partial(self._carry_out, order)

    def _carry_out(self, order: Ask | Dismiss | None) -> None:
        if order is None:
            return
        frame = Frame(Kind.COUNT, 0, pack(Count(order.wave))) if isinstance(order, Ask) else Frame(Kind.LEAVE)
        deadline = self._worker.runtime.now() + self._worker.options.connect_timeout
        for who in sorted(order.to, reverse=True):  # the leader itself last
            self._send(self._peers[who], frame, deadline)

    def _meet(self, peer: Peer, deadline: float) -> None:
        self._reach(peer, deadline)

    def _reach(self, peer: Peer, deadline: float) -> Channel | None:
        try:
            return self._agent.peers.channel_to(peer, max(deadline - self._worker.runtime.now(), 0.001))
        except (PeerLostError, AuthenticationError) as error:
            if not isinstance(error.__cause__, TimeoutError):  # one that does not answer may yet come
                self._gone(peer.record.id, str(error))
            return None

    def _send(self, peer: Peer, frame: Frame, deadline: float) -> None:
        channel = self._reach(peer, deadline)
        try:
            if channel is not None:
                channel.send(frame, timeout=0)
        except ChannelClosedError as error:
            self._gone(peer.record.id, str(error))
