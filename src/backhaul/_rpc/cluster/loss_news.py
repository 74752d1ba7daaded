"""News of workers that do not answer any more, for members that have no channel to them.

A worker whose failure detector gives another one up tells the leader: the member with the lowest id that is not lost
for it. The leader asks the members that have not told it to look. No worker is lost because another one says so: each
member without a channel tries to connect, with the patience of a call, and so does the leader before it asks anyone. So
a worker that only some members cannot reach stays a member for the others. Whom to believe is no question here: a false
report costs attempts to connect, and few at a time.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable

from backhaul._rpc.cluster.internal_calls import InternalCalls, caller
from backhaul._rpc.cluster.peers import Peer, Peers
from backhaul._rpc.security.policy import internal
from backhaul._worker.worker import Worker, current_worker
from backhaul.errors import BackhaulError

log = logging.getLogger("backhaul")

_GATHER_SECONDS = 1.0  # for other members to notice too: they need not be asked then
_PAUSE_SECONDS = 10.0  # before the leader asks the members to look for the same worker again
_RETRY_SECONDS = 1.0  # before a worker looks for another one, if it looked for too many at once
_CALL_SECONDS = 3.0
_MOST_LEADERS = 3  # members that a worker tries to tell
_MOST_LOOKS = 8  # attempts to connect at the same time
_MOST_SILENT = 1024  # workers of which the leader hears in that time


class LossNews:
    """One worker's part in it. Thread-safe.

    Args:
        worker: The worker.
        peers: The members.
        calls: Calls the members.
    """

    def __init__(self, worker: Worker, peers: Peers, calls: InternalCalls) -> None:
        self._worker = worker
        self._peers = peers
        self._calls = calls
        self._lock = threading.Lock()  # guards the two below
        self._looking: set[str] = set()  # incarnations of workers that this one tries to reach
        self._reporters: dict[str, set[str]] = {}  # at the leader: who has noticed the silence of a worker
        peers.connections.on_silent(self._on_silent)
        worker.attach(self)

    @property
    def _ending(self) -> bool:
        return self._peers.ending or self._worker.closed

    # A worker that notices.

    def _on_silent(self, silent: Peer) -> None:
        if not self._ending:
            task = functools.partial(self._worker.run, self._report, silent)
            self._worker.thread_pool.submit(task)

    def _report(self, silent: Peer) -> None:
        own, incarnation = self._peers.own, silent.record.incarnation
        with self._worker.thread_pool.blocking():
            # Not ``Membership.leader``, which would try to connect to the silent worker: calls would share its failure.
            for leader in [peer for peer in self._peers if peer is own or not peer.lost][:_MOST_LEADERS]:
                try:
                    if leader is own:
                        self.hear(own, incarnation)
                    else:
                        self._calls.call(leader, went_silent, (incarnation,), _CALL_SECONDS)
                    return
                except BackhaulError as error:
                    log.debug("could not tell worker '%s' of a silent worker: %s", leader.info.name, error)

    # The leader.

    def hear(self, reporter: Peer, incarnation: str) -> None:
        """A member says that a worker has gone silent."""
        silent = self._find(incarnation)
        with self._lock:
            known = self._reporters.get(incarnation)
            if known is not None:
                known.add(reporter.record.incarnation)
            if known is not None or silent is None or len(self._reporters) >= _MOST_SILENT:
                return
            self._reporters[incarnation] = {reporter.record.incarnation}
        self._later(_GATHER_SECONDS, self._spread, silent)

    def _later(self, seconds: float, step: Callable[[Peer], None], silent: Peer) -> None:
        task = functools.partial(self._worker.run, step, silent)
        submit = functools.partial(self._worker.thread_pool.submit, task)
        self._worker.thread_pool.call_at(self._worker.runtime.now() + seconds, submit)

    def _spread(self, silent: Peer) -> None:
        incarnation = silent.record.incarnation
        answers = False if silent.lost else self._answers(silent)
        if answers is None and not self._ending:
            self._later(_RETRY_SECONDS, self._spread, silent)
            return
        with self._lock:
            # Others that went silent at the same time would take all the time that there is.
            passed_over = self._reporters[incarnation] | self._reporters.keys()
        later = self._worker.runtime.now() + _PAUSE_SECONDS
        self._worker.thread_pool.call_at(later, functools.partial(self._forget, incarnation))
        if answers or self._ending:
            return
        asked = (
            (peer, (incarnation,))
            for peer in self._peers
            if peer is not self._peers.own and not peer.lost and peer.record.incarnation not in passed_over
        )
        with self._worker.thread_pool.blocking():
            self._calls.call_each(asked, look_for, self._worker.runtime.now() + _CALL_SECONDS)

    def _forget(self, incarnation: str) -> None:
        with self._lock:
            del self._reporters[incarnation]

    # A worker that is asked.

    def look_for(self, incarnation: str) -> None:
        """The leader cannot reach a worker: find out whether this worker can. Returns at once."""
        silent = self._find(incarnation)
        if silent is not None and not silent.channels and not silent.lost:
            self._worker.thread_pool.submit(functools.partial(self._worker.run, self._look, silent))

    def _look(self, silent: Peer) -> None:
        if not silent.channels and not silent.lost and not self._ending and self._answers(silent) is None:
            self._later(_RETRY_SECONDS, self._look, silent)

    def _answers(self, peer: Peer) -> bool | None:
        """Whether a worker can be reached. If not, it is lost for this worker then. None: it is not known yet, because
        this worker looks for it already, or for too many others.
        """
        incarnation = peer.record.incarnation
        with self._lock:
            if incarnation in self._looking or len(self._looking) >= _MOST_LOOKS:
                return None
            self._looking.add(incarnation)
        try:
            with self._worker.thread_pool.blocking():
                self._peers.channel_to(peer, self._peers.connections.answer_seconds)
        except BackhaulError:
            return False
        finally:
            with self._lock:
                self._looking.discard(incarnation)
        return True

    def _find(self, incarnation: str) -> Peer | None:
        """A member other than this worker."""
        found = (peer for peer in self._peers if peer.record.incarnation == incarnation)
        return next((peer for peer in found if peer is not self._peers.own), None)


@internal(str)
def went_silent(incarnation: str) -> None:
    """Called on the leader by a member that has given up the worker of that incarnation."""
    reporter = caller()
    if reporter is not None:
        current_worker().part(LossNews).hear(reporter, incarnation)


@internal(str)
def look_for(incarnation: str) -> None:
    """Called by the leader on a member that may not have noticed that a worker does not answer."""
    current_worker().part(LossNews).look_for(incarnation)
