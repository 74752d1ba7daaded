"""Keeps channels of a worker that cannot be dialed to its anchors, so that others find it there (``relay_choice``)."""

from __future__ import annotations

import functools
import logging
import threading

from backhaul._rpc.cluster.peers import Peer, Peers
from backhaul._rpc.cluster.relay_choice import ANCHORS, anchors_of
from backhaul._worker.worker import Worker
from backhaul.errors import BackhaulError

log = logging.getLogger("backhaul")

_FIRST_PAUSE_SECONDS = 0.25  # before anchors that cannot be reached are tried again
_LONGEST_PAUSE_SECONDS = 5.0


class Anchoring:
    """Opens channels to the anchors of one worker again and again. Does nothing for a worker that listens. Thread-safe.

    While an anchor cannot be reached, the next member takes its place. When it can be reached again it becomes an
    anchor again; other channels stay open as long as they last.
    """

    def __init__(self, worker: Worker, peers: Peers) -> None:
        self._worker = worker
        self._peers = peers
        self._lock = threading.Lock()  # guards the three below
        self._looking = False  # a look is under way or planned at once
        self._again = False  # something has changed since the look began
        self._round = 0  # looks that were planned before are void
        if not peers.own.record.listens:
            peers.on_lost(lambda peer, channel, reason: self.look())
            peers.on_change(lambda what, peer, reason: self.look())

    def look(self) -> None:
        """Look now whether anchors are missing."""
        if self._peers.own.record.listens or self._worker.closed or self._peers.ending:
            return
        with self._lock:
            self._again, start = True, not self._looking
            self._looking = True
        if start:
            self._worker.thread_pool.submit(functools.partial(self._look, _FIRST_PAUSE_SECONDS))

    def _look(self, pause: float) -> None:
        complete = True
        while True:
            with self._lock:
                if not self._again or self._worker.closed or self._peers.ending:
                    self._looking = False
                    self._round += 1
                    current = self._round
                    break
                self._again = False
            with self._worker.thread_pool.blocking():
                complete = self._worker.run(self._open_channels)
        if not complete and not self._worker.closed:
            later = functools.partial(self._look_later, current, min(2 * pause, _LONGEST_PAUSE_SECONDS))
            self._worker.thread_pool.call_at(self._worker.runtime.now() + pause, later)

    def _look_later(self, current: int, pause: float) -> None:
        with self._lock:
            if self._round != current or self._looking:
                return
            self._looking = self._again = True
        self._worker.thread_pool.submit(functools.partial(self._look, pause))

    def _open_channels(self) -> bool:
        """Open channels to the first anchors that can be reached. Returns whether all of the first choice have one."""
        own = self._peers.own.record
        wanted = anchors_of(own, self._peers.records)
        held = 0
        for place, record in enumerate(wanted):
            if held == ANCHORS or self._peers.ending:
                return place == ANCHORS
            peer = self._peers.with_id(record.id)
            held += peer is not None and peer.record.incarnation == record.incarnation and self._reaches(peer)
        return held >= min(ANCHORS, len(wanted))

    def _reaches(self, peer: Peer) -> bool:
        try:
            self._peers.channel_to(peer, self._peers.connections.answer_seconds)
            return True
        except BackhaulError as error:
            log.debug("worker '%s' cannot be an anchor now: %s", peer.info.name, error)
            return False
