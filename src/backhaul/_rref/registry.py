"""One worker's share in references: the values it owns, the forks it holds, and the news it owes to owners.

Destructors only put a line into a queue. A thread of its own, started with the first reference, reads it and does the
rest.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from backhaul._rpc.calls.served_call import never_dropped
from backhaul._rpc.cluster.peers import Peer
from backhaul._rpc.futures import Future, Kept
from backhaul._rpc.node import Node
from backhaul._rref.ownership import (
    ForkId,
    Life,
    Notice,
    NoticeInbox,
    NoticeOutbox,
    Owned,
    OwnerEntry,
    RRefId,
    Update,
    is_of,
    maker_of,
)
from backhaul._transport.base import Channel
from backhaul._types import WorkerId, WorkerInfo, first_number
from backhaul._wire.codec import Encoded
from backhaul._wire.messages import pack, prepare, unpack
from backhaul._worker.worker import current_worker
from backhaul.errors import BackhaulError, NotInitializedError, PeerLostError, UnknownWorkerError

log = logging.getLogger("backhaul")

Dead = tuple[Any, ...]
"""What died: the entry of a value of this worker's, or owner, value and fork."""

Expected = tuple[RRefId, ForkId, Notice]
"""A value to come, its first fork, and the news of that (number -1: the owner is gone)."""

_TRIES = 12  # to tell or to ask somebody, over as many channels
_PAUSES = 0.05, 5.0  # seconds between them: the first, twice as long each time, and the longest
_AWAITED = 5  # tries that a shutdown waits for
_MEETINGS = 6  # tries to reach a holder before it is given up
_REFUSED = 4096  # forks said to be absent that are remembered


class Passed(msgspec.Struct, array_like=True, frozen=True):
    """On a message: the forks that travel in it, each with its owner and value."""

    forks: tuple[tuple[int, str, int, int], ...]  # (owner, its incarnation, value, fork)


prepare(Passed)


def identity_of(peer: Peer) -> Life:
    """Who that worker is now."""
    return peer.record.id, peer.record.incarnation


class RRefRegistry:
    """Attached to a worker. Thread-safe."""

    key = "rref"

    def __init__(self, node: Node) -> None:
        self.worker = node.worker
        self.id = node.worker.info.id
        self.life: Life = int(self.id), node.worker.incarnation
        self.client = node.client
        self._numbers = itertools.count(first_number(node.worker.incarnation))
        self._lock = threading.Lock()  # guards what follows
        self._owned: Owned[Future[Any]] = Owned(Kept, self.life, self._is_present)
        self._inboxes: dict[Life, NoticeInbox] = {}
        self._outboxes: dict[Life, NoticeOutbox] = {}
        self._forks: dict[ForkId, tuple[Life, RRefId]] = {}  # held here: fork -> owner, value
        self._orphans: dict[ForkId, str] = {}  # forks held here whose owner is gone for good, and why
        self._refused: dict[ForkId, None] = {}  # forks that this worker has said it does not hold, so takes no more
        self._passed: dict[Life, dict[Life, None]] = {}  # receiver of references -> their owners
        self._met: set[Life] = set()  # holders to which there is a channel, or is going to be
        self._dead = self.worker.runtime.queue()  # of Dead, or None at the end
        self._cleaner: threading.Thread | None = None
        node.client.interceptors.add_carrier(self)
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

    def _is_present(self, number: RRefId) -> bool:
        try:
            return is_of(number, identity_of(self.client.peers.find(maker_of(number))))
        except UnknownWorkerError:
            return False

    # Values that this worker owns.

    def own(self, number: RRefId) -> OwnerEntry[Future[Any]]:
        """The entry of a value of this worker's, which stays until ``let_go``."""
        self._start_cleaner()
        with self._lock:
            return self._owned.hold(number)

    def join(self, number: int, fork: int, holder: int, life: str, incarnation: str) -> Future[Any]:
        """A worker, in that life, uses a fork (-1: the owner itself): the value it stands for, perhaps still to come.
        Raises ``PeerLostError`` if it is not there any more, or was another incarnation's.
        """
        name = self.worker.name
        if incarnation != self.life[1]:
            raise _gone_with(name, f"worker '{name}' was restarted")
        with self._lock:
            found = self._owned.join(RRefId(number), ForkId(fork), (holder, life))
        if found is None:
            reason = f"worker '{name}' had given up the worker that refers to it, or the one that passed it on"
            raise PeerLostError(f"the value is gone: {reason}", worker=name, reason=reason)
        return found.value

    def create(self, number: int, fork: int, letter: int, holder: Life, incarnation: str) -> OwnerEntry[Future[Any]]:
        """A worker has asked for a value to be made; its entry stays until ``let_go``. Its first fork is news like any
        other: one that is over by now, and whose handle is gone, keeps nothing.
        """
        if fork < 0:
            return self.own(RRefId(number))
        if incarnation != self.life[1]:
            name = self.worker.name
            raise PeerLostError(f"worker '{name}' was restarted", worker=name, reason="it was restarted")
        entry = self.own(RRefId(number))
        self.take_news(holder, [(letter, [("born", RRefId(number), ForkId(fork), holder)])])
        with self._lock:
            inbox = self._inboxes.get(holder)
            if inbox is not None and not inbox.has_heard(letter):  # those before it are still to come
                entry.joined[ForkId(fork)] = holder
        return entry

    def let_go(self, entry: OwnerEntry[Future[Any]]) -> None:
        """Undo ``own`` or ``create``."""
        with self._lock:
            freed = self._owned.let_go(entry)
        del entry
        self._end(freed)

    def _end(self, freed: list[OwnerEntry[Future[Any]]]) -> None:
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

    def _hear(self, news: Sequence[Update]) -> None:
        """This worker's own news about its own values."""
        with self._lock:
            freed = self._owned.hear(self.life, news)
            suspects = self._take_suspects()
        self._end(freed)
        self._look_for(suspects)

    def take_news(self, sender: Life, letters: Iterable[Notice]) -> None:
        """News have come from another worker."""
        strangers: dict[Life, None] = {}
        with self._lock:
            if isinstance(self.client.peers.in_life(*sender), tuple):
                return  # it is gone, and all that it held
            inbox = self._inboxes.setdefault(sender, NoticeInbox())
            due = [item for number, news in letters for item in inbox.take(number, news)]
            freed = self._owned.hear(sender, due)
            for what, _, _, holder in due:
                if what in ("born", "made") and holder not in self._met and holder != self.life:
                    strangers[holder] = None
            self._met.update(strangers)
            suspects = self._take_suspects()
        self._end(freed)
        self._look_for(suspects)
        for holder in strangers:
            self.worker.thread_pool.submit(functools.partial(self._meet, holder))

    def _meet(self, holder: Life, tries: int = _MEETINGS) -> None:
        """Have a channel to a worker that holds references, so as to learn of its loss."""
        peer = self.client.peers.in_life(*holder)
        try:
            if isinstance(peer, Peer):
                self.client.peers.channel_to(peer, self.worker.options.connect_timeout)
                return
        except BackhaulError as error:
            log.debug("worker %d, which holds references, is not reached: %s", holder[0], error)
        for_good = isinstance(peer, tuple)
        if not for_good and tries > 1 and not self.worker.closed:
            self._later(functools.partial(self._meet, holder, tries - 1), _MEETINGS - tries)
            return
        with self._lock:
            self._met.discard(holder)
            freed = self._owned.lose(holder, for_good=for_good)
            suspects = self._take_suspects()
        self._end(freed)
        self._look_for(suspects)

    def _later(self, task: Callable[[], None], failed: int, *, awaited: bool = False) -> None:
        """Try again what has failed so many times before; ``awaited``: a shutdown waits for it."""
        first, longest = _PAUSES
        thread_pool, when = self.worker.thread_pool, self.worker.runtime.now() + min(first * 2**failed, longest)

        def run() -> None:
            try:
                if not self.worker.closed:
                    task()
            finally:
                if awaited:
                    self.client.idleness.end()

        if awaited:
            self.client.idleness.begin()
        thread_pool.call_at(when, functools.partial(thread_pool.submit, run))

    # Forks that may have got lost: the owner asks.

    def _take_suspects(self) -> dict[Life, dict[ForkId, RRefId]]:
        """Called with the lock, and ``_look_for`` what it returns without."""
        suspects, self._owned.suspects = self._owned.suspects, {}
        return suspects

    def _look_for(self, suspects: dict[Life, dict[ForkId, RRefId]]) -> None:
        """Ask those who were to get these forks."""
        for holder, forks in suspects.items():
            named = [(int(number), int(fork)) for fork, number in forks.items()]
            self.worker.thread_pool.submit(functools.partial(self._ask, holder, named, _TRIES))

    def _ask(self, holder: Life, forks: list[tuple[int, int]], tries: int) -> None:
        if holder == self.life:
            self.confirm(self.life, forks)
            return

        def check(done: Future[Any]) -> None:
            try:
                done.value()
            except Exception as error:
                if tries > 1:
                    self._later(functools.partial(self._ask, holder, forks, tries - 1), _TRIES - tries)
                else:
                    log.debug("worker %d does not say which references it holds: %s", holder[0], error)

        peer = self.client.peers.in_life(*holder)
        if isinstance(peer, tuple):
            return  # it is gone, and they with it
        self.call(peer, ask, (self.life, holder[1], forks), check)

    def confirm(self, owner: Life, forks: Iterable[tuple[int, int]]) -> None:
        """The owner of values asks whether these forks of them have come here: let it know of those that are not held.
        They are not taken any more.
        """
        with self._lock:
            missing = [(RRefId(number), ForkId(fork)) for number, fork in forks if ForkId(fork) not in self._forks]
            for _, fork in missing:
                self._refused[fork] = None
            while len(self._refused) > _REFUSED:
                del self._refused[next(iter(self._refused))]
        if missing:
            self.tell(owner, [("absent", number, fork, self.life) for number, fork in missing])

    # Forks that this worker holds, and news of them.

    def adopt(self, owner: Life, number: RRefId, fork: ForkId) -> WorkerInfo:
        """A fork has come here, and is held from now on; returns its owner. If that is gone for good the fork is an
        orphan, see ``check``.

        Raises:
            UnknownWorkerError: The owner is not known here.
            PeerLostError: The message that the fork was in was thought to be lost.
        """
        self._start_cleaner()
        with self._lock:
            self._take_in(fork)
            peer = self.client.peers.in_life(*owner)
            if isinstance(peer, Peer):
                self._forks[fork] = owner, number
                return peer.info
            if peer is None and owner[0] != self.id:
                raise UnknownWorkerError(f"the owner of a reference, worker {owner[0]}, is not known here yet")
            name, why = peer or (self.worker.name, "was restarted")
            self._orphans[fork] = f"worker '{name}' {why}"
            return WorkerInfo(name, WorkerId(owner[0]))

    def come_home(self, number: RRefId, fork: ForkId) -> OwnerEntry[Future[Any]]:
        """A fork of a value of this worker's has come here: it ends, and the entry is held in its place."""
        self._start_cleaner()
        with self._lock:
            self._take_in(fork)
            if number not in self._owned.entries and not self._owned.expects(number):
                raise PeerLostError("the value is gone: its worker had given up those that referred to it")
            entry = self._owned.hold(number)
        self._hear([("gone", number, fork, self.life)])
        return entry

    def _take_in(self, fork: ForkId) -> None:
        if fork in self._refused:
            raise PeerLostError("the reference was in a message that came after its channel was lost")

    def check(self, fork: ForkId, owner: str) -> None:
        """Raise ``PeerLostError`` if the owner of a fork held here is gone for good: another may have its id now."""
        reason = self._orphans.get(fork)
        if reason is not None:
            raise _gone_with(owner, reason)

    def bury(self, dead: Dead) -> None:
        """For destructors: a handle has died. Neither blocks nor takes a lock."""
        self._dead.put(dead)

    def expect(self, owner: Life, number: RRefId | None = None, fork: ForkId | None = None) -> Expected:
        """A value is going to be asked for, and held here by its first fork; both get ids unless they have some. The
        call that asks takes the news of it along.
        """
        self._start_cleaner()
        with self._lock:  # so that the values of one owner are numbered as they are told of
            number = RRefId(self.new_id()) if number is None else number
            fork = ForkId(self.new_id()) if fork is None else fork
            letter = self._post(owner, [("born", number, fork, self.life)])
            if letter is not None:
                self._orphans.pop(fork, None)
                self._forks[fork] = owner, number
            return number, fork, letter or (-1, [])

    def asked(self, owner: Life, letter: Notice, *, heard: bool) -> None:
        """The call that took news along is over. If it cannot be said that it brought them they are told again."""
        with self._lock:
            outbox = self._outboxes.get(owner)
            if outbox is None or not outbox.waits_for(letter[0]):
                return
            if heard:
                outbox.heard([letter])
                return
        self._send(owner, [letter], _TRIES)

    def tell(self, owner: Life, news: list[Update]) -> None:
        """Let the owner of values know."""
        if owner == self.life:
            self._hear(news)
            return
        with self._lock:
            letters = self._prepare(owner, news)
        if letters:
            self._send(owner, letters, _TRIES)

    def _post(self, owner: Life, news: list[Update]) -> Notice | None:
        """Number news for an owner, unless it is gone. Called with the lock."""
        if isinstance(self.client.peers.in_life(*owner), tuple) or owner[0] == self.id:
            return None
        return self._outboxes.setdefault(owner, NoticeOutbox()).add(news)

    def _prepare(self, owner: Life, news: list[Update]) -> list[Notice]:
        """The same, with those that did not get there before. Called with the lock."""
        letter = self._post(owner, news)
        return [] if letter is None else [*self._outboxes[owner].take_back(), letter]

    def _send(self, owner: Life, letters: list[Notice], tries: int) -> None:
        """Send numbered news. What is not heard after some tries goes with the next, since none is read before it, or
        when the owner is there again.
        """

        def check(done: Future[Any]) -> None:
            try:
                done.value()
            except Exception as error:
                if tries > 1 and not self.worker.closed:
                    failed = _TRIES - tries
                    again = functools.partial(self._send, owner, letters, tries - 1)
                    self._later(again, failed, awaited=failed < _AWAITED)
                    return
                log.debug("news of references did not reach worker %d: %s", owner[0], error)
                with self._lock:
                    if owner in self._outboxes:
                        self._outboxes[owner].put_back(letters)
            else:
                with self._lock:
                    if owner in self._outboxes:
                        self._outboxes[owner].heard(letters)

        peer = self.client.peers.in_life(*owner)
        if not isinstance(peer, tuple):
            self.call(peer, take_news, (self.life, owner[1], letters), check)

    def call(self, peer: Peer | None, function: Any, arguments: Any, check: Callable[[Future[Any]], None]) -> None:
        """Call one of ours on another worker. ``check`` gets the outcome, unless this worker is being closed."""
        try:
            if peer is None:
                raise UnknownWorkerError("it is not known here yet")
            done: Future[None] = self.client.call_async(peer.record.id, function, arguments, None, 0, mode="internal")
        except NotInitializedError as error:
            log.debug("nothing is said about references any more: %s", error)
            return
        except BackhaulError as error:
            done = Future()
            done.set_exception(error)
        done._when_done(check)

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
        by_owner: dict[Life, list[Update]] = {}
        for item in batch:
            if len(item) == 1:
                self.let_go(item[0])
        with self._lock:  # once it is said that a fork is gone nothing else is
            for item in batch:
                if len(item) > 1:
                    owner, number, fork = item
                    self._forks.pop(fork, None)
                    if self._orphans.pop(fork, None) is None:  # else nobody is left to be told
                        by_owner.setdefault(owner, []).append(("gone", number, fork, self.life))
            letters = {owner: self._prepare(owner, news) for owner, news in by_owner.items() if owner != self.life}
        batch.clear()
        self._hear(by_owner.get(self.life, ()))
        self._deliver(letters)

    def _deliver(self, letters: dict[Life, list[Notice]]) -> None:
        for owner, some in letters.items():
            if some:
                self._send(owner, some, _TRIES)

    def begin(self) -> None:
        """End all forks held here, whether or not handles exist."""
        with self._lock:
            forks, self._forks = self._forks, {}
            letters: dict[Life, list[Notice]] = {}
            for fork, (owner, number) in forks.items():
                letters.setdefault(owner, []).extend(self._prepare(owner, [("gone", number, fork, self.life)]))
        self._deliver(letters)

    def end(self) -> list[str]:
        """Values of this worker's to which others still refer."""
        with self._lock:
            entries = self._owned.entries.values()
            left = [(entry.value, sorted({holder for holder, _ in entry.forks.values()})) for entry in entries]
        return [
            f"{_describe(value)} is still referred to by " + ", ".join(f"worker {holder}" for holder in holders)
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
        """Only the channel may be gone, so see whether the worker is still there; if not, its references are not. Those
        that were on their way may be lost.
        """
        life, letters = identity_of(peer), {}
        if self.worker.closed or peer.gone:
            return
        with self._lock:
            self._met.discard(life)
            news: list[Update] = [("lost", RRefId(-1), ForkId(-1), life)]
            for owner in self._passed.get(life, ()):
                if owner == self.life:
                    self._owned.hear(self.life, news)
                else:  # numbered at once: what is sent later is not meant
                    letters[owner] = self._prepare(owner, news)
            holds_some = self._owned.holds_some(life)
            suspects = self._take_suspects()
        self._look_for(suspects)
        # In tasks of their own: it may take a while.
        if letters:
            self.worker.thread_pool.submit(functools.partial(self._deliver, letters))
        if holds_some:
            self.worker.thread_pool.submit(functools.partial(self._meet, life))

    def _on_change(self, what: str, peer: Peer, reason: str) -> None:
        """A worker that is gone for good holds nothing any more, and there is nothing to be said to it or heard of it.
        One that is there again may not have heard all.
        """
        life = identity_of(peer)
        if what == "joined":
            with self._lock:
                outbox = self._outboxes.get(life)
                letters = [] if outbox is None else outbox.take_back()
            if letters:
                self.worker.thread_pool.submit(functools.partial(self._send, life, letters, _TRIES))
        if what not in ("left", "replaced"):
            return
        with self._lock:
            self._met.discard(life)
            self._inboxes.pop(life, None)
            self._outboxes.pop(life, None)
            self._passed.pop(life, None)
            for owners in self._passed.values():
                owners.pop(life, None)
            for fork in [fork for fork, (owner, _) in self._forks.items() if owner == life]:
                del self._forks[fork]
                self._orphans[fork] = reason
            freed = self._owned.lose(life)
            suspects = self._take_suspects()
        self._look_for(suspects)
        self.worker.thread_pool.submit(functools.partial(self._end, freed))  # not under the locks that are held here

    # On messages: the forks that travel in them.

    def note_parcels(self, peer: Peer, encoded: Encoded) -> bytes:
        receiver, by_owner = identity_of(peer), dict[Life, list[Update]]()
        for owner, incarnation, number, fork in encoded.parcels:
            by_owner.setdefault((owner, incarnation), []).append(("made", number, fork, receiver))
        with self._lock:
            if not isinstance(self.client.peers.in_life(*receiver), tuple):
                self._passed.setdefault(receiver, {}).update(dict.fromkeys(by_owner))
        for life, news in by_owner.items():
            self.tell(life, news)
        return pack(Passed(tuple(encoded.parcels)))

    def failed(self, peer: Peer, note: bytes) -> None:
        """Nothing to do: if the message came, its forks tell when they die; if its channel is lost, they are asked for;
        if its receiver is gone, so are they.
        """

    def discard(self, peer: Peer, note: bytes) -> None:
        """Forks that arrived with a message nobody is going to read, or that were never sent, are gone."""
        self._start_cleaner()
        for owner, incarnation, number, fork in unpack(note, Passed).forks:
            with self._lock:
                held = fork in self._forks or fork in self._orphans
                refused = fork in self._refused
            if not held and not refused:  # else its handle tells when it dies, or the owner knows
                self.bury(((owner, incarnation), number, fork))


def _describe(value: Future[Any]) -> str:
    """A value, whatever has become of it, for people."""
    if not value.done():
        return "a value of type unknown"
    if (error := value._failure()) is not None:
        return f"a value that could not be made ({type(error).__name__})"
    return f"a value of type {type(value.value()).__name__}"


def _gone_with(owner: str, reason: str) -> PeerLostError:
    return PeerLostError(f"the value is gone with its owner: {reason}", worker=owner, reason=reason)


def current_rrefs() -> RRefRegistry:
    """Those of the current worker."""
    return current_worker().part(RRefRegistry)


def _meant(incarnation: str) -> RRefRegistry:
    rrefs = current_rrefs()
    if incarnation != rrefs.life[1]:
        name = rrefs.worker.name
        raise PeerLostError(f"worker '{name}' was restarted", worker=name, reason="it was restarted")
    return rrefs


@never_dropped  # of a worker that is lost too: it may have passed references on
def take_news(sender: Life, incarnation: str, letters: list[Notice]) -> None:
    """Called by those who hold references; see ``RRefRegistry.take_news``."""
    _meant(incarnation).take_news(sender, letters)


@never_dropped
def ask(owner: Life, incarnation: str, forks: list[tuple[int, int]]) -> None:
    """Called by owners of values; see ``RRefRegistry.confirm``."""
    _meant(incarnation).confirm(owner, forks)
