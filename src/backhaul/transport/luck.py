"""Whether to look before sleeping.

[Note: looking] A processor that goes to sleep takes tens of microseconds to wake up and is slow for a while after; most
replies come sooner than that. So a thread that waits for a message looks for it some times before it sleeps, if
messages came soon of late: where they are rare, or where others need the processor to send them, it does not.
"""

from __future__ import annotations

import os
import time

LOOKS = 300 if len(os.sched_getaffinity(0)) > 1 else 0
"""How many times to look; each takes about a microsecond."""

_SOON = 0.0005  # seconds; what comes within this time would come sooner if nobody slept


class Luck:
    """Remembers how soon messages came. Used by one thread at a time."""

    __slots__ = ("_share", "_since", "_waits")

    def __init__(self) -> None:
        self._share = 1.0  # which part of the messages came soon, of late
        self._since = 0.0
        self._waits = 0

    @property
    def expecting(self) -> bool:
        """Whether to look; every now and then one does, to see whether times have changed."""
        self._waits += 1
        return LOOKS > 0 and (self._share > 0.25 or not self._waits & 31)

    def begin(self) -> None:
        """A wait for a message begins."""
        self._since = time.perf_counter()

    def end(self) -> None:
        """A message has come."""
        if time.perf_counter() < self._since + _SOON:
            self._share += (1.0 - self._share) / 4
        else:
            self._share -= self._share / 8
