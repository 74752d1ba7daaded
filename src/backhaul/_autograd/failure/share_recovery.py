"""Rebuilds a lost worker's share of a context on the worker that takes its place. Runs on the worker that made the
context. Knows nothing of passes, except that they are out of date after a recovery.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from backhaul._autograd.container import Container
from backhaul._autograd.context import Context
from backhaul._autograd.failure import replay_member
from backhaul._autograd.failure.member_calls import MAX_TRIES, POLL_SECONDS, MemberCalls, outside_contexts
from backhaul._autograd.failure.replay import ReplayLog, order
from backhaul._rpc.cluster.peers import Peer
from backhaul._runtime import interrupts
from backhaul._worker import deadlines
from backhaul._worker.worker import Worker
from backhaul.errors import ContextError, PeerLostError


class ShareRecovery:
    """Recovers lost workers, one thread at a time for each lost worker. Thread-safe."""

    def __init__(self, worker: Worker, container: Container, calls: MemberCalls) -> None:
        self._worker = worker
        self._container = container
        self._calls = calls

    def kept(self, context: int) -> tuple[Context, ReplayLog]:
        """A context that this worker made with replay. Raises ``ContextError`` if it is no such context."""
        found = self._container.get(context)
        log = found.replay
        if log is None or log.replay is None:
            raise ContextError(
                f"context {context} was not made with replay on worker '{self._worker.name}'",
                worker=self._worker.name,
                context=context,
            )
        return found, log

    def take_turn(self, log: ReplayLog, lost: int, incarnation: str, *, patient: bool) -> bool:
        """Wait for the right to recover ``lost``; ``rebuild`` gives it back. False, unless ``patient``: another thread
        rebuilds the share, and the new worker has its state already.
        """
        turn = log.turns.setdefault(lost, self._worker.runtime.lock())
        with self._worker.blocking():
            while not interrupts.acquire(turn, POLL_SECONDS):
                deadlines.check(f"worker {lost} was not recovered")
                if not patient and self._calls.incarnation_of(lost) in log.restored - {incarnation}:
                    return False
        return True

    def rebuild(self, context: Context, log: ReplayLog, lost: int, incarnation: str) -> bool:
        """Rebuild the share of a lost incarnation. The caller's thread has taken the turn. False if the worker was not
        lost after all: then only a channel was.
        """
        try:
            with outside_contexts():
                rebuilt = self._rebuild(context, log, lost, incarnation)
        finally:
            log.turns[lost].release()
        if rebuilt and log.passes:
            log.outdated = True
        return rebuilt

    def _rebuild(self, context: Context, log: ReplayLog, lost: int, incarnation: str) -> bool:
        """Try again if the replacement is lost too. If another worker is lost meanwhile, the requests that it had sent
        are lost with it, and its own replacement sends them anew.
        """
        assert log.replay is not None
        tries, fresh = MAX_TRIES, ""
        while True:
            peer = self._calls.await_member(context, lost, log.replay.timeout)
            if peer.record.incarnation == incarnation:
                return False
            if fresh != peer.record.incarnation:
                tries, fresh = MAX_TRIES, peer.record.incarnation
            try:
                self._replay_to(context, log, peer)
                return True
            except PeerLostError:
                tries -= 1
                if not tries:
                    raise

    def _replay_to(self, context: Context, log: ReplayLog, peer: Peer) -> None:
        """Restore the state of the new worker, then let every sender repeat its requests in program order."""
        lost, fresh = peer.record.id, peer.record.incarnation
        assert log.replay is not None
        timeout = log.replay.timeout
        sent = dict(self._calls.visit(context, timeout, replay_member.requests_to, lost, skip=lost))
        for requests in sent.values():
            for _, answered_by, obstacle in requests:
                if answered_by != fresh and obstacle is not None:
                    raise ContextError(obstacle, worker=peer.info.name, context=context.id)
        if fresh not in log.restored:
            if log.replay.restore is not None and peer.info.name in log.members:
                self._restore(log.replay.restore, peer)
            log.restored.add(fresh)
        stale = [
            (place, sender)
            for sender, requests in sent.items()
            for place, answered_by, _ in requests
            if answered_by != fresh
        ]
        due = order(stale)
        for sender in sent:
            self._calls.call(sender, replay_member.forget_below, context.id, [place for place, _ in due])
        for place, sender in due:
            self._calls.call(sender, replay_member.repeat, context.id, place, lost, fresh, timeout=0)

    def _restore(self, restore: Callable[[], Any], peer: Peer) -> None:
        try:
            self._calls.call(peer.record.id, restore, timeout=0)
        except Exception as error:
            error.add_note(f"raised by Replay.restore on worker '{peer.info.name}', which took a lost worker's place")
            raise
