"""Leaving a cluster that goes on: the worker that leaves tells the others, and they tell those that it cannot reach. In
a large cluster it tells only members with which it shares a channel, and one of these tells the rest.

How a member checks that a worker has left: ``departure``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

from backhaul._rpc.cluster.departure import secret_of
from backhaul._rpc.cluster.internal_calls import InternalCalls, caller
from backhaul._rpc.cluster.peers import Peer, Peers
from backhaul._rpc.security.policy import internal
from backhaul._worker.worker import Worker, current_worker

log = logging.getLogger("backhaul")

_RELAY_SECONDS = 3.0  # for a member to hear that another has left
_MAX_RELAYS = 3  # members that a worker that leaves asks to tell those that it cannot reach
_MAX_TOLD = 32  # members that a worker tells although it has no channel to them
_MAX_UNTOLD = 1 << 12  # members that one worker may ask to tell


class _Relay(NamedTuple):
    """A departure of which other members have to hear."""

    incarnation: str
    proof: str
    untold: frozenset[str]  # incarnations of the members that have to hear of it


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
        self._lock = threading.Lock()  # guards the two below
        self._relays: list[_Relay] = []  # departures of which this worker has to tell others
        self._relaying = False  # a thread tells them
        worker.attach(self)

    def leave(self, deadline: float) -> None:
        """Tell all members that this worker leaves, once nothing is under way here."""
        self._await_idle(deadline)
        others = [peer for peer in self._peers if peer is not self._peers.own]
        untold = [peer for peer in others if peer.lost]
        present = [peer for peer in others if not peer.lost]
        near = present
        if len(present) > _MAX_TOLD:
            near = [peer for peer in present if peer.channels or peer is present[0]]  # the first is the leader
        told = self._tell(near, untold, deadline)
        missed = [peer for peer in near if peer not in told]
        if missed:
            self._tell(told[:_MAX_RELAYS], missed, deadline)
        distant = [peer for peer in present if peer not in near]
        if distant:
            any(self._tell([relay], distant, deadline) for relay in told)  # one is enough; it tells all at once
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
            with self._lock:
                self._relays.append(_Relay(leaver.record.incarnation, proof, frozenset(untold[:_MAX_UNTOLD])))
                start, self._relaying = not self._relaying, True
            if start:
                self._worker.thread_pool.submit(self._relay_all)

    def take_proof(self, incarnation: str, proof: str) -> None:
        """A member passes on the proof that a worker has left."""
        self._peers.take_proof(incarnation, proof)

    def _relay_all(self) -> None:
        """Tell members that others have left, as many at once as there are, until there are no more."""
        with self._worker.thread_pool.blocking():
            while batch := self._next_batch():
                try:
                    self._worker.run(self._relay, batch)
                except Exception:
                    log.exception("could not tell members that %d workers have left", len(batch))

    def _next_batch(self) -> list[_Relay]:
        with self._lock:
            batch, self._relays = self._relays, []
            self._relaying = bool(batch)
            return batch

    def _relay(self, batch: list[_Relay]) -> None:
        """Tell members that this worker can reach which others have left, each in one message."""
        asked = []
        for peer in self._peers:
            proofs = [[each.incarnation, each.proof] for each in batch if peer.record.incarnation in each.untold]
            if proofs and peer is not self._peers.own and not peer.lost:
                asked.append((peer, (proofs,)))
        self._calls.call_each(asked, departed, self._worker.runtime.now() + _RELAY_SECONDS)


@internal(str, list)
def forget(proof: str, untold: list[str]) -> None:
    """Called by a worker that leaves, with its proof and the incarnations of the members that it could not tell. The
    channel of the call says which worker leaves: no worker can speak for another.

    Never dropped: the caller may be gone when this runs.
    """
    leaver = caller()
    if leaver is not None and leaver.record.incarnation != current_worker().incarnation:
        current_worker().part(Leaving).forget(leaver, proof, [each for each in untold if type(each) is str])


@internal(list)
def departed(proofs: list[list[str]]) -> None:
    """Called by any member: workers have left and could not tell this one. Each has its incarnation and its proof; the
    proof counts, not the caller.
    """
    for incarnation, proof in proofs:
        if type(incarnation) is str and type(proof) is str:
            current_worker().part(Leaving).take_proof(incarnation, proof)
