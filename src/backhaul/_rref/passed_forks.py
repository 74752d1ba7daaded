"""References in messages: tells their owners of the forks that calls and replies carry; see ``ownership``,
[Note: loans].
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import msgspec

from backhaul._rpc.calls.client import CallClient
from backhaul._rpc.cluster.peers import Peer
from backhaul._rref.held_forks import HeldForks
from backhaul._rref.members import identity_of, is_gone
from backhaul._rref.notice_sender import NoticeSender
from backhaul._rref.owned_values import OwnedValues
from backhaul._rref.ownership import ForkId, Identity, RRefId, Update
from backhaul._wire.codec import Encoded
from backhaul._wire.messages import pack, prepare, unpack
from backhaul._worker.cleaner import Cleaner


class ForksNote(msgspec.Struct, array_like=True, frozen=True):
    """The note on a message: the forks that travel in it."""

    announced: tuple[tuple[int, str, int, int], ...]  # (owner, its incarnation, value, fork)
    lent: tuple[tuple[int, int], ...] = ()  # (value, fork); only in requests, and the sender owns the values


prepare(ForksNote)


class PassedForks:
    """The interceptor of messages that carry references. Thread-safe."""

    key = "rref"

    def __init__(
        self,
        client: CallClient,
        lock: threading.Lock,
        notices: NoticeSender,
        *,
        held: HeldForks,
        owned: OwnedValues,
        cleaner: Cleaner,
    ) -> None:
        self._client = client
        self._lock = lock  # guards the table; see ``RRefRegistry``
        self._notices = notices
        self._held = held
        self._owned = owned
        self._cleaner = cleaner
        self._owners: dict[Identity, dict[Identity, None]] = {}  # receiver of references -> owners of their values

    def owners_for(self, receiver: Identity) -> list[Identity]:
        """The owners of the values of references that this worker has sent to a receiver. The caller holds the lock."""
        return list(self._owners.get(receiver, ()))

    def member_gone(self, identity: Identity) -> None:
        """A worker is gone for good."""
        with self._lock:
            self._owners.pop(identity, None)
            for owners in self._owners.values():
                owners.pop(identity, None)

    def note_request(self, peer: Peer, encoded: Encoded) -> bytes | None:
        """The call keeps the references until it is over."""
        receiver, announced, lent = identity_of(peer), [], []
        for rref, fork in encoded.parcels:
            if rref._identity == receiver:
                continue
            if rref._entry is not None:
                lent.append((rref._id, fork))
            else:
                announced.append((*rref._identity, rref._id, fork))
        if announced:
            self._announce(receiver, announced)
        return pack(ForksNote(tuple(announced), tuple(lent))) if announced or lent else None

    def note_reply(self, peer: Peer, encoded: Encoded) -> bytes | None:
        announced = [(*rref._identity, rref._id, fork) for rref, fork in encoded.parcels]
        self._announce(identity_of(peer), announced)
        return pack(ForksNote(tuple(announced)))

    def _announce(self, receiver: Identity, forks: Iterable[tuple[int, str, RRefId, ForkId]]) -> None:
        updates: dict[Identity, list[Update]] = {}
        for owner, incarnation, number, fork in forks:
            updates.setdefault((owner, incarnation), []).append(("forked", number, fork, receiver))
        with self._lock:
            if not is_gone(self._client, receiver):
                self._owners.setdefault(receiver, {}).update(dict.fromkeys(updates))
        for identity, some in updates.items():
            self._notices.tell(identity, some)

    def failed(self, peer: Peer, note: bytes) -> None:
        """Find out which lent forks the receiver has. For the others there is nothing to do. If the message arrived,
        its forks are released by their handles. If its channel is lost, the owners ask for them. If its receiver is
        gone, so are they.
        """
        lent = unpack(note, ForksNote).lent
        if lent:
            self._owned.loan_failed([(RRefId(number), ForkId(fork)) for number, fork in lent], identity_of(peer))

    def discard(self, peer: Peer, note: bytes) -> None:
        """Release the forks of a message that arrived and that nobody will read, or that was never sent."""
        self._cleaner.start()
        for owner, incarnation, number, fork in unpack(note, ForksNote).announced:
            if self._held.must_release(ForkId(fork)):
                self._cleaner.put(((owner, incarnation), RRefId(number), ForkId(fork)))
