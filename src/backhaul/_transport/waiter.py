"""For a thread that waits for several channels it holds, and for one thing more."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time

from backhaul._runtime import interrupts
from backhaul._transport.base import Channel
from backhaul._transport.spin_wait import LONGEST, MAX_SPINS, SpinPolicy, offer

_LONGEST = 1e6  # seconds; the system takes no longer waits than a few weeks


class ChannelWaiter:
    """May be rung by any thread; listened to by one. To be closed."""

    def __init__(self, luck: SpinPolicy) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._luck = luck
        self._ringing = threading.Lock()  # guards _fd: who rings may be late
        self._listener = 0  # the thread that listens, or is about to
        self._channels: list[Channel] = []  # those that the poller knows
        self._by_fd: dict[int, Channel] = {}
        self._poller = select.poll()
        self._poller.register(self._fd, select.POLLIN)

    def expect(self) -> None:
        """The calling thread is going to listen, and looks for itself what it does itself."""
        self._listener = threading.get_ident()

    def ring(self) -> None:
        """End ``listen``, or the next one, at once."""
        if threading.get_ident() != self._listener:
            with self._ringing:
                if self._fd >= 0:
                    os.eventfd_write(self._fd, 1)

    def listen(self, channels: list[Channel], timeout: float | None, *, look: bool) -> list[Channel]:
        """Wait for channels that can be read; none if the bell rang, or the time is over. With ``look`` the thread may
        look before it sleeps.
        """
        if channels != self._channels:
            self.know(channels)
        poll = self._poller.poll
        self._luck.begin()
        ready: list[tuple[int, int]] = []
        if look and self._luck.expecting:
            now = time.perf_counter
            until = now() + LONGEST
            for _ in range(MAX_SPINS):
                ready = poll(0)
                if ready:
                    break
                offer()
                if now() > until:
                    break
            self._luck.looked()
        if not ready:
            ready = interrupts.poll(self._poller, None if timeout is None else min(timeout, _LONGEST))
        self._luck.end()
        found = []
        for fd, _ in ready:
            if fd == self._fd:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(fd)
            else:
                found.append(self._by_fd[fd])
        return found

    def know(self, channels: list[Channel]) -> None:
        """Which channels are listened to next."""
        for fd in self._by_fd:
            self._poller.unregister(fd)
        self._channels = list(channels)
        self._by_fd = {channel.descriptor: channel for channel in channels}
        for fd in self._by_fd:
            self._poller.register(fd, select.POLLIN)

    def close(self) -> None:
        """Free its descriptor; idempotent."""
        with self._ringing:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)
