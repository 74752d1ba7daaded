"""One thread at a time writes. Knows no sockets and no bytes.

The thread that writes is an entry in a table under its own name, not a lock: after an interrupt the entry tells
whether the interrupted thread was the writer. See [Note: interrupts].
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time

from backhaul._runtime import interrupts


class Turn:
    """Whose turn it is to write. Thread-safe.

    Attributes:
        writer: [0]: the thread that writes. ``setdefault`` takes the turn, ``clear`` gives it back.
        waiters: Of threads that wait for their turn.
    """

    __slots__ = ("waiters", "writer")

    def __init__(self) -> None:
        self.writer: dict[int, object] = {}
        self.waiters: collections.deque[threading.Lock] = collections.deque()

    def wait(self, writer: object, timeout: float | None) -> bool:
        """Wait until no other thread writes; False if ``timeout`` seconds passed first."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.writer.setdefault(0, writer) is not writer:
            waiter = threading.Lock()
            waiter.acquire()
            self.waiters.append(waiter)
            # Try again after the append: the thread that stops writing does so first, then looks for waiters.
            if self.writer.setdefault(0, writer) is writer:
                break
            if not interrupts.acquire(waiter, None if deadline is None else deadline - time.monotonic()):
                return False
        return True

    def give_back(self, writer: object) -> None:
        """Let other threads write, if ``writer`` kept them from it."""
        if self.writer.get(0) is writer:
            self.writer.clear()
        while self.waiters:
            with contextlib.suppress(IndexError):  # another thread took it
                self.waiters.popleft().release()
