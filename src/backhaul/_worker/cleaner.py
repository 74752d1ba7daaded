"""Handles what destructors report. A destructor only puts an item into a queue. A thread of its own, started before the
first item can come, reads the queue and does the rest.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from backhaul._worker.worker import Worker

log = logging.getLogger("backhaul")

_JOIN_SECONDS = 5.0  # that closing waits for the thread


class Cleaner:
    """Owns a thread of one worker. Thread-safe.

    Args:
        worker: The worker.
        name: A short name for the thread.
        handle: Handles items that destructors reported together. Empties the list that it gets.
    """

    def __init__(self, worker: Worker, name: str, handle: Callable[[list[Any]], None]) -> None:
        self._worker = worker
        self._name = name
        self._handle = handle
        self._queue = worker.runtime.queue()  # None ends the thread
        self._starting = threading.Lock()  # guards the start of the thread
        self._thread: threading.Thread | None = None

    def put(self, item: Any) -> None:
        """For destructors. Neither blocks nor takes a lock."""
        self._queue.put(item)

    def start(self) -> None:
        """Start the thread if it does not run. Call this before an object is made whose destructor calls ``put``."""
        if self._thread is None:
            with self._starting:
                if self._thread is None and not self._worker.closed:
                    name = f"backhaul-{self._worker.name}-{self._name}"
                    self._thread = self._worker.runtime.spawn(self._run, name=name)

    def close(self) -> None:
        """End the thread."""
        self._queue.put(None)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._worker.runtime.join(thread, _JOIN_SECONDS)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            batch = [item]
            while not self._queue.empty():
                batch.append(self._queue.get())
            if None in batch:
                return
            try:
                self._worker.run(self._handle, batch)
            except Exception:
                log.exception("thread '%s' of worker '%s' has failed", self._name, self._worker.name)
            del item, batch  # this frame must not keep values while the thread waits
