"""The forks that a worker holds of values on other workers."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable

from backhaul._rpc.calls.client import CallClient
from backhaul._rpc.calls.served_call import ServedCall, never_dropped
from backhaul._rpc.cluster.peers import Peer
from backhaul._rref.members import find_member
from backhaul._rref.notice_sender import NoticeSender
from backhaul._rref.notices import Notice
from backhaul._rref.ownership import ForkId, Identity, RRefId, Update
from backhaul._types import WorkerId, WorkerInfo
from backhaul._worker.worker import Worker, current_worker
from backhaul.errors import PeerLostError, UnknownWorkerError

Fork = tuple[Identity, RRefId, ForkId]
"""A fork with its value, and the owner of that value."""

Expected = tuple[RRefId, ForkId, Notice]
"""A value to come, its first fork, and the notice about that fork (number -1: the owner is gone)."""

_MAX_REFUSED = 4096  # forks that this worker has called absent and remembers


def value_lost(owner: str, reason: str) -> PeerLostError:
    """The error of a value whose owner is gone."""
    return PeerLostError(f"the value is gone with its owner: {reason}", worker=owner, reason=reason)


class HeldForks:
    """Attached to a worker. Thread-safe.

    Attributes:
        lent: Forks that are lent to calls which this worker serves, see ``ownership``, [Note: loans]. A destructor
            removes its fork at any time, without a lock. What finds the fork gone has nothing to announce.

    Args:
        worker: The worker.
        client: Its client.
        lock: Guards the tables. Shared with the notices, because a fork and the notice about it change together.
        notices: Tells the owners.
        new_id: Makes ids that are unique in the cluster.
    """

    def __init__(
        self,
        worker: Worker,
        client: CallClient,
        lock: threading.Lock,
        notices: NoticeSender,
        new_id: Callable[[], int],
    ) -> None:
        self.identity = notices.identity
        self._worker = worker
        self._client = client
        self._lock = lock
        self._notices = notices
        self._new_id = new_id
        self._forks: dict[ForkId, tuple[Identity, RRefId]] = {}  # fork -> owner, value
        self._orphans: dict[ForkId, str] = {}  # held forks whose owner is gone for good -> reason
        self._refused: dict[ForkId, None] = {}  # forks that this worker has called absent, so it takes them no more
        self.lent: dict[ForkId, tuple[Identity, RRefId]] = {}
        worker.attach(self)

    def __len__(self) -> int:
        return len(self._forks) + len(self.lent)

    def adopt(self, owner: Identity, number: RRefId, fork: ForkId) -> WorkerInfo:
        """Hold a fork that has arrived. Returns its owner. If the owner is gone for good the fork is an orphan; see
        ``check``.

        Raises:
            UnknownWorkerError: The owner is not known here.
            PeerLostError: This worker has told the owner that the fork did not arrive.
        """
        with self._lock:
            self.check_accepted(fork)
            peer = find_member(self._client, owner)
            if isinstance(peer, Peer):
                self._forks[fork] = owner, number
                return peer.info
            if peer is None and owner[0] != self.identity[0]:
                raise UnknownWorkerError(
                    f"worker {owner[0]}, which owns the value of a reference, is not known to '{self._worker.name}' yet"
                )
            name, why = peer or (self._worker.name, "was restarted")
            self._orphans[fork] = f"worker '{name}' {why}"
            return WorkerInfo(name, WorkerId(owner[0]))

    def borrow(self, call: ServedCall, owner: Identity, number: RRefId, fork: ForkId) -> WorkerInfo:
        """Hold a fork that the caller has lent to a call. Returns its owner, which is the caller.

        Raises:
            PeerLostError: This worker has told the owner that the fork did not arrive.
        """
        with self._lock:
            self.check_accepted(fork)
            self.lent[fork] = owner, number
        if not call.loans:
            call.at_end = functools.partial(self._end_loans, call, call.at_end)
        call.loans = (*call.loans, fork)
        return call.peer.info

    def _end_loans(self, call: ServedCall, before: Callable[[], None] | None) -> None:
        """The reply of a call is about to go out: announce the lent forks that are still in use."""
        if before is not None:
            before()
        forks, call.loans = call.loans, ()
        if not any(fork in self.lent for fork in forks):
            return
        updates: dict[Identity, list[Update]] = {}
        with self._lock:
            for fork in forks:
                found = self.lent.pop(fork, None)
                if found is not None:
                    self._forks[fork] = found
                    updates.setdefault(found[0], []).append(("forked", found[1], fork, self.identity))
            notices = self._notices.prepare(updates)
        self._notices.send_all(notices)

    def check_accepted(self, fork: ForkId) -> None:
        """Raise ``PeerLostError`` if this worker has called the fork absent. The caller holds the lock."""
        if fork in self._refused:
            raise PeerLostError("the reference was in a message that came after its channel was lost")

    def check(self, fork: ForkId, owner: str) -> None:
        """Raise ``PeerLostError`` if the owner of a held fork is gone for good: another worker may have its id now."""
        reason = self._orphans.get(fork)
        if reason is not None:
            raise value_lost(owner, reason)

    def is_orphan(self, fork: ForkId) -> bool:
        """Whether the owner of a held fork is gone for good."""
        return fork in self._orphans

    def expect(self, owner: Identity, number: RRefId | None = None, fork: ForkId | None = None) -> Expected:
        """Hold the first fork of a value that this worker is about to ask for. The value and the fork get ids unless
        given. The call that asks for the value carries the notice.
        """
        with self._lock:  # the values of one owner must be numbered in the order of their notices
            number = RRefId(self._new_id()) if number is None else number
            fork = ForkId(self._new_id()) if fork is None else fork
            notice = self._notices.number(owner, [("created", number, fork, self.identity)])
            if notice is not None:
                self._orphans.pop(fork, None)
                self._forks[fork] = owner, number
            return number, fork, notice or (-1, [])

    def release(self, forks: Iterable[Fork]) -> None:
        """The handles of these forks are deleted: tell the owners."""
        updates: dict[Identity, list[Update]] = {}
        with self._lock:  # held until the notices are numbered, so that no later notice calls a released fork absent
            for owner, number, fork in forks:
                self._forks.pop(fork, None)
                if self._orphans.pop(fork, None) is None:  # the owner of an orphan is gone
                    updates.setdefault(owner, []).append(("released", number, fork, self.identity))
            notices = self._notices.prepare(updates)
        self._notices.apply_own(updates.get(self.identity, ()))
        self._notices.send_all(notices)

    def release_all(self) -> None:
        """Release all held forks, whether or not handles exist."""
        updates: dict[Identity, list[Update]] = {}
        with self._lock:
            self.lent.clear()
            for fork, (owner, number) in self._forks.items():
                updates.setdefault(owner, []).append(("released", number, fork, self.identity))
            self._forks.clear()
            notices = self._notices.prepare(updates)
        self._notices.send_all(notices)

    def must_release(self, fork: ForkId) -> bool:
        """Whether the owner of a fork that nobody will use waits for its release: no handle here will release it, and
        this worker has not called it absent.
        """
        with self._lock:
            return not (fork in self._forks or fork in self._orphans or fork in self._refused)

    def confirm(self, owner: Identity, forks: Iterable[tuple[int, int]]) -> None:
        """The owner of values asks whether these forks have arrived: tell it which are absent, and refuse those from
        now on.
        """
        with self._lock:
            for _, fork in forks:
                if (lent := self.lent.pop(ForkId(fork), None)) is not None:  # the owner counts it as announced now
                    self._forks[ForkId(fork)] = lent
            missing = [(RRefId(number), ForkId(fork)) for number, fork in forks if ForkId(fork) not in self._forks]
            for _, fork in missing:
                self._refused[fork] = None
            while len(self._refused) > _MAX_REFUSED:
                del self._refused[next(iter(self._refused))]
        if missing:
            self._notices.tell(owner, [("absent", number, fork, self.identity) for number, fork in missing])

    def owner_gone(self, owner: Identity, reason: str) -> None:
        """An owner is gone for good: its forks are orphans."""
        with self._lock:
            for fork in [fork for fork, (known, _) in self._forks.items() if known == owner]:
                del self._forks[fork]
                self._orphans[fork] = reason
            for fork in [fork for fork, (known, _) in list(self.lent.items()) if known == owner]:
                if self.lent.pop(fork, None) is not None:
                    self._orphans[fork] = reason


def check_incarnation(worker: Worker, incarnation: str) -> None:
    """Raise ``PeerLostError`` if a message was meant for an earlier incarnation of this worker."""
    if incarnation != worker.incarnation:
        name = worker.name
        raise PeerLostError(f"worker '{name}' was restarted", worker=name, reason="it was restarted")


@never_dropped
def confirm_forks(owner: Identity, incarnation: str, forks: list[tuple[int, int]]) -> None:
    """Owners call this on holders; see ``HeldForks.confirm``."""
    worker = current_worker()
    check_incarnation(worker, incarnation)
    worker.part(HeldForks).confirm(owner, forks)
