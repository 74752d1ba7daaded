"""Calls that are going to be made again: they pause before the next attempt, or are being recovered by replay."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from backhaul._rpc.futures import Future


class PausedCalls:
    """The futures of such calls. Thread-safe: the thread that removes a future completes it.

    Attributes:
        retries: How many calls were made again, for people.
    """

    def __init__(self) -> None:
        self.retries = 0
        self._lock = threading.Lock()  # guards retries
        self._futures: set[Future[Any]] = set()

    def add(self, future: Future[Any]) -> None:
        """A call pauses; ``future`` is what its caller waits for."""
        self._futures.add(future)

    def remove(self, future: Future[Any]) -> bool:
        """The pause is over. False if another thread has removed the future."""
        try:
            self._futures.remove(future)
        except KeyError:
            return False
        return True

    def count_retry(self) -> None:
        """Count that a call is made again."""
        with self._lock:
            self.retries += 1

    def abandon(self, error: Callable[[], BaseException]) -> None:
        """Fail all futures: no thread is left that would make the calls."""
        while self._futures:
            future = self._futures.pop()
            if not future.done():
                future.set_exception(error())
