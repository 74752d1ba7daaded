"""Recovery work that runs on threads of its own, and the futures that wait for it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from backhaul._rpc.calls.client import CallClient
from backhaul._rpc.futures import Future
from backhaul._worker import deadlines
from backhaul._worker.deadlines import CancelScope
from backhaul._worker.worker import Worker

T = TypeVar("T")


class RecoveryTasks:
    """Runs recovery work on pool threads. Thread-safe.

    Each future is completed once: by its task, by a cancellation, or by a shutdown. Whoever removes the future from
    the client's ``paused`` set (``claim``) completes it.
    """

    def __init__(self, worker: Worker, client: CallClient) -> None:
        self._worker = worker
        self._client = client

    def announce(self, future: Future[Any]) -> None:
        """Register a future that ``start`` will complete. A shutdown waits for it from now on."""
        self._client.idleness.begin()
        self._client.paused.add(future)

    def claim(self, future: Future[Any]) -> bool:
        """Whether the caller may complete the future; False if another thread has completed it."""
        return self._client.paused.remove(future)

    def start(
        self,
        future: Future[T],
        work: Callable[[], T],
        limit: CancelScope | None = None,
        at_end: Callable[[], None] | None = None,
    ) -> None:
        """Run ``work`` under ``limit`` on a pool thread and complete an announced future with its outcome. ``at_end``
        is called last.
        """

        def run() -> None:
            deadlines.current.set(limit)
            try:
                value = work()
            except BaseException as error:
                if self.claim(future):
                    future.set_exception(error)
            else:
                if self.claim(future):
                    future.set_result(value)
            finally:
                if at_end is not None:
                    at_end()
                self._client.idleness.end()

        self._worker.thread_pool.submit(functools.partial(self._worker.run, run))

    def run(self, work: Callable[[], T]) -> T:
        """Run ``work`` on a pool thread without a deadline, and wait for it within the current deadline; see
        [Note: time] in ``recovery``. The work goes on if the caller gives up.
        """
        done: Future[T] = Future()
        self.announce(done)
        self.start(done, work)
        return done.wait()
