"""The values that a worker owns: keeps them as ``ownership`` says, and finds out what has become of their holders."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from backhaul._rpc.calls.client import CallClient
from backhaul._rpc.calls.served_call import never_dropped
from backhaul._rpc.cluster.peers import Peer
from backhaul._rpc.futures import Future, Kept
from backhaul._rref import notice_sender
from backhaul._rref.held_forks import HeldForks, check_incarnation, confirm_forks, value_lost
from backhaul._rref.members import find_member, identity_of, is_gone
from backhaul._rref.notice_sender import NoticeSender
from backhaul._rref.notices import Notice, NoticeInbox, Notices, RRefKind
from backhaul._rref.ownership import ForkId, Identity, Owned, OwnerEntry, RRefId, Update, is_of, maker_of
from backhaul._transport.base import Channel
from backhaul._wire.frames import Frame
from backhaul._wire.messages import unpack
from backhaul._worker.thread_pool import Task
from backhaul._worker.worker import Worker, current_worker
from backhaul.errors import BackhaulError, NotInitializedError, PeerLostError, ProtocolError, UnknownWorkerError

log = logging.getLogger("backhaul")

Entry = OwnerEntry[Future[Any]]
"""A value of this worker, perhaps still to come, and who refers to it."""

_MAX_CONNECTS = 6  # attempts to reach a holder before the owner gives it up


# Over the limit because all methods use one table under one lock.
class OwnedValues:
    """Attached to a worker. Thread-safe.

    Args:
        worker: The worker.
        client: Its client.
        lock: Guards the tables; see ``RRefRegistry``.
        notices: Retries and calls.
        held: The forks that the worker holds itself.
    """

    def __init__(
        self, worker: Worker, client: CallClient, lock: threading.Lock, notices: NoticeSender, held: HeldForks
    ) -> None:
        self.identity = notices.identity
        self._worker = worker
        self._client = client
        self._lock = lock
        self._notices = notices
        self._held = held
        self._table: Owned[Future[Any]] = Owned(Kept, self.identity, self._is_present)
        self._inboxes: dict[Identity, NoticeInbox] = {}
        self._reached: set[Identity] = set()  # holders to which there is a channel, or a thread opens one
        worker.on_frame(RRefKind.NOTICES, self._on_notices, check=None)
        worker.attach(self)

    def __len__(self) -> int:
        return len(self._table.entries)

    def count_forks(self) -> int:
        """The forks that all workers hold of values of this worker."""
        with self._lock:
            return sum(len(entry.forks) for entry in self._table.entries.values())

    def present_values(self, most: int) -> list[Any]:
        """At most ``most`` of the values that are there, for statistics."""
        with self._lock:
            futures = [entry.value for entry in itertools.islice(self._table.entries.values(), most)]
        return [torch.futures.Future.value(future) for future in futures if future.done() and future._error is None]

    def _is_present(self, number: RRefId) -> bool:
        try:
            return is_of(number, identity_of(self._client.peers.find(maker_of(number))))
        except UnknownWorkerError:
            return False

    # Values.

    def own(self, number: RRefId) -> Entry:
        """The entry of a value of this worker. It stays until ``release``."""
        with self._lock:
            return self._table.hold(number)

    def add_handle(self, number: RRefId, handle: int) -> Entry:
        """The entry of a value of this worker. It stays until the handle of that id is deleted."""
        with self._lock:
            entry = self._table.entry(number)
            entry.handles[handle] = None
            return entry

    def create(self, number: RRefId, fork: ForkId, notice: int, holder: Identity, incarnation: str) -> Entry:
        """The entry of a value that a worker asks this one to make (fork -1: this worker itself). It stays until
        ``release``. The first fork is an update like any other: if its handle was deleted meanwhile it keeps nothing.
        """
        if fork < 0:
            return self.own(number)
        check_incarnation(self._worker, incarnation)
        entry = self.own(number)
        self.receive(holder, [(notice, [("created", number, fork, holder)])])
        with self._lock:
            inbox = self._inboxes.get(holder)
            if inbox is not None and not inbox.has_received(notice):  # earlier notices are still to come
                entry.early_uses[fork] = holder
        return entry

    def use(self, number: int, fork: int, holder: int, holder_incarnation: str, incarnation: str) -> Future[Any]:
        """The value that a worker uses through a fork (-1: this worker itself), perhaps still to come.

        Raises:
            PeerLostError: The value is not there any more, or belonged to an earlier incarnation of this worker.
        """
        name = self._worker.name
        if incarnation != self.identity[1]:
            raise value_lost(name, f"worker '{name}' was restarted")
        with self._lock:
            found = self._table.use(RRefId(number), ForkId(fork), (holder, holder_incarnation))
        if found is None:
            reason = f"worker '{name}' had given up the worker that refers to it, or the one that passed it on"
            raise PeerLostError(f"the value is gone: {reason}", worker=name, reason=reason)
        return found.value

    def visit(self, number: RRefId, fork: ForkId, holder: Identity, handle: int) -> Entry:
        """A worker calls this one with a reference to a value of this worker: its own ``fork``, which it keeps until
        the call is over (-1: this worker calls itself). The entry stays until the handle of that id is deleted.
        """
        with self._lock:
            entry = self._table.use(number, fork, holder)
            if entry is None:
                raise self._gone()
            entry.handles[handle] = None
            return entry

    def come_home(self, number: RRefId, fork: ForkId, handle: int) -> Entry:
        """A fork has arrived at this worker, which owns its value: release the fork. The entry stays until the handle
        of that id is deleted.
        """
        with self._lock:
            self._held.check_accepted(fork)
            if number not in self._table.entries and not self._table.expects(number):
                raise self._gone()
            entry = self._table.entry(number)
            entry.handles[handle] = None
        self.apply_own([("released", number, fork, self.identity)])
        return entry

    def _gone(self) -> PeerLostError:
        return PeerLostError(
            f"the value is gone: worker '{self._worker.name}' had given up the workers that referred to it",
            worker=self._worker.name,
        )

    def release(self, entry: Entry) -> None:
        """Undo ``own`` or ``create``."""
        with self._lock:
            freed = self._table.release(entry)
        del entry
        self._drop(freed)

    def drop(self, entries: list[Entry]) -> None:
        """The last handles of these values were deleted. Empties the list."""
        with self._lock:
            freed = [each for entry in entries for each in self._table.drop(entry)]
        entries.clear()
        self._drop(freed)

    def _drop(self, freed: list[Entry]) -> None:
        """Drop values, without the lock. If a value was never made, the call that was to make it got lost: tell those
        who wait for the value.
        """
        for entry in freed:
            if not entry.value.done():
                name = self._worker.name
                error = BackhaulError(f"worker '{name}' was never asked to make the value", worker=name)
                with contextlib.suppress(RuntimeError):  # another thread has just said that making it failed
                    entry.value.set_exception(error)
        freed.clear()

    # Updates.

    def apply_own(self, updates: Sequence[Update]) -> None:
        """Apply updates that this worker makes about its own values."""
        with self._lock:
            freed = self._table.apply(self.identity, updates)
            suspects = self._take_suspects()
        self._drop(freed)
        self._ask_about(suspects)

    def receive(self, sender: Identity, notices: Iterable[Notice]) -> int:
        """Notices have come from another worker. Returns the number of the first one that is missing."""
        missing, follow = self._take(sender, notices)
        if follow is not None:
            follow()
        return missing

    def _on_notices(self, channel: Channel, frame: Frame) -> Task | None:
        peer = self._client.peers.of(channel)
        if peer is None:
            raise ProtocolError("notices from a peer that has not said who it is")
        return self._take(identity_of(peer), unpack(frame.body, Notices).notices)[1]

    def _take(self, sender: Identity, notices: Iterable[Notice]) -> tuple[int, Task | None]:
        """Apply notices. Returns the number of the first one that is missing, and what has to follow without a lock."""
        strangers: dict[Identity, None] = {}
        with self._lock:
            if is_gone(self._client, sender):
                return 0, None  # and so are all forks that it held
            inbox = self._inboxes.get(sender)
            if inbox is None:
                inbox = self._inboxes[sender] = NoticeInbox()
            due = [update for number, updates in notices for update in inbox.receive(number, updates)]
            freed = self._table.apply(sender, due)
            for what, _, _, holder in due:
                if what in ("created", "forked") and holder not in self._reached and holder != self.identity:
                    strangers[holder] = None
            self._reached.update(strangers)
            suspects = self._take_suspects()
            missing = inbox.missing
        if not (freed or suspects or strangers):
            return missing, None
        return missing, functools.partial(self._follow, freed, suspects, strangers)

    def _follow(
        self, freed: list[Entry], suspects: dict[Identity, dict[ForkId, RRefId]], strangers: Iterable[Identity]
    ) -> None:
        self._drop(freed)
        self._ask_about(suspects)
        for holder in strangers:
            self._worker.thread_pool.submit(functools.partial(self.reach, holder))

    def loan_failed(self, lent: Sequence[tuple[RRefId, ForkId]], holder: Identity) -> None:
        """A call with lent forks has failed: find out which of them its receiver has. See ``ownership``, [Note: loans].

        Must not block.
        """
        with self._lock:
            if is_gone(self._client, holder):
                return
            self._table.ask_for(lent, holder)
            suspects = self._take_suspects()
            unknown = holder not in self._reached and holder != self.identity
            self._reached.add(holder)
        self._follow([], suspects, [holder] if unknown else ())

    # Holders.

    def reach(self, holder: Identity, failed: int = 0) -> None:
        """Open a channel to a worker that holds references, so that its loss is noticed. Give the worker up after some
        failed attempts.
        """
        peer = find_member(self._client, holder)
        try:
            if isinstance(peer, Peer):
                self._client.peers.channel_to(peer, self._worker.options.connect_timeout)
                return
        except BackhaulError as error:
            log.debug("cannot reach worker %d, which holds references: %s", holder[0], error)
        for_good = isinstance(peer, tuple)
        if not for_good and failed + 1 < _MAX_CONNECTS and not self._worker.closed:
            self._notices.retry(functools.partial(self.reach, holder, failed + 1), failed)
            return
        with self._lock:
            self._reached.discard(holder)
            freed = self._table.lose(holder, for_good=for_good)
            suspects = self._take_suspects()
        self._drop(freed)
        self._ask_about(suspects)

    def channel_lost(self, holder: Identity, updates: Sequence[Update]) -> bool:
        """A channel to a worker is lost; apply these updates of this worker about it. Returns whether that worker holds
        references, so that the caller has to ``reach`` it.
        """
        with self._lock:
            self._reached.discard(holder)
            self._table.apply(self.identity, updates)
            is_holder = self._table.is_holder(holder)
            suspects = self._take_suspects()
        self._ask_about(suspects)
        return is_holder

    def holder_gone(self, holder: Identity) -> None:
        """A worker is gone for good, and its forks with it."""
        with self._lock:
            self._reached.discard(holder)
            self._inboxes.pop(holder, None)
            freed = self._table.lose(holder)
            suspects = self._take_suspects()
        self._ask_about(suspects)
        self._worker.thread_pool.submit(functools.partial(self._drop, freed))  # the caller holds locks

    def _take_suspects(self) -> dict[Identity, dict[ForkId, RRefId]]:
        """The caller holds the lock, and calls ``_ask_about`` with the result after it has released the lock."""
        suspects, self._table.suspects = self._table.suspects, {}
        return suspects

    def _ask_about(self, suspects: dict[Identity, dict[ForkId, RRefId]]) -> None:
        """Ask the receivers of forks that may have been lost on their way."""
        for holder, forks in suspects.items():
            named = [(int(number), int(fork)) for fork, number in forks.items()]
            self._worker.thread_pool.submit(functools.partial(self._ask, holder, named))

    def _ask(self, holder: Identity, forks: list[tuple[int, int]], failed: int = 0) -> None:
        if holder == self.identity:
            self._held.confirm(self.identity, forks)
            return

        def check(done: Future[Any]) -> None:
            try:
                done.value()
            except Exception as error:
                if failed + 1 < notice_sender.MAX_TRIES:
                    self._notices.retry(functools.partial(self._ask, holder, forks, failed + 1), failed)
                else:
                    log.debug("worker %d does not say which references it holds: %s", holder[0], error)

        peer = find_member(self._client, holder)
        if isinstance(peer, tuple):
            return  # the holder is gone, and its forks with it
        self._notices.call(peer, confirm_forks, (self.identity, holder[1], forks), check)

    # The end.

    def leaks(self) -> list[str]:
        """Descriptions of the values to which other workers still refer."""
        with self._lock:
            entries = self._table.entries.values()
            left = [(entry.value, sorted({holder for holder, _ in entry.forks.values()})) for entry in entries]
        return [
            f"{_describe(value)} is still referred to by " + ", ".join(f"worker {holder}" for holder in holders)
            for value, holders in left
            if holders
        ]

    def close(self) -> None:
        """Drop all values. Those that are still to come fail."""
        with self._lock:
            entries = list(self._table.entries.values())
            self._table.entries.clear()
        for entry in entries:
            if not entry.value.done():
                name = self._worker.name
                entry.value.set_exception(NotInitializedError(f"worker '{name}' was shut down", worker=name))


def _describe(value: Future[Any]) -> str:
    if not value.done():
        return "a value of type unknown"
    if (error := value._failure()) is not None:
        return f"a value that could not be made ({type(error).__name__})"
    return f"a value of type {type(value.value()).__name__}"


@never_dropped  # also when the caller is lost: it may have passed references on
def take_notices(sender: Identity, incarnation: str, notices: list[Notice]) -> int:
    """Holders call this on owners; see ``OwnedValues.receive``."""
    worker = current_worker()
    check_incarnation(worker, incarnation)
    return worker.part(OwnedValues).receive(sender, notices)
