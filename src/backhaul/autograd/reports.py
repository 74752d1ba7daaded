"""What a worker has to tell the driver of a pass, gathered while it has gradients at hand: nobody waits for a report
before its last gradient is dealt with, so one report can speak for many.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from backhaul.autograd.messages import PassSpec, Report
from backhaul.autograd.runs import Outcome
from backhaul.transport.base import Channel


class _Open:
    """A report that is being written."""

    __slots__ = ("at_hand", "channels", "consumed", "produced")

    def __init__(self) -> None:
        self.at_hand = 0
        self.channels: set[Channel] = set()
        self.consumed: list[int] = []
        self.produced: dict[int, int] = {}


class Reports:
    """Thread-safe. Every ``begin`` is followed by one ``end``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _open
        self._open: dict[PassSpec, _Open] = {}

    def begin(self, spec: PassSpec) -> None:
        """A gradient of that pass is at hand."""
        with self._lock:
            self._open.setdefault(spec, _Open()).at_hand += 1

    def add(self, spec: PassSpec, outcomes: Iterable[Outcome]) -> None:
        """Groups have run."""
        with self._lock:
            writing = self._open[spec]
            for outcome in outcomes:
                writing.consumed.extend(outcome.consumed)
                writing.produced.update(outcome.produced)

    def use(self, spec: PassSpec, channel: Channel) -> None:
        """Gradients went into a channel, which is to be flushed in the end."""
        with self._lock:
            self._open[spec].channels.add(channel)

    def end(self, spec: PassSpec) -> tuple[Report | None, set[Channel]]:
        """That gradient is dealt with. If it was the last at hand, returns the report, if there is something to
        say, and
        the channels to flush.
        """
        with self._lock:
            writing = self._open[spec]
            writing.at_hand -= 1
            if writing.at_hand:
                return None, set()
            del self._open[spec]
        report = Report(spec, tuple(writing.consumed), writing.produced) if writing.consumed else None
        return report, writing.channels
