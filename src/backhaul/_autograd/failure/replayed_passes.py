"""Runs backward passes of contexts with replay: again from the first one after a worker was lost and replaced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from backhaul._autograd.context import Context
from backhaul._autograd.failure import replay_member
from backhaul._autograd.failure.lost_calls import waited_for_replacement
from backhaul._autograd.failure.member_calls import MAX_TRIES, POLL_SECONDS, MemberCalls
from backhaul._autograd.failure.recovery_tasks import RecoveryTasks
from backhaul._autograd.failure.replay import Pass, ReplayLog
from backhaul._autograd.failure.share_recovery import ShareRecovery
from backhaul._runtime import interrupts
from backhaul._runtime.runtime import Lock
from backhaul._worker import deadlines
from backhaul._worker.deadlines import FOREVER, Block, CancelScope
from backhaul.errors import BackhaulError, BackwardTimeoutError, CallTimeoutError, ContextError, PeerLostError

if TYPE_CHECKING:
    from backhaul._autograd.backward.engine import Engine

_REFUSED = {"create": "create_graph=True", "into_grad": 'accumulate="grad"', "fast": 'mode="fast"'}


class ReplayedPasses:
    """Runs the passes of contexts that this worker made with replay. Thread-safe: one pass of a context at a time."""

    def __init__(self, engine: Engine, calls: MemberCalls, tasks: RecoveryTasks, shares: ShareRecovery) -> None:
        self._engine = engine
        self._worker = engine.worker
        self._calls = calls
        self._tasks = tasks
        self._shares = shares

    def backward(self, context: Context, *args: Any, **options: Any) -> None:
        """As ``Engine.backward``, and again after a worker was lost and replaced. The graph is kept."""
        for wrong, what in _REFUSED.items():
            if options[wrong]:
                raise ContextError(
                    f"{what} is not possible in context {context.id}, which was made with replay", context=context.id
                )
        log = context.replay
        assert log is not None
        if log.replay is None:
            raise ContextError(
                f"context {context.id} was made with replay by another worker; run backward on that worker",
                context=context.id,
            )
        log.begin_passes(context)
        limit = Block(_label(context), options["timeout"] or FOREVER, self._worker.runtime.now, deadlines.current.get())
        token = deadlines.current.set(limit)
        running = self._running(log)
        try:
            with self._worker.blocking():
                while not interrupts.acquire(running, POLL_SECONDS):
                    deadlines.check(f"another pass of context {context.id} was not done")
            try:
                log.passes.append((args, options))
                self._run(context, log, log.passes[-1:], limit)
            except BaseException:
                log.passes.pop()
                raise
            finally:
                running.release()
        except BackhaulError as error:
            if limit.left or isinstance(error, BackwardTimeoutError):
                raise
            raise self._too_late(context, limit, options["timeout"], error) from error
        finally:
            deadlines.current.reset(token)

    def catch_up(self, context: Context, log: ReplayLog) -> None:
        """Run the passes again whose gradients were lost with a worker. If another thread runs passes, it does that."""
        if log.passes and (running := self._running(log)).acquire(blocking=False):
            try:
                self._run(context, log, [])
            finally:
                running.release()

    def _running(self, log: ReplayLog) -> Lock:
        """The lock that a thread holds while it runs passes of a context."""
        return log.turns.setdefault(self._worker.info.id, self._worker.runtime.lock())

    def _run(self, context: Context, log: ReplayLog, todo: list[Pass], limit: CancelScope | None = None) -> None:
        """Run passes. If a worker is lost, its gradients of earlier passes are lost too: then run all passes."""
        assert log.replay is not None
        until = limit.until if limit is not None and limit.label == _label(context) else FOREVER
        tries, undone = MAX_TRIES, False
        try:
            while todo or log.outdated:
                if log.outdated:
                    log.outdated, undone = False, True
                    self._undo(context, self._engine.new_number(), log.replay.timeout)
                    todo = list(log.passes)
                (args, options), number = todo[0], self._engine.new_number()
                again = {**options, "retain": True, "number": number, "until": until}
                try:
                    self._engine.backward(context, *args, **again)
                    todo = todo[1:]
                except (PeerLostError, ContextError) as error:
                    if context.released or isinstance(error, BackwardTimeoutError):
                        raise
                    undone = True
                    try:
                        self._undo(context, number, log.replay.timeout)
                        lost = self._recover_from(context, log, error, log.replay.timeout)
                    except BackhaulError as problem:
                        error.add_note(f"replay was not possible: {problem}")
                        raise error from problem
                    tries = MAX_TRIES if lost else tries - 1
                    if not tries or (not lost and not isinstance(error, PeerLostError)):
                        raise
                    log.outdated = False
                    todo = list(log.passes)
        except BaseException:
            log.outdated = log.outdated or undone  # the next thread that runs passes runs the earlier ones again
            raise

    def _undo(self, context: Context, number: int, timeout: float) -> None:
        """Undo passes on every worker: gradients that a worker did not undo would be counted twice."""
        for _ in self._calls.visit(context, timeout, replay_member.undo, int(self._worker.info.id), number):
            pass

    def _recover_from(self, context: Context, log: ReplayLog, error: BackhaulError, timeout: float) -> bool:
        """Recover all workers whose share is lost; whether there was one."""
        lost = {entry.to: entry.incarnation for entry in log.answered()}
        for _, targets in self._calls.visit(context, timeout, replay_member.targets):
            for worker, incarnation in targets.items():
                lost.setdefault(worker, incarnation)
        found = False
        for worker, incarnation in sorted(lost.items()):
            if error.worker == self._engine.name_of(worker) or incarnation != self._calls.incarnation_of(worker):
                found = self._recover(context, log, worker, incarnation) or found
        return found

    def _recover(self, context: Context, log: ReplayLog, lost: int, incarnation: str) -> bool:
        self._shares.kept(context.id)
        if lost == self._worker.info.id:
            return False  # others have lost a channel to this worker
        self._shares.take_turn(log, lost, incarnation, patient=True)
        return self._tasks.run(lambda: self._shares.rebuild(context, log, lost, incarnation))

    def _too_late(self, context: Context, limit: CancelScope, timeout: float, error: BackhaulError) -> BackhaulError:
        """The error of a pass that timed out or was cancelled while it waited for a recovery or another pass."""
        label = _label(context)
        if limit.root.cancelled:
            return waited_for_replacement(limit.cancelled_error(f"{label} was not done"), error)
        cut_by = None if limit.label == label else limit.label
        when = f"within {timeout:g} s" if cut_by is None else f"when the deadline of {cut_by} was over"
        name = self._worker.name
        late = BackwardTimeoutError(f"{label} was not done {when}", worker=name, context=context.id, cut_by=cut_by)
        return late if isinstance(error, CallTimeoutError) else waited_for_replacement(late, error)


def _label(context: Context) -> str:
    return f"backward of context {context.id}"
