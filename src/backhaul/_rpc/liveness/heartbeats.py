"""Polls all channels at regular times and sends heartbeats; ``FailureDetector`` interprets what the channels report.

Costs nothing where messages flow in both directions: the channels count their own bytes, and a heartbeat is sent only
over a channel over which nothing else was sent. Where nothing waits, heartbeats become rarer the more channels there
are, see [Note: quiet channels].
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterable

from backhaul._rpc.cluster.peers import Peer, Peers
from backhaul._rpc.liveness.failure_detector import FailureDetector, LivenessReport, Pace, Sighting
from backhaul._transport.base import Channel, ChannelClosedError
from backhaul._wire.frames import Frame
from backhaul._wire.messages import Kind
from backhaul._worker.frame_receiver import fields_only
from backhaul._worker.worker import Worker
from backhaul.errors import BackhaulError

log = logging.getLogger("backhaul")

_BEAT_BYTES = Frame(Kind.BEAT).nbytes


class Heartbeats:
    """One worker's heartbeats. Begins to poll when there is a channel.

    Attributes:
        bytes_sent: Bytes of heartbeats, over all channels that ever existed.
        waits: Functions that return the ids of the workers for which something waits. Layers above add theirs.
    """

    def __init__(self, worker: Worker, peers: Peers) -> None:
        options = worker.options
        self._worker = worker
        self._peers = peers
        self._interval = options.liveness.heartbeat_interval
        self._detector: FailureDetector[Channel] = FailureDetector(
            self._interval,
            suspect_after=options.liveness.suspect_after,
            lost_after=options.liveness.lost_after,
            rate=options.liveness.quiet_heartbeats,
        )
        self._beat_bytes: dict[Channel, int] = {}  # bytes of heartbeats that were sent over a channel
        self._paces: dict[Channel, Pace] = {}  # what the last heartbeat that came over a channel said
        self._suspicious = False  # a peer was suspected at the last poll
        self._unwatched: set[int] = set()  # workers for which something waits, and to which there is no channel
        self.bytes_sent = 0
        self.waits: list[Callable[[], Iterable[int]]] = []
        self._lock = threading.Lock()  # guards _polling, and keeps it in step with the channels there are
        self._polling = False
        worker.on_frame(Kind.BEAT, self._on_beat, check=fields_only)
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

    def _on_beat(self, channel: Channel, frame: Frame) -> None:
        pace = Pace.read(frame.number)
        if pace is not None:
            self._paces[channel] = pace

    def _poll(self) -> None:
        waited_for = {worker for wait in self.waits for worker in wait()}
        sightings, peers = {}, {}
        with self._lock:
            for channel, peer in self._peers.connections.channels():
                received = channel.bytes_received
                if received is not None:
                    sent = channel.bytes_sent - self._beat_bytes.get(channel, 0)
                    record = peer.record
                    awaited = record.id in waited_for
                    sightings[channel] = Sighting(received, sent, record.beat, self._paces.get(channel), awaited)
                    peers[channel] = peer
            self._polling = bool(sightings)
        self._watch_all(waited_for)
        for table in (self._beat_bytes, self._paces):
            if len(table) > len(sightings):
                for channel in [channel for channel in list(table) if channel not in sightings]:
                    table.pop(channel, None)
        now = self._worker.runtime.now()
        try:
            # If bytes wait to be read, it is this worker that does not listen.
            self._act(self._detector.tick(now, sightings, lambda channel: channel.unread), peers)
        finally:
            if sightings:
                self._worker.thread_pool.call_at(now + self._interval, self._poll)

    def _watch_all(self, workers: Iterable[int]) -> None:
        """Open channels to workers for which something waits: the wait may be for what they send to others."""
        unwatched = set()
        for worker in workers:
            peer = self._peers.with_id(worker)
            if peer is not None and not peer.channels and not peer.lost:
                unwatched.add(worker)
                if worker in self._unwatched:  # for more than an interval
                    self._worker.thread_pool.submit(functools.partial(self._open_channel, peer))
        self._unwatched = unwatched

    def _open_channel(self, peer: Peer) -> None:
        with contextlib.suppress(BackhaulError):
            self._peers.channel_to(peer, self._peers.connections.answer_seconds)

    def _act(self, report: LivenessReport[Channel], peers: dict[Channel, Peer]) -> None:
        """Close the channels that are lost, send heartbeats, and note which peers are suspected."""
        for channel, silence in report.lost.items():
            log.warning("worker '%s' is lost: no sign of life for %.1f s", peers[channel].info.name, silence)
            limit = self._worker.options.liveness.lost_after
            channel.abort(f"no sign of life for {silence:.1f} s (lost_after={limit:g})")
        for channel, pace in report.beat.items():
            self._beat_bytes[channel] = self._beat_bytes.get(channel, 0) + _BEAT_BYTES
            self.bytes_sent += _BEAT_BYTES
            with contextlib.suppress(ChannelClosedError):  # also if it was lost just now
                channel.send(Frame(Kind.BEAT, pace.number), timeout=0)
        if not report.suspected and not report.lost and not self._suspicious:
            return
        self._suspicious = bool(report.suspected)
        suspicions = {id(peers[channel]): silence for channel, silence in report.suspected.items()}
        for peer in {id(peer): peer for peer in peers.values()}.values():
            silence = suspicions.get(id(peer), 0.0)
            if silence and not peer.suspicion:
                log.warning("worker '%s' is suspected: no sign of life for %.1f s", peer.info.name, silence)
            elif peer.suspicion and not silence and not any(peers[channel] is peer for channel in report.lost):
                log.warning("worker '%s' is alive after all", peer.info.name)
            peer.suspicion = f"no sign of life for {silence:.1f} s" if silence else ""
