"""Cancels calls of this worker: one by its number, or all that were made within some handlers or blocks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from backhaul._rpc.calls.call_table import PendingCalls, send_cancels
from backhaul._rpc.calls.pending_call import SyncCall
from backhaul._worker.deadlines import CancelScope
from backhaul._worker.thread_pool import ThreadPool
from backhaul.errors import CallCancelledError


class Cancellation:
    """Ends calls with ``CallCancelledError`` and tells the workers that were called. Thread-safe.

    Attributes:
        count: How many calls were cancelled, for people.
        recoveries: By the number of a call that is being recovered by replay: a function that cancels the recovery.
    """

    def __init__(self, thread_pool: ThreadPool, pending: PendingCalls) -> None:
        self._thread_pool = thread_pool
        self._pending = pending
        self._lock = threading.Lock()  # guards count
        self.count = 0
        self.recoveries: dict[int, Callable[[], bool]] = {}

    def cancel(self, number: int) -> bool:
        """Cancel an asynchronous call. Once this returns True, its future is done. False: it had its outcome."""
        pending = self._pending.find(number)
        task = None if pending is None else self._pending.settle(pending, pending.cancelled())
        if pending is None or task is None:
            cancel_recovery = self.recoveries.get(number)
            return cancel_recovery is not None and cancel_recovery()
        self.add_to_count(1)
        send_cancels([pending])
        task()
        return True

    def cancel_within(self, scopes: Collection[CancelScope]) -> None:
        """Cancel all calls that were made within these scopes."""
        over = []
        for pending in self._pending:
            scope = pending.scope
            if scope is None or scope.root not in scopes:
                continue
            error = pending.cancelled(f" because its parent call {scope.root.label} was cancelled")
            task = self._pending.settle(pending, error)
            if task is not None:
                self._thread_pool.submit(task)
            elif not isinstance(pending, SyncCall) or not isinstance(pending.outcome, CallCancelledError):
                continue  # it had its outcome
            over.append(pending)
        self.add_to_count(len(over))
        send_cancels(over)

    def add_to_count(self, cancelled: int) -> None:
        """Count calls that were cancelled."""
        with self._lock:
            self.count += cancelled
