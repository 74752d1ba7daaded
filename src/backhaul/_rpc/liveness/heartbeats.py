"""Polls all channels at regular times and sends heartbeats; ``FailureDetector`` interprets what the channels report.

Costs nothing where messages flow in both directions: the channels count their own bytes, and a heartbeat is sent only
over a channel over which nothing else was sent.
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
_BEAT_BYTES = _BEAT.nbytes


class Heartbeats:
    """One worker's heartbeats. Begins to poll when there is a channel.

    Attributes:
        bytes_sent: Bytes of heartbeats, over all channels that ever existed.
    """

    def __init__(self, worker: Worker, peers: Peers) -> None:
        options = worker.options
        self._worker = worker
        self._peers = peers
        self._interval = options.liveness.heartbeat_interval
        self._detector: FailureDetector[Channel] = FailureDetector(
            self._interval, suspect_after=options.liveness.suspect_after, lost_after=options.liveness.lost_after
        )
        self._beat_bytes: dict[Channel, int] = {}  # bytes of heartbeats that were sent over a channel
        self.bytes_sent = 0
        self._lock = threading.Lock()  # guards _polling, and keeps it in step with the channels there are
        self._polling = False
        worker.on_frame(Kind.BEAT, lambda channel, frame: None, check=fields_only)
        if self._interval:
            peers.connections.on_channel(self._watch)

    @property
    def suspected(self) -> list[Peer]:
        """The workers that are suspected now."""
        return [peer for peer in self._peers if peer.suspicion]

    def _watch(self, channel: Channel) -> None:
        """There is a new channel."""
        if channel.bytes_received is None:
            return
        with self._lock:
            start, self._polling = not self._polling, True
        if start:
            self._worker.thread_pool.call_at(self._worker.runtime.now(), self._poll)

    def _poll(self) -> None:
        sightings, peers = {}, {}
        with self._lock:
            for channel, peer in self._peers.connections.channels():
                if channel.bytes_received is not None:
                    sent = channel.bytes_sent - self._beat_bytes.get(channel, 0)
                    sightings[channel] = Sighting(channel.bytes_received, sent, peer.record.beat)
                    peers[channel] = peer
            self._polling = bool(sightings)
        self._beat_bytes = {channel: count for channel, count in self._beat_bytes.items() if channel in sightings}
        now = self._worker.runtime.now()
        try:
            # If bytes wait to be read, it is this worker that does not listen.
            self._act(self._detector.tick(now, sightings, lambda channel: channel.unread), peers)
        finally:
            if sightings:
                self._worker.thread_pool.call_at(now + self._interval, self._poll)

    def _act(self, report: LivenessReport[Channel], peers: dict[Channel, Peer]) -> None:
        """Close the channels that are lost, send heartbeats, and note which peers are suspected."""
        for channel, silence in report.lost.items():
            log.warning("worker '%s' is lost: no sign of life for %.1f s", peers[channel].info.name, silence)
            limit = self._worker.options.liveness.lost_after
            self._peers.connections.give_up(channel, f"no sign of life for {silence:.1f} s (lost_after={limit:g})")
        for channel in report.beat:
            if channel not in report.lost:
                self._beat_bytes[channel] = self._beat_bytes.get(channel, 0) + _BEAT_BYTES
                self.bytes_sent += _BEAT_BYTES
                with contextlib.suppress(ChannelClosedError):
                    channel.send(_BEAT, timeout=0)
        suspicions = {id(peers[channel]): silence for channel, silence in report.suspected.items()}
        for peer in {id(peer): peer for peer in peers.values()}.values():
            silence = suspicions.get(id(peer), 0.0)
            if silence and not peer.suspicion:
                log.warning("worker '%s' is suspected: no sign of life for %.1f s", peer.info.name, silence)
            elif peer.suspicion and not silence and not any(peers[channel] is peer for channel in report.lost):
                log.warning("worker '%s' is alive after all", peer.info.name)
            peer.suspicion = f"no sign of life for {silence:.1f} s" if silence else ""
