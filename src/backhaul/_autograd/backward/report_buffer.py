"""What a worker has to tell the driver of a pass, gathered while it has gradients at hand: nobody waits for a report
before its last gradient is dealt with, so one report can speak for many.

Most of it never becomes a message of its own: it travels with the next gradients, from worker to worker, until one of
them has none to send. The driver needs it only at the end, and that is where the gradients end too.
"""

from __future__ import annotations

import threading

from backhaul._autograd.messages import PassTally
from backhaul._transport.base import Channel

_MOST = 64  # messages in a tally that goes a long way; more go to the driver at once


class ReportBuffer:
    """One worker's in one pass. Thread-safe. Every ``begin`` is followed by one ``end``."""

    __slots__ = ("_at_hand", "_channels", "_consumed", "_lock", "_produced")

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all below
        self._at_hand = 0  # tasks of the pass that run or wait
        self._channels: set[Channel] = set()
        self._consumed: list[int] = []
        self._produced: dict[int, int] = {}

    @property
    def at_hand(self) -> bool:
        """Whether tasks of the pass run or wait here."""
        with self._lock:
            return bool(self._at_hand)

    def begin(self) -> None:
        """Gradients of the pass are at hand."""
        with self._lock:
            self._at_hand += 1

    def add(self, tally: PassTally) -> None:
        """Groups have run, here or on the way."""
        with self._lock:
            self._consumed += tally.consumed
            if tally.produced:
                self._produced.update(tally.produced)

    def is_last(self, channel: Channel) -> bool:
        """Whether what goes into ``channel`` now is all there is to go; if not, it is flushed in the end."""
        if self._at_hand == 1:
            return True
        with self._lock:
            self._channels.add(channel)
        return False

    def take_along(self, to_driver: bool, *, few: bool = False) -> PassTally | None:
        """What gradients that go out now take with them, if no others are at hand. ``few``: they go to a worker that
        does not take any number of values.
        """
        with self._lock:
            if self._at_hand != 1 or not ((to_driver and not few) or len(self._consumed) <= _MOST):
                return None
            if few and len(self._produced) > _MOST:
                return None
            return self._take()

    def end(self) -> tuple[PassTally | None, set[Channel]]:
        """Those gradients are dealt with. If they were the last at hand, returns what is left to report, and the
        channels to flush.
        """
        with self._lock:
            self._at_hand -= 1
            if self._at_hand or not (self._consumed or self._produced or self._channels):
                return _NOTHING
            channels = self._channels
            if channels:
                self._channels = set()
            return self._take(), channels

    def _take(self) -> PassTally | None:
        if not self._consumed and not self._produced:
            return None
        tally = PassTally(tuple(self._consumed), self._produced)
        self._consumed, self._produced = [], {}
        return tally


_NOTHING: tuple[None, set[Channel]] = (None, set())
