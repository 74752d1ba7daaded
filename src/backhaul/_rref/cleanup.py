"""Releases references whose handles were deleted.

A destructor only puts a line into a queue. A thread of its own, started with the first reference, reads the queue and
does the rest.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from backhaul._rref.held_forks import Fork
from backhaul._rref.owned_values import Entry
from backhaul._worker.worker import Worker

log = logging.getLogger("backhaul")

Deleted = Entry | Fork
"""What a deleted handle referred to: the entry of a value of this worker, or a fork."""

_JOIN_SECONDS = 5.0  # that closing waits for the thread


class HandleCleaner:
    """Owns the thread that releases references of one worker. Thread-safe.

    Args:
        worker: The worker.
        release: Releases what deleted handles referred to. Empties the list that it gets.
    """

    def __init__(self, worker: Worker, release: Callable[[list[Deleted]], None]) -> None:
        self._worker = worker
        self._release = release
        self._queue = worker.runtime.queue()  # of Deleted; None ends the thread
        self._starting = threading.Lock()  # guards the start of the thread
        self._thread: threading.Thread | None = None

    def put(self, deleted: Deleted) -> None:
        """For destructors: a handle is deleted. Neither blocks nor takes a lock."""
        self._queue.put(deleted)

    def start(self) -> None:
        """Start the thread if it does not run. Call this before a handle is made."""
        if self._thread is None:
            with self._starting:
                if self._thread is None and not self._worker.closed:
                    name = f"backhaul-{self._worker.name}-rref"
                    self._thread = self._worker.runtime.spawn(self._run, name=name)

    def close(self) -> None:
        """End the thread."""
        self._queue.put(None)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._worker.runtime.join(thread, _JOIN_SECONDS)

    def _run(self) -> None:
        while (deleted := self._queue.get()) is not None:
            batch = [deleted]
            while not self._queue.empty():
                batch.append(self._queue.get())
            if None in batch:
                return
            try:
                self._worker.run(self._release, batch)
            except Exception:
                log.exception("worker '%s' could not release references", self._worker.name)
            del deleted, batch  # this frame must not keep values while the thread waits
