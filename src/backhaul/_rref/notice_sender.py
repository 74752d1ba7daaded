"""Delivers notices about references to the owners of the values, and repeats them until the owners have them.

A frame of notices has no answer. If its channel is lost, the notices that the owner has not acknowledged go out again,
as a call. Now and then a notice goes as a call anyway: its result says which notices the owner has.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from backhaul._rpc.calls.client import CallClient
from backhaul._rpc.cluster.peers import Peer
from backhaul._rpc.futures import Future
from backhaul._rref.members import find_member, is_gone
from backhaul._rref.notices import MAX_UNACKNOWLEDGED, Notice, NoticeOutbox, Notices, RRefKind
from backhaul._rref.ownership import Identity, Update
from backhaul._transport.base import ChannelClosedError
from backhaul._wire.frames import Frame
from backhaul._wire.messages import pack
from backhaul._worker.worker import Worker
from backhaul.errors import BackhaulError, NotInitializedError, UnknownWorkerError

log = logging.getLogger("backhaul")

MAX_TRIES = 12  # attempts to deliver a notice or a question, over as many channels
_MAX_UPDATES = 1000  # in a frame of notices; a call with more of them is checked against the limits of the owner
_AWAITED_TRIES = 5  # retries that a shutdown waits for
_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.05, 5.0  # between attempts; each pause is twice as long as the last


class NoticeSender:
    """One worker's notices, by owner. Thread-safe.

    Args:
        worker: The worker.
        client: Its client.
        lock: Guards the outboxes. Shared with the tables of forks, because a fork and the notice about it change
            together.
        apply_own: Applies updates about this worker's own values.
        receive: The function that owners run to receive notices.
    """

    def __init__(
        self,
        worker: Worker,
        client: CallClient,
        lock: threading.Lock,
        apply_own: Callable[[Sequence[Update]], None],
        receive: Callable[..., int],
    ) -> None:
        self.identity: Identity = int(worker.info.id), worker.incarnation
        self.apply_own = apply_own
        self._worker = worker
        self._client = client
        self._lock = lock
        self._receive = receive
        self._outboxes: dict[Identity, NoticeOutbox] = {}

    def tell(self, owner: Identity, updates: list[Update]) -> None:
        """Deliver updates to the owner of the values that they are about."""
        if owner == self.identity:
            self.apply_own(updates)
            return
        with self._lock:
            notices = self._prepare(owner, updates)
        if notices:
            self.send(owner, notices)

    def number(self, owner: Identity, updates: list[Update]) -> Notice | None:
        """Number updates for an owner; None if it is gone. The caller holds the lock."""
        if owner[0] == self.identity[0] or is_gone(self._client, owner):
            return None
        return self._outboxes.setdefault(owner, NoticeOutbox()).add(updates)

    def prepare(self, updates: Mapping[Identity, list[Update]]) -> dict[Identity, list[Notice]]:
        """Number updates by owner, for ``send_all``. Those for this worker itself are left out. The caller holds the
        lock.
        """
        return {owner: self._prepare(owner, some) for owner, some in updates.items() if owner != self.identity}

    def _prepare(self, owner: Identity, updates: list[Update]) -> list[Notice]:
        """The new notice, after those that were not delivered before. The caller holds the lock."""
        notice = self.number(owner, updates)
        return [] if notice is None else [*self._outboxes[owner].take_undelivered(), notice]

    def send_all(self, notices: Mapping[Identity, list[Notice]]) -> None:
        """Send prepared notices."""
        for owner, some in notices.items():
            if some:
                self.send(owner, some)

    def send(self, owner: Identity, notices: list[Notice]) -> None:
        """Send notices."""
        peer = find_member(self._client, owner)
        if isinstance(peer, tuple):
            return
        channel = None if peer is None else peer.channel
        if (
            channel is None
            or self._client.outlet is not None
            or sum(len(updates) for _, updates in notices) > _MAX_UPDATES
            or self._asks_for_acknowledgment(owner)
        ):
            self.send_as_call(owner, notices)
            return
        try:
            channel.send(Frame(RRefKind.NOTICES, 0, pack(Notices(notices))), timeout=0)
        except ChannelClosedError:
            self.send_as_call(owner, notices)

    def _asks_for_acknowledgment(self, owner: Identity) -> bool:
        """Whether there are so many unacknowledged notices that the owner has to say which of them it has."""
        with self._lock:
            outbox = self._outboxes.get(owner)
            if outbox is None or len(outbox) < outbox.asks_at:
                return False
            outbox.asks_at = len(outbox) + MAX_UNACKNOWLEDGED
            return True

    def unacknowledged(self, owner: Identity) -> list[Notice]:
        """The notices that an owner has not acknowledged. The caller holds the lock."""
        outbox = self._outboxes.get(owner)
        return [] if outbox is None else outbox.unacknowledged()

    def flush(self) -> None:
        """Ask the owners which notices they have. The worker is not idle before they have all."""
        with self._lock:
            unknown = [owner for owner, outbox in self._outboxes.items() if len(outbox)]
        for owner in unknown:
            self.send_as_call(owner, [])

    def send_as_call(self, owner: Identity, notices: list[Notice], failed: int = 0) -> None:
        """Send notices as a call, after so many failed attempts. Notices that stay undelivered go with the next notice,
        since the owner applies none before the missing ones, or when the owner is back.
        """

        def check(done: Future[Any]) -> None:
            try:
                missing = done.value()
            except Exception as error:
                if failed + 1 < MAX_TRIES and not self._worker.closed:
                    again = functools.partial(self.send_as_call, owner, notices, failed + 1)
                    self.retry(again, failed, awaited=failed < _AWAITED_TRIES)
                    return
                log.debug("notices about references did not reach worker %d: %s", owner[0], error)
                with self._lock:
                    if owner in self._outboxes:
                        self._outboxes[owner].mark_undelivered(notices)
            else:
                with self._lock:
                    outbox = self._outboxes.get(owner)
                    if outbox is not None:
                        outbox.acknowledge(notices)
                        outbox.acknowledge_before(missing)
                        outbox.asks_at = len(outbox) + MAX_UNACKNOWLEDGED

        peer = find_member(self._client, owner)
        if not isinstance(peer, tuple):
            self.call(peer, self._receive, (self.identity, owner[1], notices), check)

    def settle(self, owner: Identity, notice: Notice, *, delivered: bool) -> None:
        """The call that carried a notice is over. Send the notice again unless it was ``delivered`` for certain."""
        with self._lock:
            outbox = self._outboxes.get(owner)
            if outbox is None or not outbox.awaits(notice[0]):
                return
            if delivered:
                outbox.acknowledge([notice])
                return
        self.send_as_call(owner, [notice])

    def call(
        self,
        peer: Peer | None,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        check: Callable[[Future[Any]], None],
    ) -> None:
        """Call an internal function on another worker. ``check`` gets the outcome, unless this worker is closing."""
        try:
            if peer is None:
                raise UnknownWorkerError(f"the worker is not known to '{self._worker.name}' yet")
            done: Future[Any] = self._client.call_async(peer.record.id, function, arguments, None, 0, mode="internal")
        except NotInitializedError as error:
            log.debug("worker '%s' is closing and sends no more notices: %s", self._worker.name, error)
            return
        except BackhaulError as error:
            done = Future()
            done.set_exception(error)
        done._when_done(check)

    def retry(self, task: Callable[[], None], failed: int, *, awaited: bool = False) -> None:
        """Run a task again after a pause that grows with the failed attempts. ``awaited``: a shutdown waits for it."""
        thread_pool = self._worker.thread_pool
        when = self._worker.runtime.now() + min(_FIRST_PAUSE_SECONDS * 2**failed, _MAX_PAUSE_SECONDS)

        def run() -> None:
            try:
                if not self._worker.closed:
                    task()
            finally:
                if awaited:
                    self._client.idleness.end()

        if awaited:
            self._client.idleness.begin()
        thread_pool.call_at(when, functools.partial(thread_pool.submit, run))

    def owner_joined(self, owner: Identity) -> None:
        """An owner is a member again: send what could not be delivered before."""
        with self._lock:
            outbox = self._outboxes.get(owner)
            notices = [] if outbox is None else outbox.take_undelivered()
        if notices:
            self._worker.thread_pool.submit(functools.partial(self.send_as_call, owner, notices))

    def owner_gone(self, owner: Identity) -> None:
        """An owner is gone for good: drop its notices."""
        with self._lock:
            self._outboxes.pop(owner, None)
