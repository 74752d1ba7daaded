"""Whether to look before sleeping.

[Note: looking] A processor that goes to sleep takes tens of microseconds to wake up and is slow for a while after; most
replies come sooner than that. So a thread that waits for a message looks for it some times before it sleeps, if
messages came soon of late, nothing else is to be done in its process, which would want the interpreter, and processors
are not scarce. Between two looks it offers the processor to others; if they keep it for long, they need it more.
"""

from __future__ import annotations

import os
import time

MAX_SPINS = 300 if len(os.sched_getaffinity(0)) > 1 else 0
"""How many times to look; each takes about a microsecond."""

LONGEST = 0.002
"""Seconds after which one stops to look in any case: others have the processor."""

offer = os.sched_yield
"""Called between two looks."""

_TAKEN = 0.001  # seconds without the processor that mean that it is scarce
_RESPECT = 4, 128  # waits for which we leave it to others then, at first and at most
_SOON = 0.0005  # seconds; what comes within this time would come sooner if nobody slept


class SpinPolicy:
    """Remembers how soon messages came. Used by one thread at a time."""

    __slots__ = ("_pause", "_processor", "_respect", "_share", "_since", "_start", "_waits")

    def __init__(self) -> None:
        self._share = 1.0  # which part of the messages came soon, of late
        self._since = 0.0
        self._waits = 0
        self._pause = 0  # not to look before so many waits
        self._respect = _RESPECT[0]
        self._start = self._processor = 0.0

    @property
    def expecting(self) -> bool:
        """Whether to look; every now and then one does, to see whether times have changed."""
        self._waits += 1
        if MAX_SPINS > 0 and self._waits > self._pause and (self._share > 0.25 or not self._waits & 31):
            self._processor = time.thread_time()
            self._start = time.perf_counter()
            return True
        return False

    def looked(self) -> None:
        """Whoever looked has found something or not. If somebody else had the processor meanwhile, they are scarce: the
        more so the more often that happens.
        """
        wall = time.perf_counter() - self._start
        if wall - (time.thread_time() - self._processor) > _TAKEN:
            self._pause = self._waits + self._respect
            self._respect = min(2 * self._respect, _RESPECT[1])
        elif self._respect > _RESPECT[0]:
            self._respect -= 1

    def begin(self) -> None:
        """A wait for a message begins."""
        self._since = time.perf_counter()

    def end(self) -> None:
        """A message has come."""
        if time.perf_counter() < self._since + _SOON:
            self._share += (1.0 - self._share) / 4
        else:
            self._share -= self._share / 8
