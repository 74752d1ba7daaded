"""The descriptors that the threads of one endpoint wait for together. Knows no channels.

Every descriptor is armed for one event at a time: the kernel hands each event to one of the threads that poll, and the
descriptor stays silent until it is armed again. Linux only.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable

from backhaul._transport.timer import Timer

ONE_SHOT = select.EPOLLONESHOT
"""Add this to every mask given to ``modify``."""


class EpollSet:
    """An epoll set, a descriptor to wake one of its pollers, and timers. Thread-safe.

    ``poll`` and ``modify`` are the methods of ``select.epoll`` themselves, since every message needs them: ``modify``
    raises ``OSError`` or ``ValueError`` once the descriptor, or the set, is closed.

    Attributes:
        fd: The descriptor of the set itself. It is readable when ``poll`` would return an event.
        own: The same as a tuple.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self.fd = self._epoll.fileno()
        self.own = (self.fd,)
        self.poll: Callable[[float | None, int], list[tuple[int, int]]] = self._epoll.poll
        self.modify: Callable[[int, int], None] = self._epoll.modify
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Edge-triggered and never read: each write wakes one poller.
        self._epoll.register(self._wake_fd, select.EPOLLIN | select.EPOLLET)
        self._timers: list[Timer] = []
        self._lock = threading.Lock()  # guards the table below, and _wake_fd
        self._actions: dict[int, Callable[[], None]] = {}  # descriptor -> what to call when it is ready
        self._closed = False

    def watch(self, fd: int, action: Callable[[], None] | None, mask: int) -> None:
        """Wait for one event of a new descriptor; ``arm`` for the next. ``run`` calls the action, if there is one."""
        if action is not None:
            with self._lock:
                self._actions[fd] = action
        self._epoll.register(fd, mask | ONE_SHOT)

    def arm(self, fd: int, mask: int) -> None:
        """Wait for one more event. Does nothing once the descriptor, or the set, is closed."""
        try:
            self.modify(fd, mask | ONE_SHOT)
        except (OSError, ValueError):
            pass

    def forget(self, fd: int) -> None:
        """Wait for this descriptor no more. Called before it is closed."""
        with self._lock:
            self._actions.pop(fd, None)
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(fd)

    def add_timer(self, action: Callable[[], None]) -> Timer:
        """Make a timer. ``run`` calls the action when it has expired."""
        timer = Timer()
        self._timers.append(timer)
        self._actions[timer.fd] = action
        self._epoll.register(timer.fd, select.EPOLLIN | select.EPOLLET)
        return timer

    def run(self, fd: int) -> None:
        """Call the action of a descriptor that is ready."""
        action = self._actions.get(fd)
        if action is not None:
            action()

    def wake(self) -> None:
        """Let one thread that polls, or the next one, return at once."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Close the set. No thread may poll any more."""
        self._epoll.close()
        with self._lock:
            self._closed = True
            os.close(self._wake_fd)
        for timer in self._timers:
            timer.close()

    def sever(self) -> None:
        """Close this process's copies of the descriptors after a fork. Takes no lock that another thread may hold."""
        self._lock = threading.Lock()
        self._closed = True
        self._epoll.close()
        os.close(self._wake_fd)
        for timer in self._timers:
            timer.sever()
