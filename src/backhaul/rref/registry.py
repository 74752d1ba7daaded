"""One worker's share in references: the values it owns, the forks it holds, and the news it owes to owners.

Destructors only put a line into a queue. A thread of its own, started with the first reference, reads it and does the
rest.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch

from backhaul.errors import BackhaulError, NotInitializedError, PeerLostError
from backhaul.rpc.dispatch import never_dropped
from backhaul.rpc.futures import Future
from backhaul.rpc.node import Node
from backhaul.rpc.peers import Peer
from backhaul.rref.ownership import Entry, ForkId, Inbox, News, Owned, RRefId
from backhaul.transport.base import Channel
from backhaul.types import first_number
from backhaul.wire.codec import Encoded
from backhaul.wire.messages import pack, prepare, unpack
from backhaul.worker import current_worker

log = logging.getLogger("backhaul")

Dead = tuple[Any, ...]
"""What died: the entry of a value of this worker's, or owner, value and fork."""

_TRIES = 5  # to tell an owner, over as many channels
_PAUSE = 0.05  # seconds between them


class Passed(msgspec.Struct, array_like=True, frozen=True):
    """On a message: the forks that travel in it, each with its owner and value."""

    forks: tuple[tuple[int, int, int], ...]  # (owner, value, fork)


prepare(Passed)


class RRefs:
    """Attached to a worker. Thread-safe."""

    key = "rref"

    def __init__(self, node: Node) -> None:
        self.worker = node.worker
        self.id = node.worker.info.id
        self.agent = node.agent
        self._numbers = itertools.count(first_number(node.worker.incarnation))
        self._lock = threading.Lock()  # guards _owned, _inboxes, _forks
        self._owned: Owned[Future[Any]] = Owned(Future)
        self._inboxes: dict[tuple[int, str], Inbox] = {}
        self._forks: dict[ForkId, tuple[int, RRefId]] = {}  # held here: fork -> owner, value
        self._orphans: dict[ForkId, str] = {}  # forks held here whose owner is gone for good, and why
        self._told = collections.defaultdict[int, Iterator[int]](itertools.count)  # owner -> numbers of news to it
        self._unheard = collections.defaultdict[int, list[tuple[int, list[News]]]](list)  # owner -> news to repeat
        self._met: set[int] = set()  # holders to which there is a channel, or is going to be
        self._dead = self.worker.runtime.queue()  # of Dead, or None at the end
        self._cleaner: threading.Thread | None = None
        node.agent.interceptors.append(self)
        node.peers.on_lost(self._on_lost)
        node.peers.on_change(self._on_change)
        node.audits.append(self)
        self.worker.on_close(self._close)
        self.worker.attach(self)
        self.worker.counters["num_owner_rrefs"] = lambda: len(self._owned.entries)
        self.worker.counters["num_forks"] = self._count_forks
        self.worker.counters["num_user_rrefs"] = lambda: len(self._forks)

    def _count_forks(self) -> int:
        with self._lock:
            return sum(len(entry.forks) for entry in self._owned.entries.values())

    def new_id(self) -> int:
        """A number that nothing else in the cluster has."""
        return self.id << 48 | next(self._numbers)

    # Values that this worker owns.

    def own(self, number: RRefId) -> Entry[Future[Any]]:
        """The entry of a value of this worker's, which stays until ``let_go``."""
        self._start_cleaner()
        with self._lock:
            return self._owned.hold(number)

    def join(self, number: int, fork: int, holder: int) -> Future[Any]:
        """A worker uses a fork (-1: the owner itself): the value it stands for, perhaps still to come."""
        with self._lock:
            if fork < 0:
                return self._owned.entry(RRefId(number)).value
            return self._owned.join(RRefId(number), ForkId(fork), holder).value

    def create(self, number: int, fork: int, holder: int) -> Entry[Future[Any]]:
        """A worker has asked for a value to be made; its entry stays until ``let_go``."""
        entry = self.own(RRefId(number))
        if fork >= 0:
            self.hear([("made", RRefId(number), ForkId(fork), holder)])
        return entry

    def let_go(self, entry: Entry[Future[Any]]) -> None:
        """Undo ``own`` or ``create``."""
        with self._lock:
            freed = self._owned.let_go(entry)
        del entry
        self._end(freed)

    def _end(self, freed: list[Entry[Future[Any]]]) -> None:
        """Values end here, not under the lock. Whoever waits for one that was never made learns that it will not be:
        the call that was to make it got lost.
        """
        for entry in freed:
            if not entry.value.done():
                name = self.worker.name
                error = BackhaulError(f"worker '{name}' was never asked to make the value", worker=name)
                with contextlib.suppress(RuntimeError):  # another thread has just said that making it failed
                    entry.value.set_exception(error)
        freed.clear()

    def hear(self, news: Sequence[News]) -> None:
        """Take in news about values of this worker's."""
        with self._lock:
            freed = self._owned.hear(news)
        self._end(freed)

    def take_news(self, sender: int, incarnation: str, number: int, news: list[News]) -> None:
        """News have come from another worker."""
        with self._lock:
            due = self._inboxes.setdefault((sender, incarnation), Inbox()).take(number, news)
            freed = self._owned.hear(due)
            strangers = {holder for what, _, _, holder in due if what == "made"} - self._met - {self.id}
            self._met |= strangers
        self._end(freed)
        for holder in strangers:
            self.worker.crew.submit(functools.partial(self._meet, holder))

    def _meet(self, holder: int) -> None:
        """Have a channel to a worker that holds references, so as to learn of its loss."""
        try:
            peer = self.agent.peers.find(holder)
            self.agent.peers.channel_to(peer, self.worker.options.connect_timeout)
        except BackhaulError:  # it is gone already
            with self._lock:
                self._met.discard(holder)
                freed = self._owned.lose(holder)
            self._end(freed)

    # Forks that this worker holds, and news of them.

    def adopt(self, owner: int, number: RRefId, fork: ForkId) -> None:
        """A fork is held here from now on."""
        self._start_cleaner()
        with self._lock:
            self._forks[fork] = owner, number

    def check(self, fork: ForkId, owner: str) -> None:
        """Raise ``PeerLostError`` if the owner of a fork held here is gone for good: another may have its id now."""
        reason = self._orphans.get(fork)
        if reason is not None:
            raise PeerLostError(f"the value is gone with its owner: {reason}", worker=owner, reason=reason)

    def bury(self, dead: Dead) -> None:
        """For destructors: a handle has died. Neither blocks nor takes a lock."""
        self._dead.put(dead)

    def tell(self, owner: int, news: list[News]) -> None:
        """Let the owner of values know."""
        if owner == self.id:
            self.hear(news)
            return
        with self._lock:
            letters = [*self._unheard.pop(owner, ()), (next(self._told[owner]), news)]
        self._send(owner, letters, _TRIES)

    def _send(self, owner: int, letters: list[tuple[int, list[News]]], tries: int) -> None:
        """Send numbered news. What is not heard after some tries goes with the next, since none is read before it."""

        def check(done: Future[Any]) -> None:
            try:
                done.value()
            except PeerLostError:  # the channel, or the worker itself
                if tries > 1 and not self.worker.closed:
                    again = functools.partial(self._send_again, owner, letters, tries - 1)
                    self.agent.begin()  # a shutdown waits for it
                    when = self.worker.runtime.now() + _PAUSE
                    self.worker.crew.call_at(when, functools.partial(self.worker.crew.submit, again))
                    return
                log.debug("news of references did not reach worker %d", owner)
                with self._lock:
                    self._unheard[owner] += letters
            except Exception as error:
                log.debug("news of references did not reach worker %d: %s", owner, error)

        try:
            message = self.id, self.worker.incarnation, letters
            sent: Future[None] = self.agent.call_async(owner, take_news, message, None, 0, mode="internal")
        except BackhaulError as error:  # this worker is being closed
            log.debug("news of references were not sent: %s", error)
        else:
            sent._when_done(check)

    def _send_again(self, owner: int, letters: list[tuple[int, list[News]]], tries: int) -> None:
        try:
            self._send(owner, letters, tries)
        finally:
            self.agent.end()

    def _start_cleaner(self) -> None:
        if self._cleaner is None:
            with self._lock:
                if self._cleaner is None and not self.worker.closed:
                    self._cleaner = self.worker.runtime.spawn(self._clean, name=f"backhaul-{self.worker.name}-rref")

    def _clean(self) -> None:
        while (dead := self._dead.get()) is not None:
            batch = [dead]
            while not self._dead.empty():
                batch.append(self._dead.get())
            if None in batch:
                return
            try:
                self.worker.run(self._drop, batch)
            except Exception:
                log.exception("references were not released")
            del dead, batch  # nothing here may keep values while it waits

    def _drop(self, batch: list[Dead]) -> None:
        by_owner: dict[int, list[News]] = {}
        for item in batch:
            if len(item) == 1:
                self.let_go(item[0])
                continue
            owner, number, fork = item
            with self._lock:
                self._forks.pop(fork, None)
                orphaned = self._orphans.pop(fork, None) is not None
            if orphaned:
                continue  # nobody is left to be told
            by_owner.setdefault(owner, []).append(("gone", number, fork, self.id))
        batch.clear()
        for owner, news in by_owner.items():
            self.tell(owner, news)

    def begin(self) -> None:
        """End all forks held here, whether or not handles exist."""
        with self._lock:
            forks, self._forks = self._forks, {}
        for fork, (owner, number) in forks.items():
            self.tell(owner, [("gone", number, fork, self.id)])

    def end(self) -> list[str]:
        """Values of this worker's to which others still refer."""
        with self._lock:
            left = [(entry.value, sorted(set(entry.forks.values()))) for entry in self._owned.entries.values()]
        return [
            f"a value of type {type(value.value()).__name__ if value.done() else 'unknown'} is still referred to by "
            + ", ".join(f"worker {holder}" for holder in holders)
            for value, holders in left
            if holders
        ]

    def _close(self) -> None:
        self._dead.put(None)
        cleaner = self._cleaner
        if cleaner is not None and cleaner is not threading.current_thread():
            self.worker.runtime.join(cleaner, 5.0)
        with self._lock:
            entries = list(self._owned.entries.values())
            self._owned.entries.clear()
        for entry in entries:
            if not entry.value.done():
                name = self.worker.name
                entry.value.set_exception(NotInitializedError(f"worker '{name}' was shut down", worker=name))

    def _on_lost(self, peer: Peer, channel: Channel, reason: str) -> None:
        """Only the channel may be gone, so see whether the worker is still there; if not, its references are not."""
        with self._lock:
            self._met.discard(peer.record.id)
        if not self.worker.closed and self._owned.entries and self._holds_some(peer.record.id):
            # In a task of its own: it may take a while to find out.
            self.worker.crew.submit(functools.partial(self._meet, peer.record.id))

    def _on_change(self, what: str, peer: Peer, reason: str) -> None:
        """A worker that is gone for good holds nothing any more; the next of its id hears news from the first on."""
        if what not in ("left", "replaced"):
            return
        gone = peer.record.id
        with self._lock:
            self._met.discard(gone)
            self._told.pop(gone, None)
            self._unheard.pop(gone, None)
            orphans = [fork for fork, (owner, _) in self._forks.items() if owner == gone]
            for fork in orphans:
                del self._forks[fork]
                self._orphans[fork] = reason
            freed = self._owned.lose(gone)
        self.worker.crew.submit(freed.clear)  # values end there, not under the locks that are held here

    def _holds_some(self, worker: int) -> bool:
        with self._lock:
            entries = self._owned.entries.values()
            return any(worker in (*entry.forks.values(), *entry.joined.values()) for entry in entries)

    # On messages: the forks that travel in them.

    def _note(self, peer: Peer, encoded: Encoded) -> bytes:
        by_owner: dict[int, list[News]] = {}
        for owner, number, fork in encoded.parcels:
            by_owner.setdefault(owner, []).append(("made", number, fork, peer.record.id))
        for owner, news in by_owner.items():
            self.tell(owner, news)
        return pack(Passed(tuple(encoded.parcels)))

    def request_out(self, peer: Peer, encoded: Encoded) -> tuple[bytes | None, Any]:
        return self._note(peer, encoded) if encoded.parcels else None, None

    def request_in(self, peer: Peer, note: bytes | None, tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        return tensors, None

    def reply_out(self, peer: Peer, kept: Any, encoded: Encoded) -> bytes | None:
        return self._note(peer, encoded) if encoded.parcels else None

    def reply_in(self, peer: Peer, kept: Any, note: bytes | None, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return tensors

    def failed(self, peer: Peer, note: bytes) -> None:
        """Nothing to do: if the message came, its forks tell when they die; if its receiver is gone, so are they."""

    def discard(self, peer: Peer, note: bytes) -> None:
        """Forks that arrived with a message nobody is going to read, or that were never sent, are gone."""
        self._start_cleaner()
        for owner, number, fork in unpack(note, Passed).forks:
            with self._lock:
                held = fork in self._forks
            if not held:  # else its handle tells when it dies
                self.bury((owner, number, fork))


def current_rrefs() -> RRefs:
    """Those of the current worker."""
    return current_worker().part(RRefs)


@never_dropped  # of a worker that is lost too: it may have passed references on
def take_news(sender: int, incarnation: str, letters: list[tuple[int, list[News]]]) -> None:
    """Called by those who hold references; see ``RRefs.take_news``."""
    rrefs = current_rrefs()
    for number, news in letters:
        rrefs.take_news(sender, incarnation, number, news)
