"""Waiting for several channels at once, and for one wake-up event.

Used by a thread that holds channels (``Channel.acquire``). The simulator has its own.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time

from backhaul._runtime import interrupts
from backhaul._transport.base import Channel
from backhaul._transport.spin_wait import Busyness, SpinPolicy


class ChannelWaiter:
    """Waits for several channels and one wake-up event. Any thread may call ``wake``; one thread waits. Close it.

    Args:
        policy: Whether to spin, see [Note: spinning].
        process: Whether other threads want the interpreter.
    """

    wanted = False  # see ``spin_wait.Spinning``: no other thread takes the channels away

    def __init__(self, policy: SpinPolicy, process: Busyness) -> None:
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._policy = policy
        self._process = process
        self._lock = threading.Lock()  # guards _wake_fd: a thread may call ``wake`` after ``close``
        self._owner = 0  # the thread that waits, or is about to
        self._channels: list[Channel] = []  # those that are registered with the poller
        self._by_fd: dict[int, Channel] = {}
        self._poller = select.poll()
        self._poller.register(self._wake_fd, select.POLLIN)

    def claim(self) -> None:
        """The calling thread is going to wait. It needs no wake-up for what it does itself."""
        self._owner = threading.get_ident()

    def wake(self) -> None:
        """End ``wait`` at once, or the next ``wait`` if no thread waits."""
        if threading.get_ident() != self._owner:
            with self._lock:
                if self._wake_fd >= 0:
                    os.eventfd_write(self._wake_fd, 1)

    def wait(self, channels: list[Channel], timeout: float | None, *, spin: bool) -> list[Channel]:
        """Wait for channels that can be read. Returns none after ``wake``, or after ``timeout`` seconds.

        Args:
            channels: The channels, which the calling thread holds.
            timeout: How many seconds to wait; None: any time.
            spin: Whether the thread may spin before it sleeps.
        """
        if channels != self._channels:
            self.register(channels)
        since = time.perf_counter()
        ready = self._spin(timeout) if spin or self._policy.allows_company else []
        if not ready:
            ready = interrupts.poll(self._poller, timeout)
        self._policy.waited = time.perf_counter() - since
        found = []
        for fd, _ in ready:
            if fd == self._wake_fd:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(fd)
            else:
                found.append(self._by_fd[fd])
        return found

    def _spin(self, timeout: float | None) -> list[tuple[int, int]]:
        descriptors = (*self._by_fd, self._wake_fd)
        return self._policy.spin_if_worthwhile(self._poller.poll, self._process, self, timeout, descriptors)

    def register(self, channels: list[Channel]) -> None:
        """Say for which channels the next ``wait`` waits."""
        for fd in self._by_fd:
            self._poller.unregister(fd)
        self._channels = list(channels)
        self._by_fd = {channel.descriptor: channel for channel in channels}
        for fd in self._by_fd:
            self._poller.register(fd, select.POLLIN)

    def close(self) -> None:
        """Close the descriptor. May be called twice."""
        with self._lock:
            fd, self._wake_fd = self._wake_fd, -1
            if fd >= 0:
                os.close(fd)
