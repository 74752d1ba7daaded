"""Calls in contexts with replay that lose their worker: they wait for its replacement and are sent again."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from backhaul._autograd.failure.member_calls import POLL_SECONDS
from backhaul._autograd.failure.recovery_tasks import RecoveryTasks
from backhaul._autograd.failure.replay import ReplayEntry
from backhaul._rpc.calls.client import CallClient
from backhaul._rpc.calls.pending_call import Pending, SyncCall
from backhaul._rpc.cluster.peers import Peer
from backhaul._rpc.futures import Future
from backhaul._wire.frames import Frame
from backhaul._wire.memory import Recycler
from backhaul._worker import deadlines
from backhaul._worker.deadlines import FOREVER, Block, CancelScope
from backhaul._worker.worker import Worker
from backhaul.errors import BackhaulError, PeerLostError, UnknownWorkerError

_memory = Recycler()


class LostCalls:
    """The ``ReplayHook`` of one worker's client. Thread-safe.

    Args:
        worker: The worker.
        client: Its client.
        tasks: Run recoveries that nobody waits for.
        recover: ``recover(context, lost, incarnation)`` lets the maker of a context recover a worker; returns whether
            that was necessary.
    """

    def __init__(
        self, worker: Worker, client: CallClient, tasks: RecoveryTasks, recover: Callable[[int, int, str], bool]
    ) -> None:
        self._worker = worker
        self._client = client
        self._tasks = tasks
        self._recover = recover

    def keep(self, pending: Pending, frame: Frame) -> None:
        """Keep a copy of a request. Raises ``PeerLostError`` if its worker was replaced and nobody here noticed."""
        entry = _entry(pending)
        if entry is None:
            return
        entry.frame = frame.copied(_memory)  # the user may change arguments as soon as the request is sent
        entry.label, entry.timeout = pending.label, pending.timeout
        log, peer = entry.context.replay, pending.peer
        if log is None:
            return
        earlier = log.answered(entry.to)[-1:]
        former = earlier[0].incarnation if earlier else entry.incarnation
        if not earlier and peer.record.epoch > log.epoch and entry.incarnation not in log.restored:
            former = ""  # it joined after the context was entered, and this worker has not called it in the context
        if former != entry.incarnation:
            # This worker has not noticed the loss, but what the lost incarnation computed is gone, with its state.
            entry.incarnation = former
            reason = "another worker has taken its name"
            raise PeerLostError(f"lost worker '{peer.info.name}': {reason}", worker=peer.info.name, reason=reason)

    def recover_call(self, pending: Pending, error: PeerLostError) -> Any:
        """Wait for the replacement of a call's worker, send the request again and return its result. The call keeps its
        own time limit. Raises ``error`` if the request was not kept.
        """
        entry = _entry(pending)
        if entry is None or entry.frame is None:
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame from now on
        limit = self._limit_of(pending)
        token = deadlines.current.set(limit)
        try:
            return self._send_again(pending, entry, error)
        except BackhaulError as problem:
            if limit.left:
                raise
            raise _given_up(pending, limit, error) from problem
        finally:
            deadlines.current.reset(token)

    def recover_later(self, pending: Pending, error: PeerLostError, future: Future[Any]) -> bool:
        """As ``recover_call``, on another thread: completes ``future``. False if the request was not kept."""
        if _entry(pending) is None or self._worker.closed:
            return False
        outer, now = pending.scope, self._worker.runtime.now
        left = FOREVER if outer is None else outer.until - now()
        own = Block(pending.label if outer is None else outer.label, left, now, None)  # can be cancelled by itself

        def cancel(why: str = "") -> Any:
            if not self._tasks.claim(future):
                return False
            self._client.cancellation.add_to_count(1)
            own.cancelled = True  # before the calls inside are cancelled, so that no new call begins
            self._client.cancellation.cancel_within(frozenset([own]))
            own.cancel()
            future.set_exception(waited_for_replacement(pending.cancelled(why), error))
            return True

        def forget() -> None:
            self._client.cancellation.recoveries.pop(pending.number, None)
            if outer is not None:
                outer.forget(waker)

        self._tasks.announce(future)
        self._client.cancellation.recoveries[pending.number] = cancel
        if outer is not None:
            waker = outer.wake_with(functools.partial(cancel, _because(outer)))
        self._tasks.start(future, functools.partial(self.recover_call, pending, error), own, forget)
        return True

    def _send_again(self, pending: Pending, entry: ReplayEntry, error: PeerLostError) -> Any:
        while error.worker == pending.peer.info.name:
            if not self._recover_worker(entry, error):
                break
            if (successor := self._await_successor(entry)) is None:
                error.add_note(
                    f"replay was not possible: worker '{self._worker.name}' did not learn which worker took the place "
                    f"of worker {entry.to}"
                )
                break
            again = SyncCall(successor, pending.timeout, pending.label)
            again.kept = pending.kept
            entry.incarnation = again.peer.record.incarnation
            if (log := entry.context.replay) is not None:
                log.restored.add(entry.incarnation)
            try:
                assert entry.frame is not None
                value = self._client.repeat(again, entry.frame)
            except PeerLostError as another:
                error = another
            else:
                entry.context.renew(entry.message, entry.reply)
                return value
        raise error

    def _recover_worker(self, entry: ReplayEntry, error: PeerLostError) -> bool:
        """Let the maker of the context recover the worker; whether that was necessary. Raises ``error`` if the maker
        cannot.
        """
        try:
            return self._recover(entry.context.id, entry.to, entry.incarnation)
        except BackhaulError as problem:
            error.add_note(f"replay was not possible: {problem}")
            raise error from problem

    def _await_successor(self, entry: ReplayEntry) -> Peer | None:
        """The worker that took a lost worker's place. The maker of the context may know it before this worker does, so
        wait for it, up to ``connect_timeout`` seconds; None if it does not become known.
        """
        runtime = self._worker.runtime
        deadline = runtime.now() + self._worker.options.connect_timeout
        while True:
            with contextlib.suppress(UnknownWorkerError):
                peer = self._client.peers.find(entry.to)
                if peer.record.incarnation != entry.incarnation:
                    return peer
            if runtime.now() > deadline:
                return None
            with self._worker.blocking():
                deadlines.wait(
                    runtime.one_shot(),
                    POLL_SECONDS,
                    f"the worker that took the place of worker {entry.to} was not known",
                )

    def _limit_of(self, pending: Pending) -> CancelScope:
        """The time that a call has left."""
        now = self._worker.runtime.now
        if pending.cut or not pending.timeout:
            left = FOREVER  # the scope around the call limits it
        elif pending.deadline == FOREVER:
            left = pending.timeout  # the request was not sent
        else:
            left = pending.deadline - now()
        return Block(pending.label, left, now, deadlines.current.get())


def waited_for_replacement(failure: BackhaulError, error: BackhaulError) -> BackhaulError:
    """Note on a failure that it ended a wait for the replacement of a lost worker."""
    failure.add_note(f"the call or pass was waiting for a worker to take the place of a lost one: {error}")
    return failure


def _entry(pending: Pending) -> ReplayEntry | None:
    for _, kept in pending.kept:
        if type(kept) is ReplayEntry:
            return kept
    return None


def _because(limit: CancelScope) -> str:
    return f" because its parent call {limit.root.label} was cancelled"


def _given_up(pending: Pending, limit: CancelScope, error: PeerLostError) -> BackhaulError:
    """The error of a call that was cancelled or timed out during its recovery."""
    if limit.root.cancelled:
        return waited_for_replacement(pending.cancelled(_because(limit)), error)
    return waited_for_replacement(pending.timed_out(), error)
