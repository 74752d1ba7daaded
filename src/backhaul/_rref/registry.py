"""All references of one worker: connects the parts, and reacts to the loss of a worker or a channel.

- ``ownership``, ``notices``: which workers refer to a value, and numbered notices about it (pure).
- ``owned_values``: the values that the worker owns.
- ``held_forks``: the forks that it holds of other workers' values.
- ``notice_sender``: delivers notices to owners.
- ``passed_forks``: the forks that messages carry.
- ``cleanup``: releases the forks and values of deleted handles.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Sequence

from backhaul._rpc.calls.served_call import ServedCall
from backhaul._rpc.cluster.peers import Peer
from backhaul._rpc.node import Node
from backhaul._rref.held_forks import Fork, HeldForks
from backhaul._rref.members import identity_of
from backhaul._rref.notice_sender import NoticeSender
from backhaul._rref.owned_values import Entry, OwnedValues, take_notices
from backhaul._rref.ownership import ForkId, Identity, RRefId, Update
from backhaul._rref.passed_forks import PassedForks
from backhaul._transport.base import Channel
from backhaul._types import WorkerInfo, first_number
from backhaul._worker import deadlines
from backhaul._worker.cleaner import Cleaner
from backhaul._worker.worker import current_worker


class RRefRegistry:
    """Attached to a worker. Thread-safe: the parts share one lock, since a fork, the notice about it and its message
    belong together.
    """

    def __init__(self, node: Node) -> None:
        worker, client = node.worker, node.client
        self.worker = worker
        self.client = client
        self.identity: Identity = int(worker.info.id), worker.incarnation
        self._numbers = itertools.count(first_number(worker.incarnation))
        self._lock = lock = threading.Lock()  # guards the tables of all parts
        self.notices = NoticeSender(worker, client, lock, self._apply_own, take_notices)
        self.held = HeldForks(worker, client, lock, self.notices, self.new_id)
        self.owned = OwnedValues(worker, client, lock, self.notices, self.held)
        self.cleaner = Cleaner(worker, "rref", self._release)
        self._passed = PassedForks(client, lock, self.notices, held=self.held, owned=self.owned, cleaner=self.cleaner)
        client.interceptors.add_carrier(self._passed)
        node.peers.on_lost(self._on_lost)
        node.peers.on_change(self._on_change)
        node.audits.append(self)
        worker.on_close(self._close)
        worker.attach(self)
        worker.counters["num_owner_rrefs"] = self.owned.__len__
        worker.counters["num_forks"] = self.owned.count_forks
        worker.counters["num_user_rrefs"] = self.held.__len__

    def new_id(self) -> int:
        """A number that nothing else in the cluster has."""
        return self.identity[0] << 48 | next(self._numbers)

    def own(self, number: RRefId) -> Entry:
        """The entry of a value of this worker. It stays until ``release``."""
        self.cleaner.start()
        return self.owned.own(number)

    def add_handle(self, number: RRefId, handle: int) -> Entry:
        """The entry of a value of this worker. It stays until the handle of that id is deleted."""
        self.cleaner.start()
        return self.owned.add_handle(number, handle)

    def arrive(
        self, handle: int, owner: Identity, number: RRefId, fork: ForkId, via: ForkId | None
    ) -> tuple[WorkerInfo, Entry | None]:
        """A reference has arrived. Returns the owner of the value and, if that is this worker, the value's entry.

        Args:
            handle: The id of the handle that is made for it.
            owner: The owner of the value.
            number: The value.
            fork: The fork that was made for this worker.
            via: The fork of the sender, -1 if it owns the value; None: ``fork`` was announced in any case.
        """
        self.cleaner.start()
        call = None if via is None else deadlines.current.get()
        if not (isinstance(call, ServedCall) and call.decoding):
            call = None  # the message is a reply
        if owner == self.identity:
            if call is None or via is None:
                return self.worker.info, self.owned.come_home(number, fork, handle)
            return self.worker.info, self.owned.visit(number, via, identity_of(call.peer), handle)
        if call is not None and owner == identity_of(call.peer):
            return self.held.borrow(call, owner, number, fork), None
        return self.held.adopt(owner, number, fork), None

    def begin(self) -> None:
        """Before an audit: release all held forks, whether or not handles exist."""
        self.held.release_all()
        self.notices.flush()

    def end(self) -> list[str]:
        """After an audit: describe the values of this worker to which others still refer."""
        return self.owned.leaks()

    def _apply_own(self, updates: Sequence[Update]) -> None:
        self.owned.apply_own(updates)  # ``owned`` is made after ``notices``

    def _release(self, batch: list[Entry | Fork]) -> None:
        """Release what deleted handles referred to."""
        forks = [item for item in batch if isinstance(item, tuple)]
        entries = [item for item in batch if not isinstance(item, tuple)]
        batch.clear()
        if entries:
            self.owned.drop(entries)
        if forks:
            self.held.release(forks)

    def _close(self) -> None:
        self.cleaner.close()
        self.owned.close()

    def _on_lost(self, peer: Peer, channel: Channel, reason: str) -> None:
        """A channel is lost, and forks that were under way in it may be lost. Report this to their owners. If the peer
        holds values of this worker, find out whether it can be reached; if not, its forks are gone.
        """
        if self.worker.closed or peer.gone:
            return
        identity = identity_of(peer)
        updates: list[Update] = [("lost", RRefId(-1), ForkId(-1), identity)]
        with self._lock:  # numbered at once, so that the notice does not cover forks that are sent later
            owners = self._passed.owners_for(identity)
            unacknowledged = self.notices.unacknowledged(identity)
            notices = self.notices.prepare(dict.fromkeys(owners, updates))
        is_holder = self.owned.channel_lost(identity, updates if self.identity in owners else ())
        # In separate tasks, because they may take long.
        if unacknowledged:
            self.worker.thread_pool.submit(functools.partial(self.notices.send_as_call, identity, unacknowledged))
        if notices:
            self.worker.thread_pool.submit(functools.partial(self.notices.send_all, notices))
        if is_holder:
            self.worker.thread_pool.submit(functools.partial(self.owned.reach, identity))

    def _on_change(self, what: str, peer: Peer, reason: str) -> None:
        """A member has joined, left or been replaced. A member that has come back may have missed notices. A member
        that is gone for good holds nothing; send nothing to it and expect nothing from it.
        """
        identity = identity_of(peer)
        if what == "joined":
            self.notices.owner_joined(identity)
        if what in ("left", "replaced"):
            self.notices.owner_gone(identity)
            self._passed.member_gone(identity)
            self.held.owner_gone(identity, reason)
            self.owned.holder_gone(identity)


def current_rrefs() -> RRefRegistry:
    """The references of the current worker."""
    return current_worker().part(RRefRegistry)
