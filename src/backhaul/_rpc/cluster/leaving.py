"""Leaving a cluster that goes on: the worker that leaves tells the others, and they tell those that it cannot reach.

How a member checks that a worker has left: ``departure``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable

from backhaul._rpc.cluster.departure import secret_of
from backhaul._rpc.cluster.internal_calls import InternalCalls, caller
from backhaul._rpc.cluster.peers import Peer, Peers
from backhaul._rpc.security.policy import internal
from backhaul._worker.worker import Worker, current_worker
from backhaul.errors import BackhaulError

_RELAY_SECONDS = 3.0  # for a member to hear that another has left
_MAX_RELAYS = 3  # members that a worker that leaves asks to tell those that it cannot reach
_MAX_UNTOLD = 1024  # members that one worker may ask to tell


class Leaving:
    """One worker's part in leaving. Thread-safe.

    Args:
        worker: The worker.
        peers: The members.
        calls: Calls them.
        when_idle: Calls a function once no call is pending and none is served.

    Attributes:
        secret: What the worker tells when it leaves; see ``departure``.
    """

    def __init__(
        self, worker: Worker, peers: Peers, calls: InternalCalls, when_idle: Callable[[Callable[[], None]], None]
    ) -> None:
        self._worker = worker
        self._peers = peers
        self._calls = calls
        self._when_idle = when_idle
        self.secret = secret_of(worker.incarnation)
        worker.attach(self)

    def leave(self, deadline: float) -> None:
        """Tell all members that this worker leaves, once nothing is under way here."""
        self._await_idle(deadline)
        others = [peer for peer in self._peers if peer is not self._peers.own]
        untold = [peer for peer in others if peer.lost]
        told = self._tell([peer for peer in others if not peer.lost], untold, deadline)
        missed = [peer for peer in others if peer not in told and peer not in untold]
        if missed:
            self._tell(told[:_MAX_RELAYS], missed, deadline)
        self._await_idle(deadline)  # for calls that came meanwhile

    def _await_idle(self, deadline: float) -> None:
        idle = self._worker.runtime.one_shot()
        self._when_idle(idle.open)
        with self._worker.blocking():
            idle.wait(max(deadline - self._worker.runtime.now(), 0.0))

    def _tell(self, members: list[Peer], untold: Iterable[Peer], deadline: float) -> list[Peer]:
        """Tell members that this worker leaves, and ask the first of them to tell the ``untold``. Returns those that
        have heard it.
        """
        absent = [peer.record.incarnation for peer in untold]
        asked = ((peer, (self.secret, absent if n < _MAX_RELAYS else [])) for n, peer in enumerate(members))
        return [peer for peer, _ in self._calls.call_each(asked, forget, deadline)]

    def forget(self, leaver: Peer, proof: str, untold: list[str]) -> None:
        """A member says that it leaves, and which members it could not tell."""
        self._peers.dismiss(leaver, proof)
        if untold and leaver.record.has_left(proof):
            relay = functools.partial(self._relay, leaver.record.incarnation, proof, set(untold[:_MAX_UNTOLD]))
            self._worker.thread_pool.submit(functools.partial(self._worker.run, relay))

    def take_proof(self, incarnation: str, proof: str) -> None:
        """A member passes on the proof that a worker has left."""
        self._peers.take_proof(incarnation, proof)

    def _relay(self, incarnation: str, proof: str, untold: set[str]) -> None:
        """Tell members that this worker can reach that another one has left."""
        with self._worker.thread_pool.blocking():
            for peer in self._peers:
                if peer.record.incarnation in untold and peer is not self._peers.own and not peer.lost:
                    with contextlib.suppress(BackhaulError):
                        self._calls.call(peer, departed, (incarnation, proof), _RELAY_SECONDS)


@internal(str, list)
def forget(proof: str, untold: list[str]) -> None:
    """Called by a worker that leaves, with its proof and the incarnations of the members that it could not tell. The
    channel of the call says which worker leaves: no worker can speak for another.

    Never dropped: the caller may be gone when this runs.
    """
    leaver = caller()
    if leaver is not None and leaver.record.incarnation != current_worker().incarnation:
        current_worker().part(Leaving).forget(leaver, proof, [each for each in untold if type(each) is str])


@internal(str, str)
def departed(incarnation: str, proof: str) -> None:
    """Called by any member: a worker has left and could not tell this one. The proof counts, not the caller."""
    current_worker().part(Leaving).take_proof(incarnation, proof)
