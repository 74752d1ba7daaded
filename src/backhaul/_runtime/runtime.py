"""Threads, waits and the clock, behind one object, so that a simulator can supply its own.

Code that asks for the time asks ``Runtime.now``.

[Note: waits] There is one kind of wait: a thread waits until a ``OneShotEvent`` opens. ``Runtime.one_shot`` makes the
event, and a simulator makes events in virtual time. Everything else that blocks is built from it or stands below it:

- A wait on behalf of a user, which a deadline or a cancellation must end: ``deadlines.wait(event, ...)``. It waits for
  the event until the current ``CancelScope`` ends; a cancellation opens the event.
- A wait of Backhaul's own, with its own deadline: ``event.wait(timeout)``. To sleep, a thread waits for a new event
  that no thread opens.
- A wait for messages and an event together: ``Worker.attend``. The thread waits in ``ChannelWaiter``, and
  ``OneShotEvent.on_open`` wakes it.
- A wait for a lock that is held for long (``Runtime.lock``): ``interrupts.acquire``. ``OneShotEvent`` waits so too.
- A wait for a descriptor, in transports: ``interrupts.poll``. The threads that serve an endpoint wait in its ``poll``.
- A thread of Backhaul's own waits for work in ``Queue.get``, and ``Runtime.join`` waits for the end of a thread.

All of these but ``Queue.get`` and ``Endpoint.poll`` can run on the main thread, where Ctrl-C ends them, see
[Note: interrupts]. A lock that is only ever held for a moment may be a plain one.

[Note: forks] The user's code may fork. The child has a copy of the thread that forked, and no other thread. It is not a
worker: its sockets belong to the parent, and threads that do not exist in the child may hold its locks. The child
therefore closes all descriptors at once, without a message to the peers (``Endpoint.sever``). When the user's code
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
from collections.abc import Callable, MutableSequence
from types import TracebackType
from typing import Any, Protocol

from backhaul._runtime import interrupts

forks = 0
"""How many forks lie between this process and the process that imported this module."""


def _count_fork() -> None:
    global forks
    forks += 1


os.register_at_fork(after_in_child=_count_fork)


def end_forked(error: BaseException | None) -> None:
    """End this process, a child that the user's code has forked; see [Note: forks]. Returns if the calling thread is
    one of the user's own.

    Args:
        error: What the user's code raised, if anything.
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
    """A context in which this thread runs the user's code. If that code forks, the child ends with the context; see
    [Note: forks].
    """

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
    """A lock that a thread may hold while it waits for something else."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock; False if ``timeout`` seconds passed first."""

    def release(self) -> None:
        """Give the lock back."""

    def __enter__(self) -> bool: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


class Queue(Protocol):
    """A queue that destructors may fill."""

    def put(self, item: Any) -> None:
        """Append an item. Does not block and takes no lock."""

    def get(self) -> Any:
        """Wait for the next item."""

    def empty(self) -> bool:
        """Whether the queue has no item now."""


class OneShotEvent:
    """An event that opens once and stays open. Any number of threads may wait for it; see [Note: waits]. Thread-safe.

    Attributes:
        opened: Whether the event is open. Only ``open`` writes it.
        on_open: Called by ``open``, for a thread that waits for other things as well.
        signal: A number to which ``open`` adds 1, for threads that do not sleep; see ``_transport.spin_wait``.
    """

    __slots__ = ("_lock", "on_open", "opened", "signal")

    def __init__(self) -> None:
        # Held until the event opens. A lock is the cheapest thing that a thread can sleep on.
        self._lock = threading.Lock()
        self._lock.acquire()
        self.opened = False
        self.on_open: Callable[[], None] | None = None
        self.signal: MutableSequence[int] | None = None

    def open(self) -> None:
        """End all present and future waits. Opening an open event does nothing."""
        self.opened = True
        if self.signal is not None:
            self.signal[0] += 1
        on_open = self.on_open
        if on_open is not None:
            on_open()
        try:
            self._lock.release()
        except RuntimeError:
            pass

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the event is open; False if ``timeout`` seconds passed first."""
        if self.opened:
            return True
        if interrupts.acquire(self._lock, timeout):
            self.open()  # ends the next wait
        return self.opened


class Runtime:
    """Threads of the system and its monotonic clock."""

    now: Callable[[], float] = staticmethod(time.monotonic)
    """Returns the seconds of a clock that never goes back."""

    effort: Callable[[], float] = staticmethod(time.thread_time)
    """Returns the seconds of processor time that the calling thread has used."""

    def one_shot(self) -> OneShotEvent:
        """Make an event that is not open."""
        return OneShotEvent()

    def lock(self) -> Lock:
        """Make a lock that a thread may hold while it waits for something else."""
        return threading.Lock()

    def queue(self) -> Queue:
        """Make a queue."""
        return queue.SimpleQueue()

    def spawn(self, target: Callable[[], None], *, name: str) -> threading.Thread:
        """Run ``target`` on a new thread, which does not keep the process alive."""
        thread = Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread

    @interrupts.waits
    def join(self, thread: threading.Thread, timeout: float | None = None) -> bool:
        """Wait for the end of a thread of ``spawn``'s; False if ``timeout`` seconds passed first."""
        thread.join(timeout)
        return not thread.is_alive()
