"""Heartbeats: looks at all channels at regular times, as ``pulse`` says what to make of it.

Costs nothing where messages go to and fro: the channels' own counters are looked at, and a heartbeat is sent only where
nothing else was.
"""

from __future__ import annotations

import contextlib
import logging
import threading

from backhaul._rpc.cluster.peers import Peer, Peers
from backhaul._rpc.liveness.failure_detector import FailureDetector, LivenessReport, Sighting
from backhaul._transport.base import Channel, ChannelClosedError
from backhaul._wire.frames import Frame
from backhaul._wire.messages import Kind
from backhaul._worker.frame_receiver import fields_only
from backhaul._worker.worker import Worker

log = logging.getLogger("backhaul")

_BEAT = Frame(Kind.BEAT)
_SIZE = _BEAT.nbytes


class Heartbeats:
    """One worker's failure detector. Begins to look when there is a channel to look at."""

    def __init__(self, worker: Worker, peers: Peers) -> None:
        options = worker.options
        self._worker = worker
        self._peers = peers
        self._interval = options.heartbeat_interval
        self._pulse: FailureDetector[Channel] = FailureDetector(
            self._interval, suspect_after=options.suspect_after, lost_after=options.lost_after
        )
        self._beaten: dict[Channel, int] = {}  # bytes of heartbeats that went out
        self.bytes_sent = 0  # the same, over all channels that ever were
        self._lock = threading.Lock()  # guards _looking, which goes with what channels there are
        self._looking = False
        worker.on_frame(Kind.BEAT, lambda channel, frame: None, check=fields_only)
        if self._interval:
            peers.on_channel(self._watch)

    @property
    def suspected(self) -> list[Peer]:
        """The workers that are suspected now."""
        return [peer for peer in self._peers if peer.suspicion]

    def _watch(self, channel: Channel) -> None:
        """There is a new channel."""
        if channel.bytes_received is None:
            return
        with self._lock:
            start, self._looking = not self._looking, True
        if start:
            self._worker.thread_pool.call_at(self._worker.runtime.now(), self._look)

    def _look(self) -> None:
        sights, owners = {}, {}
        with self._lock:
            for channel, peer in self._peers.channels():
                if channel.bytes_received is not None:
                    sent = channel.bytes_sent - self._beaten.get(channel, 0)
                    sights[channel] = Sighting(channel.bytes_received, sent, peer.record.beat)
                    owners[channel] = peer
            self._looking = bool(sights)
        self._beaten = {channel: count for channel, count in self._beaten.items() if channel in sights}
        now = self._worker.runtime.now()
        try:
            # Where something waits to be read, it is this worker that does not listen.
            self._act(self._pulse.tick(now, sights, lambda channel: channel.unread), owners)
        finally:
            if sights:
                self._worker.thread_pool.call_at(now + self._interval, self._look)

    def _act(self, found: LivenessReport[Channel], owners: dict[Channel, Peer]) -> None:
        for channel, silence in found.lost.items():
            peer = owners[channel]
            log.warning("worker '%s' is lost: no sign of life for %.1f s", peer.info.name, silence)
            limit = self._worker.options.lost_after
            channel.abort(f"no sign of life for {silence:.1f} s (lost_after={limit:g})")
        for channel in found.beat:
            if channel not in found.lost:
                self._beaten[channel] = self._beaten.get(channel, 0) + _SIZE
                self.bytes_sent += _SIZE
                with contextlib.suppress(ChannelClosedError):
                    channel.send(_BEAT, timeout=0)
        suspicions = {id(owners[channel]): silence for channel, silence in found.suspected.items()}
        for peer in {id(peer): peer for peer in owners.values()}.values():
            silence = suspicions.get(id(peer), 0.0)
            if silence and not peer.suspicion:
                log.warning("worker '%s' is suspected: no sign of life for %.1f s", peer.info.name, silence)
            elif peer.suspicion and not silence and not any(owners[channel] is peer for channel in found.lost):
                log.warning("worker '%s' is alive after all", peer.info.name)
            peer.suspicion = f"no sign of life for {silence:.1f} s" if silence else ""
