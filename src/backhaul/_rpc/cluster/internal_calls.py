"""Calls of Backhaul's own functions between members. The room ``cluster`` knows the client of calls only as this."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from backhaul._rpc.cluster.peers import Peer
from backhaul._rpc.futures import Future
from backhaul._worker import deadlines
from backhaul.errors import BackhaulError

_LEAST_SECONDS = 0.001  # for a call whose deadline is over


class Client(Protocol):
    """What is needed of the client of calls."""

    def call(
        self,
        to: Any,
        function: Callable[..., Any] | str,
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        timeout: float | None,
        *,
        mode: str,
    ) -> Any:
        """Call and wait."""

    def call_async(
        self,
        to: Any,
        function: Callable[..., Any] | str,
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        timeout: float | None,
        *,
        mode: str,
    ) -> Future[Any]:
        """Call and return a future."""


class InternalCalls:
    """Calls functions that are registered with ``internal`` on other members. Thread-safe."""

    def __init__(self, client: Client, now: Callable[[], float]) -> None:
        self._client = client
        self._now = now

    def call(self, peer: Peer, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> Any:
        """Call a member and wait for its answer. Raises what ``rpc_sync`` raises."""
        return self._client.call(peer.info, function, args, None, timeout, mode="internal")

    def call_each(
        self, calls: Iterable[tuple[Peer, tuple[Any, ...]]], function: Callable[..., Any], deadline: float
    ) -> list[tuple[Peer, Any]]:
        """Call several members at the same time, each with its own arguments. Returns the answers of those that
        answered before the deadline; the others are left out.
        """
        begun: list[tuple[Peer, Future[Any]]] = []
        for peer, args in calls:
            left = max(deadline - self._now(), _LEAST_SECONDS)
            try:
                begun.append((peer, self._client.call_async(peer.info, function, args, None, left, mode="internal")))
            except BackhaulError:  # it is gone
                pass
        answers = []
        for peer, call in begun:
            try:
                answers.append((peer, call.wait()))
            except BackhaulError:
                pass
        return answers


def caller() -> Peer | None:
    """The member whose call runs on this thread; None if none does."""
    peer = getattr(deadlines.current.get(), "peer", None)
    return peer if isinstance(peer, Peer) else None
