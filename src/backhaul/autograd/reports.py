"""What a worker has to tell the driver of a pass, gathered while it has gradients at hand: nobody waits for a report
before its last gradient is dealt with, so one report can speak for many.

Most of it never becomes a message of its own: it travels with the next gradient, from worker to worker, until one of
them has none to send. The driver needs it only at the end, and that is where the gradients end too.
"""

from __future__ import annotations

import threading

from backhaul.autograd.messages import PassSpec, Tally
from backhaul.transport.base import Channel

_MOST = 64  # messages in a tally that travels with a gradient; more go to the driver at once


class _Open:
    """A report that is being written."""

    __slots__ = ("at_hand", "channels", "consumed", "many", "produced")

    def __init__(self) -> None:
        self.at_hand = 0
        self.many = False
        self.channels: set[Channel] = set()
        self.consumed: list[int] = []
        self.produced: dict[int, int] = {}

    def take(self) -> Tally | None:
        """All that has been written; None if that is nothing."""
        if not self.consumed:
            return None
        tally = Tally(tuple(self.consumed), self.produced)
        self.consumed, self.produced = [], {}
        return tally


class Reports:
    """Thread-safe. Every ``begin`` is followed by one ``end``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _open
        self._open: dict[PassSpec, _Open] = {}

    @property
    def open(self) -> int:
        """How many passes have gradients at hand."""
        return len(self._open)

    def begin(self, spec: PassSpec) -> None:
        """A gradient of that pass is at hand."""
        with self._lock:
            writing = self._open.get(spec)
            if writing is None:
                writing = self._open[spec] = _Open()
            writing.at_hand += 1

    def add(self, spec: PassSpec, tally: Tally) -> None:
        """Groups have run, here or on the way."""
        with self._lock:
            writing = self._open[spec]
            writing.consumed.extend(tally.consumed)
            writing.produced.update(tally.produced)

    def use(self, spec: PassSpec, channel: Channel) -> bool:
        """Gradients go into a channel. True: more may follow soon; the channel is to be flushed in the end."""
        with self._lock:
            writing = self._open[spec]
            if writing.at_hand == 1 and not writing.many and not writing.channels:
                return False
            writing.channels.add(channel)
            return True

    def expect(self, spec: PassSpec, count: int) -> None:
        """So many gradients are about to go out."""
        with self._lock:
            self._open[spec].many = count > 1

    def take_along(self, spec: PassSpec) -> Tally | None:
        """What a gradient that goes out now takes with it, if no other is at hand."""
        with self._lock:
            writing = self._open[spec]
            return writing.take() if writing.at_hand == 1 and len(writing.consumed) <= _MOST else None

    def end(self, spec: PassSpec) -> tuple[Tally | None, set[Channel]]:
        """That gradient is dealt with. If it was the last at hand, returns what is left to report, and the channels to
        flush.
        """
        with self._lock:
            writing = self._open[spec]
            writing.at_hand -= 1
            if writing.at_hand:
                return None, set()
            del self._open[spec]
        return writing.take(), writing.channels
