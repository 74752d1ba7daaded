"""Threads, waits and the clock, behind one small object, so that a simulator can supply its own.

Everything in Backhaul that blocks does so on a ``Gate`` or in a transport's ``poll``; everything that
asks for the time asks ``Runtime.now``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Gate:
    """Opens once and stays open; any number of threads may wait. Thread-safe."""

    __slots__ = ("_lock", "_opened", "bell")

    def __init__(self) -> None:
        # Held while the gate is shut; a bare lock is the cheapest thing a thread can sleep on.
        self._lock = threading.Lock()
        self._lock.acquire()
        self._opened = False
        self.bell: Callable[[], None] | None = None  # called when it opens, for who waits for other things as well

    @property
    def opened(self) -> bool:
        """Whether it is open."""
        return self._opened

    def open(self) -> None:
        """Let all present and future waiters through. Opening twice does no harm."""
        self._opened = True
        bell = self.bell
        if bell is not None:
            bell()
        try:
            self._lock.release()
        except RuntimeError:
            pass

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the gate is open; False if ``timeout`` seconds passed first."""
        if self._opened:
            return True
        limit = -1.0 if timeout is None else min(max(timeout, 0.0), threading.TIMEOUT_MAX)
        if self._lock.acquire(timeout=limit):
            self.open()  # the next waiter passes too
        return self._opened


class Runtime:
    """The real thing: OS threads and the monotonic clock."""

    now: Callable[[], float] = staticmethod(time.monotonic)
    """Seconds of a clock that never goes back."""

    effort: Callable[[], float] = staticmethod(time.thread_time)
    """Seconds of processor time that the calling thread has taken."""

    def gate(self) -> Gate:
        """Make a shut gate."""
        return Gate()

    def spawn(self, target: Callable[[], None], *, name: str) -> threading.Thread:
        """Start ``target`` on a thread that does not keep the process alive."""
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread
