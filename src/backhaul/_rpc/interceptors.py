"""How layers above take part in calls: they put notes on messages, and may replace the tensors of messages.

RPC does not know these layers. It carries their notes as bytes, under the key of the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch

from backhaul._wire.codec import Encoded

if TYPE_CHECKING:
    from backhaul._rpc.calls.pending_call import Pending
    from backhaul._rpc.cluster.peers import Peer
    from backhaul._rpc.futures import Future
    from backhaul._rpc.node import Node
    from backhaul._wire.frames import Frame
    from backhaul.errors import PeerLostError

PROFILE = "profile"
"""The key of the note that a profile puts on a request."""


class NoteOwner(Protocol):
    """Puts notes on messages, and hears of notes that are not used."""

    key: str
    """Names the notes on the wire."""

    def discard(self, peer: Peer, note: bytes) -> None:
        """A message with this note, from or to ``peer``, will not be used: it came too late, could not be decoded, or
        was not sent. Must not block.
        """

    def failed(self, peer: Peer, note: bytes) -> None:
        """The call whose request had this note has failed: its worker is lost, its time is over, or it was cancelled.
        The function may have run, or may still run. Must not block.
        """


class Interceptor(NoteOwner, Protocol):
    """Sees the calls of a worker, on both ends.

    A note is None if there is nothing to say. The kept value is None if the interceptor does not want to see the reply.
    Most calls do not concern an interceptor, and cost nothing.
    """

    def request_out(self, peer: Peer, encoded: Encoded) -> tuple[bytes | None, Any]:
        """A request goes to ``peer``. Returns a note, and a value to keep until the reply is there."""

    def request_in(self, peer: Peer, note: bytes | None, tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        """A request came that has a note, of any owner, or a tensor that requires grad. Returns the tensors to use, and
        a value to keep until the reply goes out.

        Called in the context (as of ``contextvars``) in which the function will run.
        """

    def reply_out(self, peer: Peer, kept: Any, encoded: Encoded) -> bytes | None:
        """The reply to a request goes out, and an interceptor has kept a value of the request. Returns a note."""

    def reply_in(self, peer: Peer, kept: Any, note: bytes | None, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The reply came to a call of which this interceptor kept a value, or the reply has a tensor that requires grad
        and no interceptor kept a value. Returns the tensors to use. May run on any thread.
        """


class ParcelCarrier(NoteOwner, Protocol):
    """Puts a note on those messages in which the pickling of values left parcels (``Encoded.parcels``)."""

    def note_request(self, peer: Peer, encoded: Encoded) -> bytes | None:
        """A request with parcels goes to ``peer``. Returns the note. The call keeps the parcels until it is over."""

    def note_reply(self, peer: Peer, encoded: Encoded) -> bytes | None:
        """A reply with parcels goes to ``peer``. Returns the note."""


class Interceptors:
    """All who put notes on the calls of one worker. Filled before the worker starts, and not changed later.

    Attributes:
        of_calls: See every call.
        of_parcels: See only messages with parcels.
        taken_from_untrusted: The keys of notes that may be on calls of peers which this worker does not trust.
    """

    def __init__(self) -> None:
        self.of_calls: list[Interceptor] = []
        self.of_parcels: list[ParcelCarrier] = []
        self.taken_from_untrusted = {PROFILE}

    def add(self, interceptor: Interceptor, *, from_untrusted: bool) -> None:
        """Let ``interceptor`` see every call. ``from_untrusted``: whether it checks notes of untrusted peers."""
        self.of_calls.append(interceptor)
        if from_untrusted:
            self.taken_from_untrusted.add(interceptor.key)

    def add_carrier(self, carrier: ParcelCarrier) -> None:
        """Let ``carrier`` note parcels. Untrusted peers must not send such notes: they speak for other workers."""
        self.of_parcels.append(carrier)

    def discard(self, peer: Peer, notes: Mapping[str, bytes]) -> None:
        """Tell the owners of notes that the message which has them will not be used."""
        for owner in (*self.of_calls, *self.of_parcels) if notes else ():
            note = notes.get(owner.key)
            if note is not None:
                owner.discard(peer, note)

    def tell_failed(self, peer: Peer, notes: Mapping[str, bytes]) -> None:
        """Tell the owners of notes that the call whose request has them failed. The request may have arrived."""
        for owner in (*self.of_calls, *self.of_parcels) if notes else ():
            note = notes.get(owner.key)
            if note is not None:
                owner.failed(peer, note)


class ReplayHook(Protocol):
    """Keeps requests and, where it can, lets calls survive the loss of the worker they were made to."""

    def keep(self, pending: Pending, frame: Frame) -> None:
        """A request is about to go out. May raise ``PeerLostError``, as if its worker were lost."""

    def recover_call(self, pending: Pending, error: PeerLostError) -> Any:
        """A call has lost its worker. Returns the value that the call has in the end, or raises."""

    def recover_later(self, pending: Pending, error: PeerLostError, future: Future[Any]) -> bool:
        """As ``recover_call``, without waiting: completes ``future`` later. Returns False if it cannot help."""


extensions: list[Callable[[Node], None]] = []
"""Functions to call with each new node before it listens. Layers above add theirs when they are imported."""
