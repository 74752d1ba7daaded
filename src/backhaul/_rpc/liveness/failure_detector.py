"""Decides which peers are alive. Pure: counters in, verdicts out; no I/O and no clock of its own.

A peer shows a sign of life when the count of bytes that its channel has received changes. The detector is called at
regular times and adds up the time without a sign of life. One tick adds at most two intervals, however late it comes: a
worker that was stopped, or did not get the processor, has not listened and must not blame its peers for that. The same
holds where bytes have arrived that this worker has not read: a channel is asked for such bytes before its peer is
suspected or lost.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

_NEVER = float("inf")
_LOST_AFTER_BEATS = 4  # a peer with a long heartbeat interval may be silent for this many of its own intervals


@dataclass(frozen=True, slots=True)
class Sighting:
    """What a channel shows at one moment.

    Attributes:
        received: Counts what has arrived; any change is a sign of life.
        sent: Counts what was sent, without heartbeats.
        every: Seconds within which the peer promises to send something; 0: it promises nothing.
    """

    received: int
    sent: int
    every: float


@dataclass(frozen=True, slots=True)
class LivenessReport(Generic[K]):
    """The result of one tick.

    Attributes:
        beat: Channels over which nothing was sent since the last tick: they need a heartbeat.
        suspected: All channels that are suspected now, with their seconds of silence.
        alarmed: Those of them that were not suspected before.
        recovered: Channels that are suspected no longer.
        lost: Channels that were silent for too long, with their seconds of silence; they are watched no more.
    """

    beat: list[K] = field(default_factory=list)
    suspected: dict[K, float] = field(default_factory=dict)
    alarmed: list[K] = field(default_factory=list)
    recovered: list[K] = field(default_factory=list)
    lost: dict[K, float] = field(default_factory=dict)


class _ChannelState:
    """A channel, as of the last tick."""

    __slots__ = ("received", "sent", "silence", "suspected")

    def __init__(self, sighting: Sighting) -> None:
        self.received = sighting.received
        self.sent = -1  # a heartbeat always follows the first tick
        self.silence = 0.0
        self.suspected = False


class FailureDetector(Generic[K]):
    """Watches channels, of whatever type. Used by one thread at a time.

    Args:
        interval: Planned seconds from one tick to the next.
        suspect_after: Seconds of silence after which a peer is suspected; 0: never.
        lost_after: Seconds of silence after which a peer is lost; 0: never.

    Example:
        >>> detector = FailureDetector(1.0, suspect_after=2.0, lost_after=3.0)
        >>> ticks = [detector.tick(now, {"peer": Sighting(received=7, sent=0, every=0.5)}) for now in range(4)]
        >>> [tick.suspected for tick in ticks], ticks[3].lost
        ([{}, {}, {'peer': 2.0}, {}], {'peer': 3.0})
    """

    def __init__(self, interval: float, *, suspect_after: float, lost_after: float) -> None:
        self._longest_tick = 2 * interval
        self._suspect_after = suspect_after or _NEVER
        self._lost_after = lost_after or _NEVER
        self._last: float | None = None
        self._watched: dict[K, _ChannelState] = {}

    def tick(
        self, now: float, sightings: Mapping[K, Sighting], unread: Callable[[K], bool] = lambda _: False
    ) -> LivenessReport[K]:
        """Look at all channels. The detector forgets channels that are no longer among ``sightings``.

        Args:
            now: The time.
            sightings: What each channel shows.
            unread: Whether bytes wait to be read on a channel. Asked only before its peer is suspected or lost.
        """
        passed = 0.0 if self._last is None else min(max(now - self._last, 0.0), self._longest_tick)
        self._last = now
        report: LivenessReport[K] = LivenessReport()
        before, self._watched = self._watched, {}
        for key, sighting in sightings.items():
            state = before.get(key)
            if state is None:
                state = _ChannelState(sighting)
            elif sighting.received != state.received:
                state.received, state.silence = sighting.received, 0.0
            else:
                state.silence += passed
            if sighting.sent <= state.sent or state.sent < 0:
                report.beat.append(key)
            state.sent = sighting.sent
            if self._silent(state, sighting.every) and unread(key):
                state.silence = 0.0
            if self._judge(key, state, sighting.every, report):
                self._watched[key] = state
        return report

    def _suspect_seconds(self, every: float) -> float:
        """Seconds of silence after which a peer is suspected."""
        return max(self._suspect_after, _LOST_AFTER_BEATS / 2 * every)

    def _lost_seconds(self, every: float) -> float:
        """Seconds of silence after which a peer is lost."""
        return max(self._lost_after, _LOST_AFTER_BEATS * every if self._lost_after < _NEVER else 0)

    def _silent(self, state: _ChannelState, every: float) -> bool:
        """Whether a channel was silent for so long that its peer is about to be suspected or lost."""
        return bool(every) and state.silence >= min(self._suspect_seconds(every), self._lost_seconds(every))

    def _judge(self, key: K, state: _ChannelState, every: float, report: LivenessReport[K]) -> bool:
        """Add the verdict about a channel to the report. False: the channel is lost and watched no more."""
        silence = state.silence
        if every and silence >= self._lost_seconds(every):
            report.lost[key] = silence
            return False
        suspected = bool(every) and silence >= self._suspect_seconds(every)
        if suspected:
            report.suspected[key] = silence
        if suspected != state.suspected:
            (report.alarmed if suspected else report.recovered).append(key)
            state.suspected = suspected
        return True
