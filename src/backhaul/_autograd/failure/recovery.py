"""Recovery of contexts with replay, on one worker: the parts, and how they work together.

The worker that made a context leads its recovery. The other workers keep their requests, send them again when the
maker asks for it, and undo what a pass has added to gradients.

- ``replay``: what is kept of a context (pure).
- ``lost_calls``: calls that lost their worker.
- ``share_recovery``: rebuilds a lost worker's share of a context (at the maker).
- ``replayed_passes``: runs passes again (at the maker).
- ``replay_member``: what every worker does for the maker.

[Note: time] A half rebuilt share is of no use. So a recovery runs on a thread of its own. That thread waits for a
replacement as long as ``Replay.timeout`` says or until the context is released, and then finishes the recovery. A call
or a pass that needs the recovery waits for it within its own limit: its timeout, the deadline around it, or its
cancellation. If it gives up, the next call or pass that needs the worker finds what was rebuilt meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from backhaul._autograd.context import Context
from backhaul._autograd.failure.lost_calls import LostCalls
from backhaul._autograd.failure.member_calls import MemberCalls
from backhaul._autograd.failure.recovery_tasks import RecoveryTasks
from backhaul._autograd.failure.replay import Replay, ReplayLog
from backhaul._autograd.failure.replay_member import ReplayMember
from backhaul._autograd.failure.replayed_passes import ReplayedPasses
from backhaul._autograd.failure.share_recovery import ShareRecovery
from backhaul._autograd.ids import split
from backhaul._worker.worker import current_worker

if TYPE_CHECKING:
    from backhaul._autograd.backward.engine import Engine


class Recovery:
    """Attached to a worker. Takes part in calls as soon as one is made in a context with replay. Thread-safe."""

    def __init__(self, engine: Engine) -> None:
        self._id = engine.worker.info.id
        self._client = engine.client
        self._calls = MemberCalls(engine.worker, engine.client)
        self._tasks = RecoveryTasks(engine.worker, engine.client)
        self._shares = ShareRecovery(engine.worker, engine.container, self._calls)
        self._passes = ReplayedPasses(engine, self._calls, self._tasks, self._shares)
        self._lost_calls = LostCalls(engine.worker, engine.client, self._tasks, self.recover_at_maker)
        self.backward = self._passes.backward
        self.await_idle = ReplayMember(engine.worker, engine.client, engine.container, self._calls).await_idle
        engine.worker.attach(self)

    def begin(self, context: Context, replay: Replay) -> None:
        """This worker has made a context with replay."""
        peers = self._client.peers
        context.replay = ReplayLog(peers.epoch, replay, [peer.info.name for peer in peers])
        self._client.keep_requests(self._lost_calls)

    def keep_requests(self, context: Context, epoch: int) -> None:
        """Keep what this worker sends from now on in a context that another worker made with replay, when the cluster
        was at that epoch.
        """
        if context.replay is None:
            with context.lock:
                if context.replay is None and not context.released:
                    context.replay = ReplayLog(epoch)
            self._client.keep_requests(self._lost_calls)

    def recover_at_maker(self, context: int, lost: int, incarnation: str) -> bool:
        """Let the maker of a context recover a worker; see ``recover``."""
        maker, _ = split(context)
        if maker == self._id:
            return self.recover(context, lost, incarnation)
        return self._calls.call(maker, recover, context, lost, incarnation, timeout=0)

    def recover(self, context: int, lost: int, incarnation: str) -> bool:
        """Rebuild the share of a lost incarnation on the worker that takes its place, with its gradients of finished
        passes. False if the worker was not lost after all: then only a channel was.

        If another thread rebuilds the share and the new worker has its state, this does not wait for that thread: a
        request that it repeats may be the caller. Other calls have no order relative to the repeated requests, as they
        had none before.
        """
        found, log = self._shares.kept(context)
        if lost == self._id:
            return False  # others have lost a channel to this worker
        if not self._shares.take_turn(log, lost, incarnation, patient=False):
            return True

        def work() -> bool:
            rebuilt = self._shares.rebuild(found, log, lost, incarnation)
            if rebuilt:
                self._passes.catch_up(found, log)
            return rebuilt

        return self._tasks.run(work)


def recover(context: int, lost: int, incarnation: str) -> bool:
    """Called on the maker of a context; see ``Recovery.recover``."""
    return current_worker().part(Recovery).recover(context, lost, incarnation)
