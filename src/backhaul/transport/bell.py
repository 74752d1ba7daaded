"""For a thread that waits for several channels it holds, and for one thing more."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Collection

from backhaul.transport.base import Channel
from backhaul.transport.luck import LOOKS, Luck

_LONGEST = 1e6  # seconds; the system takes no longer waits than a few weeks


class Bell:
    """May be rung by any thread; listened to by one. To be closed."""

    def __init__(self, luck: Luck) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._luck = luck

    def ring(self) -> None:
        """End ``listen``, or the next one, at once."""
        os.eventfd_write(self._fd, 1)

    def listen(self, channels: Collection[Channel], timeout: float | None, *, look: bool) -> list[Channel]:
        """Wait for channels that can be read; none if the bell rang, or the time is over. With ``look`` the thread may
        look before it sleeps.
        """
        poller = select.poll()
        by_fd = {channel.descriptor: channel for channel in channels}
        for fd in (self._fd, *by_fd):
            poller.register(fd, select.POLLIN)
        self._luck.begin()
        ready: list[tuple[int, int]] = []
        if look and self._luck.expecting:
            for _ in range(LOOKS):
                ready = poller.poll(0)
                if ready:
                    break
            self._luck.looked()
        if not ready:
            ready = poller.poll(None if timeout is None else min(timeout, _LONGEST) * 1000)
        self._luck.end()
        return [by_fd[fd] for fd, _ in ready if fd in by_fd]

    def hush(self) -> None:
        """Nobody rings it any more, until it is used again."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        """Free its descriptor."""
        os.close(self._fd)
