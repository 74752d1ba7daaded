"""What a worker has to report to the driver of a pass, until it is sent. Sends nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from backhaul._autograd.messages import PassTally
from backhaul._transport.base import Channel

_MAX_TALLY_MESSAGES = 64  # a longer tally goes to the driver at once, not with gradients from worker to worker
_NOTHING: tuple[None, set[Channel]] = (None, set())


class ReportBuffer:
    """The tallies that a worker has to report to the driver of a pass. Thread-safe. One ``end`` follows each ``begin``.

    The driver needs no report before the worker has finished its last task of the pass, so one report can cover many
    tasks. Most tallies never become a frame of their own. They travel with the next gradients, from worker to worker,
    until a worker has no gradients to send. That worker sends them to the driver, which needs them only at the end of
    the pass.
    """

    __slots__ = ("_channels", "_consumed", "_lock", "_produced", "_tasks")

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all below
        self._tasks = 0  # tasks of the pass that run or wait
        self._channels: set[Channel] = set()
        self._consumed: list[int] = []
        self._produced: dict[int, int] = {}

    @property
    def busy(self) -> bool:
        """Whether tasks of the pass run or wait here."""
        with self._lock:
            return bool(self._tasks)

    def begin(self) -> None:
        """Gradients have arrived: count the task that will handle them."""
        with self._lock:
            self._tasks += 1

    def add(self, consumed: Iterable[int], produced: Mapping[int, int]) -> None:
        """Add the tally of groups that have run, on this worker or on a worker that sent gradients to it."""
        with self._lock:
            self._consumed += consumed
            if produced:
                self._produced.update(produced)

    @property
    def last(self) -> bool:
        """Whether only one task is left. Its frames are sent at once; those of other tasks may wait for ``end``."""
        return self._tasks == 1

    def flush_later(self, channel: Channel) -> None:
        """A frame waits in ``channel``: let ``end`` return the channel."""
        with self._lock:
            self._channels.add(channel)

    def take_along(self, to_driver: bool, *, few: bool = False) -> PassTally | None:
        """Take the tally that travels with gradients that are sent now. None if other tasks of the pass run or wait, or
        if the tally is too long. ``few``: the receiver limits the number of values in a message.
        """
        with self._lock:
            if self._tasks != 1 or not ((to_driver and not few) or len(self._consumed) <= _MAX_TALLY_MESSAGES):
                return None
            if few and len(self._produced) > _MAX_TALLY_MESSAGES:
                return None
            return self._take()

    def end(self) -> tuple[PassTally | None, set[Channel]]:
        """A task is done. If it was the last one, returns what is left to report, and the channels to flush."""
        with self._lock:
            self._tasks -= 1
            if self._tasks or not (self._consumed or self._produced or self._channels):
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
