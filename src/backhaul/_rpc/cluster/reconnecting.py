"""How long to try to reach a worker that did not answer, and when to look for it in the background.

A host that is cut off does not refuse a connection, so each attempt takes all the time that it has. ``SilentPeer`` is
pure. ``Reconnecting`` makes the attempts in the background. Neither knows calls or the table of members.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from backhaul._worker.worker import Worker
from backhaul.errors import BackhaulError

if TYPE_CHECKING:
    from backhaul._rpc.cluster.peers import Peer

log = logging.getLogger("backhaul")

SHORT_SECONDS = 1.0
"""How long a call may try to reach a worker that is known not to answer."""

_FIRST_PAUSE_SECONDS = 0.5  # before the first attempt in the background; each pause is twice as long as the one before
_LONGEST_PAUSE_SECONDS = 30.0
_MOST_PROBES = 8  # attempts in the background since a call has asked for the worker


class SilentPeer:
    """Whether one worker is known not to answer, and the attempts in the background that look for it. Pure.

    Attributes:
        silent: Whether the worker is known not to answer.
        round: Changes whenever the worker is reached. Attempts that were planned before are void.
    """

    __slots__ = ("_left", "_pause", "_planned", "round", "silent")

    def __init__(self) -> None:
        self.silent = False
        self.round = 0
        self._planned = False  # whether an attempt in the background is planned or under way
        self._pause = _FIRST_PAUSE_SECONDS
        self._left = 0

    def seconds(self, wanted: float) -> float:
        """How long an attempt of a call may take that would take up to ``wanted`` seconds."""
        return min(wanted, SHORT_SECONDS) if self.silent else wanted

    def went_silent(self) -> None:
        """The failure detector has given up a channel to the worker."""
        self.silent = True

    def failed(self, took: float) -> float | None:
        """An attempt of a call has failed after so many seconds. Returns in how many seconds to try in the background;
        None: not at all, or an attempt is planned already.

        A worker that fails at once has a host that answers: that it cannot be reached is never slow to find out.
        """
        self.silent = self.silent or took >= SHORT_SECONDS
        self._left = _MOST_PROBES
        if not self.silent or self._planned:
            return None
        self._planned = True
        return self._pause

    def probe_seconds(self, longest: float) -> float:
        """How long an attempt in the background may take, where ``longest`` seconds are allowed. The first ones are
        short: a short one finds a worker that comes back sooner.
        """
        return min(2 * self._pause, longest)

    def probe_failed(self) -> float | None:
        """An attempt in the background has failed. Returns in how many seconds to make the next; None: not until a call
        asks for the worker again.
        """
        self._left -= 1
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS)
        self._planned = self._left > 0
        return self._pause if self._planned else None

    def reached(self) -> None:
        """There is a channel to the worker again, whoever opened it."""
        self.silent = self._planned = False
        self._pause = _FIRST_PAUSE_SECONDS
        self.round += 1


class Reconnecting:
    """Looks for the silent peers of one worker. Thread-safe.

    Args:
        worker: The worker.
        connect: Opens a channel to a peer within some seconds, or raises ``BackhaulError``.
        longest: The most seconds that an attempt may take.
    """

    def __init__(self, worker: Worker, connect: Callable[[Peer, float], Any], longest: Callable[[], float]) -> None:
        self._worker = worker
        self._connect = connect
        self._longest = longest
        self._lock = threading.Lock()  # guards the ``SilentPeer`` of all peers

    def seconds(self, peer: Peer, wanted: float) -> float:
        """See ``SilentPeer.seconds``."""
        return peer.attempts.silence.seconds(wanted)

    def failed(self, peer: Peer, took: float) -> None:
        """An attempt of a call has failed."""
        with self._lock:
            silence = peer.attempts.silence
            pause = silence.failed(took)
        self._plan(peer, pause, silence.round)

    def went_silent(self, peer: Peer) -> None:
        """The failure detector has given up the last channel to a peer."""
        with self._lock:
            peer.attempts.silence.went_silent()

    def reached(self, peer: Peer) -> None:
        """There is a channel to a peer."""
        with self._lock:
            peer.attempts.silence.reached()

    def _plan(self, peer: Peer, pause: float | None, current: int) -> None:
        if pause is not None and not self._worker.closed:
            task = functools.partial(self._worker.thread_pool.submit, functools.partial(self._probe, peer, current))
            self._worker.thread_pool.call_at(self._worker.runtime.now() + pause, task)

    def _probe(self, peer: Peer, current: int) -> None:
        silence = peer.attempts.silence
        if silence.round != current or peer.gone or peer.channel is not None or self._worker.closed:
            return
        try:
            with self._worker.thread_pool.blocking():
                self._worker.run(self._connect, peer, silence.probe_seconds(self._longest()))
        except BackhaulError as error:
            log.debug("worker '%s' is still lost: %s", peer.info.name, error)
        with self._lock:
            pause = silence.probe_failed() if silence.round == current else None
        self._plan(peer, pause, current)
