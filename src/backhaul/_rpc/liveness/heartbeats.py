"""Polls all channels at regular times and sends heartbeats; ``FailureDetector`` interprets what the channels report.

Costs nothing where messages flow in both directions: the channels count their own bytes, and a heartbeat is sent only
over a channel over which nothing else was sent. Where nothing waits, heartbeats become rarer the more channels there
are, see [Note: quiet channels].
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterable

from backhaul._rpc.cluster.peers import Peer, Peers
from backhaul._rpc.liveness.failure_detector import QUIET_TICK, FailureDetector, LivenessReport, Pace, Sighting
from backhaul._transport.base import Channel, ChannelClosedError
from backhaul._wire.frames import Frame
from backhaul._wire.messages import Kind
from backhaul._worker.frame_receiver import fields_only
from backhaul._worker.worker import Worker
from backhaul.errors import BackhaulError

log = logging.getLogger("backhaul")

_BEAT_BYTES = Frame(Kind.BEAT).nbytes


class _WatchedChannel:
    """A channel, and what it showed when the detector last looked at it.

    Attributes:
        received, sent, seen: Bytes that were received and sent, and the pace.
        pace: What the last heartbeat that came said.
        beats: Bytes of heartbeats that were sent.
        look_at: When the detector looks again, even if nothing changes.
    """

    __slots__ = ("beats", "look_at", "pace", "peer", "received", "seen", "sent")

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.received = self.sent = -1
        self.seen: Pace | None = None
        self.pace: Pace | None = None
        self.beats = 0
        self.look_at = 0.0


class PollSchedule:
    """When the channels are polled: once in an interval, and less often while all of them are quiet. Thread-safe; one
    poll runs at a time.

    Args:
        worker: Whose thread pool polls.
        interval: Seconds from one poll to the next.
        poll: Called with the time; returns whether all channels are quiet.
        needed: Whether there is anything to poll.
    """

    def __init__(
        self, worker: Worker, interval: float, poll: Callable[[float], bool], needed: Callable[[], bool]
    ) -> None:
        self._worker = worker
        self._interval = interval
        self._poll = poll
        self._needed = needed
        self._lock = threading.Lock()  # guards the three below, and keeps them in step with ``needed``
        self._polling = False
        self._next = 0  # the number of the poll that comes next; any other is void
        self._calm = False  # the next poll comes late

    def hurry(self) -> None:
        """Poll now, unless the next poll comes within an interval anyway."""
        if self._polling and not self._calm:
            return
        with self._lock:
            if self._polling and not self._calm:
                return
            self._polling, self._calm = True, False
            self._next += 1
            poll = functools.partial(self._run, self._next)
        self._worker.thread_pool.call_at(self._worker.runtime.now(), poll)

    def _run(self, number: int) -> None:
        with self._lock:
            if number != self._next:
                return
            self._calm = False  # no other poll begins while this one runs
        now, calm = self._worker.runtime.now(), False
        try:
            calm = self._poll(now)
        finally:
            with self._lock:
                self._polling = again = self._needed()
                self._calm = calm and again
                self._next += 1
                poll = functools.partial(self._run, self._next)
            if again:
                self._worker.thread_pool.call_at(now + self._interval * (QUIET_TICK if calm else 1), poll)


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
            quiet_above=options.liveness.quiet_above,
        )
        self._watches: dict[Channel, _WatchedChannel] = {}
        self._gone: collections.deque[Channel] = collections.deque()  # channels that were lost since the last poll
        self._suspicious = False  # a peer was suspected at the last poll
        self._unwatched: set[int] = set()  # workers for which something waits, and to which there is no channel
        self.bytes_sent = 0
        self.waits: list[Callable[[], Iterable[int]]] = []
        self._schedule = PollSchedule(worker, self._interval, self._poll, needed=lambda: bool(self._watches))
        worker.on_frame(Kind.BEAT, self._on_beat, check=fields_only)
        if self._interval:
            peers.connections.on_channel(self._watch)
            peers.on_lost(self._on_lost)

    @property
    def suspected(self) -> list[Peer]:
        """The workers that are suspected now."""
        return [peer for peer in self._peers if peer.suspicion]

    def _watch(self, channel: Channel) -> None:
        """There is a new channel."""
        if channel.bytes_received is not None and self._watch_of(channel) is not None:
            self._schedule.hurry()

    def _watch_of(self, channel: Channel) -> _WatchedChannel | None:
        watch = self._watches.get(channel)
        if watch is None and self._interval and (peer := self._peers.of(channel)) is not None:
            watch = self._watches.setdefault(channel, _WatchedChannel(peer))
        return watch

    def _on_beat(self, channel: Channel, frame: Frame) -> None:
        watch = self._watch_of(channel)  # the first heartbeat may come before this worker hears of the channel
        if watch is not None:
            watch.pace = pace = Pace.read(frame.number)
            if pace is not None and pace.waits:
                self._schedule.hurry()

    def _on_lost(self, peer: Peer, channel: Channel, reason: str) -> None:
        if self._watches.pop(channel, None) is not None:
            self._gone.append(channel)

    def _poll(self, now: float) -> bool:
        """Returns whether all channels are quiet."""
        waited_for = {worker for wait in self.waits for worker in wait()}
        sightings = self._look(now, waited_for)
        # If bytes wait to be read, it is this worker that does not listen.
        report = self._detector.tick(now, sightings, lambda channel: channel.unread)
        self._act(report)
        return not waited_for and all(look_at > now for look_at in report.look_at.values())

    def _look(self, now: float, waited_for: set[int]) -> dict[Channel, Sighting]:
        """The channels at which the detector has to look."""
        if waited_for or self._unwatched:
            self._watch_all(waited_for)
        while self._gone:
            self._detector.forget(self._gone.popleft())
        found = {}
        for channel, watch in list(self._watches.items()):  # many, and most of them have not changed
            received, sent, pace = channel.bytes_received, channel.bytes_sent, watch.pace
            same = received == watch.received and sent == watch.sent and pace is watch.seen and now < watch.look_at
            if same and (not waited_for or watch.peer.record.id not in waited_for):
                continue
            if received is None or self._peers.of(channel) is None:
                self._watches.pop(channel, None)
                self._detector.forget(channel)
                continue
            watch.received, watch.sent, watch.seen = received, sent, pace
            record = watch.peer.record
            found[channel] = Sighting(received, sent - watch.beats, record.beat, pace, record.id in waited_for)
        return found

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

    def _act(self, report: LivenessReport[Channel]) -> None:
        """Close the channels that are lost, send heartbeats, and note which peers are suspected."""
        watches, lost = self._watches, set()
        for channel, silence in report.lost.items():
            watch = watches.pop(channel, None)  # None: the channel was lost just now
            if watch is not None:
                lost.add(watch.peer)
                name = watch.peer.info.name
                log.warning("worker '%s' is lost: no sign of life for %.1f s", name, silence, extra=self._fields(name))
                limit = self._worker.options.liveness.lost_after
                reason = f"no sign of life for {silence:.1f} s (lost_after={limit:g})"
                self._peers.connections.give_up(channel, reason)
        for channel, look_at in report.look_at.items():
            watch = watches.get(channel)
            if watch is not None:
                watch.look_at = look_at
        for channel, pace in report.beat.items():
            watch = watches.get(channel)
            if watch is not None:
                watch.beats += _BEAT_BYTES
                self.bytes_sent += _BEAT_BYTES
                with contextlib.suppress(ChannelClosedError):
                    channel.send(Frame(Kind.BEAT, pace.number), timeout=0)
                watch.sent = channel.bytes_sent
        if report.suspected or self._suspicious:
            silences = {
                watch.peer: silence
                for channel, silence in report.suspected.items()
                if (watch := watches.get(channel)) is not None
            }
            self._note_suspicions(silences, lost)
            self._suspicious = bool(report.suspected)

    def _fields(self, peer: str) -> dict[str, str]:
        """The fields of a log record about a peer."""
        return {"worker": self._worker.name, "peer": peer}

    def _note_suspicions(self, silences: dict[Peer, float], lost: set[Peer]) -> None:
        for peer in dict.fromkeys(watch.peer for watch in list(self._watches.values())):
            silence = silences.get(peer, 0.0)
            if silence and not peer.suspicion:
                name = peer.info.name
                log.warning(
                    "worker '%s' is suspected: no sign of life for %.1f s", name, silence, extra=self._fields(name)
                )
            elif peer.suspicion and not silence and peer not in lost:
                log.warning("worker '%s' is alive after all", peer.info.name, extra=self._fields(peer.info.name))
            peer.suspicion = f"no sign of life for {silence:.1f} s" if silence else ""
