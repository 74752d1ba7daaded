"""Tells the program which workers join, leave and are lost."""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from backhaul._rpc.cluster.peers import Peer, Peers
from backhaul._types import WorkerInfo
from backhaul._worker.worker import Worker

log = logging.getLogger("backhaul")


@dataclass(frozen=True, slots=True)
class MembershipEvent:
    """What happened to a worker of the cluster.

    Attributes:
        kind: ``"joined"``: it can be called from now on, also after it was lost or restarted. ``"left"``: it has called
            ``leave``. ``"lost"``: its channel closed or it was silent for too long.
        worker: Which one.
        reason: An explanation for people.

    Example:
        >>> import backhaul as bh
        >>> with bh.cluster(["first", "second"]) as (first, second):
        ...     seen = []
        ...     stop = bh.on_membership(seen.append)
        ...     second.run(bh.leave)
        >>> seen[0].kind, seen[0].worker.name
        ('left', 'second')
    """

    kind: Literal["joined", "left", "lost"]
    worker: WorkerInfo
    reason: str = ""


Callback = Callable[[MembershipEvent], None]


class MembershipEvents:
    """The callbacks of one worker's program. Thread-safe. Callbacks run one after the other, on the thread pool."""

    def __init__(self, worker: Worker, peers: Peers) -> None:
        self._worker = worker
        self._peers = peers
        self._callbacks: list[Callback] = []
        self._lock = threading.Lock()  # guards _events and _delivering
        self._events: collections.deque[MembershipEvent] = collections.deque()
        self._delivering = False
        worker.attach(self)
        peers.on_change(self._on_change)

    def subscribe(self, callback: Callback) -> Callable[[], None]:
        """Call ``callback`` with each event; returns a function that ends the subscription."""
        self._callbacks.append(callback)

        def end() -> None:
            with contextlib.suppress(ValueError):
                self._callbacks.remove(callback)

        return end

    def _on_change(self, what: str, peer: Peer, reason: str) -> None:
        if self._peers.shutting_down or self._worker.closed:
            return  # all members end
        if what == "replaced":
            if peer.lost:
                return  # the callbacks know already
            what = "lost"
        kind: Literal["joined", "left", "lost"] = what  # type: ignore[assignment]
        log.info(
            "worker '%s' has %s: %s",
            *(peer.info.name, "been lost" if what == "lost" else what, reason),
            extra={"worker": self._worker.name, "peer": peer.info.name},
        )
        if not self._callbacks:
            return
        with self._lock:
            self._events.append(MembershipEvent(kind, peer.info, reason))
            start, self._delivering = not self._delivering, True
        if start:
            self._worker.thread_pool.submit(self._deliver)

    def _deliver(self) -> None:
        while True:
            with self._lock:
                if not self._events:
                    self._delivering = False
                    return
                event = self._events.popleft()
            for callback in list(self._callbacks):
                try:
                    self._worker.run(callback, event)
                except BaseException:  # user code may raise anything; later events must still be delivered
                    log.exception("a callback of on_membership failed")
