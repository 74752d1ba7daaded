"""Whether a worker is idle: no call of its own is pending, and nothing runs that may make one. Shutdown waits for it.

Knows neither calls nor requests: their tables register here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection


class Idleness:
    """Calls back as soon as a worker is idle. Thread-safe.

    Attributes:
        callbacks: Those that wait. A part that removes work calls ``check`` only if there are any.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _others
        self._others = 0  # things under way that are in no table
        self._tables: list[Collection[object]] = []
        self.callbacks: list[Callable[[], None]] = []

    def watch(self, table: Collection[object]) -> None:
        """Count the worker as busy while ``table`` is not empty. The part that removes an entry calls ``check``."""
        self._tables.append(table)

    def begin(self) -> None:
        """Something began that may lead to calls, and that is in no table."""
        with self._lock:
            self._others += 1

    def end(self) -> None:
        """It is over."""
        with self._lock:
            self._others -= 1
        if self.callbacks:
            self.check()

    def when_idle(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, as soon as the worker is idle; at once if it is."""
        self.callbacks.append(callback)
        self.check()

    @property
    def idle(self) -> bool:
        """Whether the worker is idle now."""
        return not self._others and not any(self._tables)

    def check(self) -> None:
        """Call those that wait, one after the other, while the worker is idle: a callback may make it busy again."""
        while self.callbacks and self.idle:
            try:
                callback = self.callbacks.pop(0)
            except IndexError:  # another thread took it
                return
            callback()
