"""How a layer above takes part in calls without RPC knowing it: it puts notes on messages and may replace
their tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from backhaul._wire.codec import Encoded

if TYPE_CHECKING:
    from backhaul._rpc.calls.pending import Pending
    from backhaul._rpc.cluster.peers import Peer
    from backhaul._rpc.futures import Future
    from backhaul._rpc.node import Node
    from backhaul._wire.frames import Frame
    from backhaul.errors import PeerLostError


class Interceptor(Protocol):
    """Sees the calls of a worker, on both ends. A note is None where there is nothing to say, and what is kept None
    where it has nothing more to do with the call: most calls are of no concern to it, and cost nothing.
    """

    key: str
    """Names this interceptor's notes on the wire."""

    def request_out(self, peer: Peer, encoded: Encoded) -> tuple[bytes | None, Any]:
        """A request goes to ``peer``. Returns a note, and what to keep until the reply is there."""

    def request_in(self, peer: Peer, note: bytes | None, tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        """A request came that has a note, of whomever, or a tensor that requires grad. Returns the tensors to use, and
        what to keep until the reply goes out.

        Called in the context (as of ``contextvars``) in which the function will run.
        """

    def reply_out(self, peer: Peer, kept: Any, encoded: Encoded) -> bytes | None:
        """The reply goes out, and something was kept of its request, or reducers left something. Returns a note."""

    def reply_in(self, peer: Peer, kept: Any, note: bytes | None, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The reply came to a call of which something was kept, or it has a tensor that requires grad and nobody kept
        anything. Returns the tensors to use. May run on any thread.
        """

    def discard(self, peer: Peer, note: bytes) -> None:
        """A message with this note, from or to ``peer``, is not going to be used: it came too late, could not be
        decoded, or was not sent. Must not block.
        """

    def failed(self, peer: Peer, note: bytes) -> None:
        """The call whose request had this note has failed: lost, too late or cancelled. It may have been done, or be
        done yet. Must not block.
        """


class ReplayHook(Protocol):
    """Keeps requests and, where it can, lets calls survive the loss of the worker they were made to."""

    def keep(self, pending: Pending, frame: Frame) -> None:
        """A request is about to go out. May raise ``PeerLostError``, as if its worker were lost."""

    def recover_call(self, pending: Pending, error: PeerLostError) -> Any:
        """A call has lost its worker. Returns the value it has in the end, or raises."""

    def rescue_later(self, pending: Pending, error: PeerLostError, future: Future[Any]) -> bool:
        """As ``rescue``, for a future, without waiting; False if nothing can be done."""


extensions: list[Callable[[Node], None]] = []
"""What to call with each new node before it listens; layers above add themselves when they are imported."""
