"""References in messages: tells their owners of the forks that calls and replies carry."""

from __future__ import annotations

import threading

import msgspec

from backhaul._rpc.calls.client import CallClient
from backhaul._rpc.cluster.peers import Peer
from backhaul._rref.held_forks import HeldForks
from backhaul._rref.members import identity_of, is_gone
from backhaul._rref.notice_sender import NoticeSender
from backhaul._rref.ownership import ForkId, Identity, RRefId, Update
from backhaul._wire.codec import Encoded
from backhaul._wire.messages import pack, prepare, unpack
from backhaul._worker.cleaner import Cleaner


class ForksNote(msgspec.Struct, array_like=True, frozen=True):
    """The note on a message: the forks that travel in it."""

    forks: tuple[tuple[int, str, int, int], ...]  # (owner, its incarnation, value, fork)


prepare(ForksNote)


class PassedForks:
    """The interceptor of messages that carry references. Thread-safe."""

    key = "rref"

    def __init__(
        self,
        client: CallClient,
        lock: threading.Lock,
        notices: NoticeSender,
        held: HeldForks,
        cleaner: Cleaner,
    ) -> None:
        self._client = client
        self._lock = lock  # guards the table; see ``RRefRegistry``
        self._notices = notices
        self._held = held
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

    def note_parcels(self, peer: Peer, encoded: Encoded) -> bytes:
        receiver, updates = identity_of(peer), dict[Identity, list[Update]]()
        for owner, incarnation, number, fork in encoded.parcels:
            updates.setdefault((owner, incarnation), []).append(("forked", number, fork, receiver))
        with self._lock:
            if not is_gone(self._client, receiver):
                self._owners.setdefault(receiver, {}).update(dict.fromkeys(updates))
        for identity, some in updates.items():
            self._notices.tell(identity, some)
        return pack(ForksNote(tuple(encoded.parcels)))

    def failed(self, peer: Peer, note: bytes) -> None:
        """Nothing to do. If the message arrived, its forks are released by their handles. If its channel is lost, the
        owners ask for them. If its receiver is gone, so are they.
        """

    def discard(self, peer: Peer, note: bytes) -> None:
        """Release the forks of a message that arrived and that nobody will read, or that was never sent."""
        self._cleaner.start()
        for owner, incarnation, number, fork in unpack(note, ForksNote).forks:
            if self._held.must_release(ForkId(fork)):
                self._cleaner.put(((owner, incarnation), RRefId(number), ForkId(fork)))
