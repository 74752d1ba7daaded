"""Threads, waits and the clock, behind one small object, so that a simulator can supply its own.

Everything in Backhaul that blocks does so on something made here or in a transport's ``poll``; everything that
asks for the time asks ``Runtime.now``. A lock that is only ever held for a moment may be a plain one.

[Note: forks] A handler may fork. The child has a copy of the thread that runs the handler, and of nothing else that
runs. It is no worker: its sockets are the parent's, and locks may be held by threads that are not there. So in the
child all descriptors are closed at once, without a word to the peers (``Endpoint.sever``). Where the user's code
returns to a thread of Backhaul's in the child, the child ends as a program would (``end_forked``).
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

from backhaul._runtime import interrupts

forks = 0
"""How many forks lie between this process and the one that has imported this module."""


def _count_fork() -> None:
    global forks
    forks += 1


os.register_at_fork(after_in_child=_count_fork)


def end_forked(error: BaseException | None) -> None:
    """The user's code has forked and comes back in the child: end the child, see [Note: forks]. On a thread of the
    user's own this returns.

    Args:
        error: What that code raised, if anything.
    """
    if not isinstance(threading.current_thread(), Thread):
        return
    code: object = 0
    if isinstance(error, SystemExit):
        code = 0 if error.code is None else error.code
    elif error is not None:
        code = 1
    with contextlib.suppress(BaseException):
        if not isinstance(code, int):
            print(code, file=sys.stderr)
        elif error is not None and not isinstance(error, SystemExit):
            traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code & 0xFF if isinstance(code, int) else 1)


class UserCode:
    """While inside, this thread runs code of the user's. If that forks, the child ends here; see [Note: forks]."""

    __slots__ = ("_forks",)

    def __enter__(self) -> None:
        self._forks = forks

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if forks != self._forks:
            end_forked(error)


class Thread(threading.Thread):
    """A thread of Backhaul's own. It does not keep the process alive."""


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


class OneShotEvent:
    """Opens once and stays open; any number of threads may wait. Thread-safe."""

    __slots__ = ("_lock", "on_open", "opened")

    def __init__(self) -> None:
        # Held while the gate is shut; a bare lock is the cheapest thing a thread can sleep on.
        self._lock = threading.Lock()
        self._lock.acquire()
        self.opened = False  # written only here and by ``open``
        self.on_open: Callable[[], None] | None = None  # called by ``open``, for a thread that waits for more

    def open(self) -> None:
        """Let all present and future waiters through. Opening twice does no harm."""
        self.opened = True
        on_open = self.on_open
        if on_open is not None:
            on_open()
        try:
            self._lock.release()
        except RuntimeError:
            pass

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the gate is open; False if ``timeout`` seconds passed first."""
        if self.opened:
            return True
        if interrupts.acquire(self._lock, timeout):
            self.open()  # the next waiter passes too
        return self.opened


class Runtime:
    """The real thing: OS threads and the monotonic clock."""

    now: Callable[[], float] = staticmethod(time.monotonic)
    """Seconds of a clock that never goes back."""

    effort: Callable[[], float] = staticmethod(time.thread_time)
    """Seconds of processor time that the calling thread has taken."""

    def one_shot(self) -> OneShotEvent:
        """Make a shut gate."""
        return OneShotEvent()

    def lock(self) -> Lock:
        """Make a lock that may be held while its holder waits for something else."""
        return threading.Lock()

    def queue(self) -> Queue:
        """Make a queue."""
        return queue.SimpleQueue()

    def spawn(self, target: Callable[[], None], *, name: str) -> threading.Thread:
        """Start ``target`` on a thread that does not keep the process alive."""
        thread = Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread

    @interrupts.waits
    def join(self, thread: threading.Thread, timeout: float | None = None) -> bool:
        """Wait for the end of a thread that ``spawn`` has started; False if ``timeout`` seconds passed first."""
        thread.join(timeout)
        return not thread.is_alive()
