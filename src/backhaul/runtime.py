"""Threads, waits and the clock, behind one small object, so that a simulator can supply its own.

Everything in Backhaul that blocks does so on something made here or in a transport's ``poll``; everything that
asks for the time asks ``Runtime.now``. A lock that is only ever held for a moment may be a plain one.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

from backhaul import interrupts


class Lock(Protocol):
    """A lock that may be held across waits."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take it; False if it could not be had in time."""

    def release(self) -> None:
        """Let go of it."""

    def __enter__(self) -> bool: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


class Queue(Protocol):
    """A queue that may be filled from destructors."""

    def put(self, item: Any) -> None:
        """Append an item. Neither blocks nor takes a lock."""

    def get(self) -> Any:
        """Wait for the next item."""

    def empty(self) -> bool:
        """Whether there is none now."""


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
        if interrupts.acquire(self._lock, -1.0 if timeout is None else max(timeout, 0.0)):
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

    def lock(self) -> Lock:
        """Make a lock that may be held while its holder waits for something else."""
        return threading.Lock()

    def queue(self) -> Queue:
        """Make a queue."""
        return queue.SimpleQueue()

    def spawn(self, target: Callable[[], None], *, name: str) -> threading.Thread:
        """Start ``target`` on a thread that does not keep the process alive."""
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread

    @interrupts.waits
    def join(self, thread: threading.Thread, timeout: float | None = None) -> bool:
        """Wait for the end of a thread that ``spawn`` has started; False if ``timeout`` seconds passed first."""
        thread.join(timeout)
        return not thread.is_alive()
