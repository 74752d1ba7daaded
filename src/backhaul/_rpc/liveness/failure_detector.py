"""Who is alive? Pure logic of the failure detector: counters in, verdicts out. No I/O, and no clock of its own.

A peer is heard when the counter of what its channel has received moves. Silence is counted from look to look, and one
look adds no more than two intervals however late it comes: a worker that was stopped itself, or did not get the
processor, has not listened, and may not blame its peers for that. The same holds where something has come that this
worker has not read: a channel is asked for that before its peer is suspected or lost.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

_NEVER = float("inf")
_BEATS = 4  # a peer that speaks rarely is given so many of its own intervals


@dataclass(frozen=True, slots=True)
class Sighting:
    """What is to be seen of a channel at one moment.

    Attributes:
        received: Counts what came; any change is a sign of life.
        sent: Counts what went out, but for heartbeats.
        every: Seconds within which the peer promises to say something; 0: it promises nothing.
    """

    received: int
    sent: int
    every: float


@dataclass(frozen=True, slots=True)
class LivenessReport(Generic[K]):
    """What one look has shown.

    Attributes:
        beat: Channels over which nothing has gone out since the last look: to be sent a heartbeat.
        suspected: All channels that are suspected now, with the seconds of silence.
        alarmed: Those of them that were not before.
        recovered: Those that are suspected no longer.
        lost: Channels that have been silent for too long, with the seconds; they are watched no more.
    """

    beat: list[K] = field(default_factory=list)
    suspected: dict[K, float] = field(default_factory=dict)
    alarmed: list[K] = field(default_factory=list)
    recovered: list[K] = field(default_factory=list)
    lost: dict[K, float] = field(default_factory=dict)


class _PeerState:
    """A channel, as of the last look."""

    __slots__ = ("received", "sent", "silence", "suspected")

    def __init__(self, sight: Sighting) -> None:
        self.received = sight.received
        self.sent = -1  # the first look is always followed by a heartbeat
        self.silence = 0.0
        self.suspected = False


class FailureDetector(Generic[K]):
    """Watches channels, whatever those are. Used by one thread at a time.

    Args:
        interval: Seconds from one look to the next, as planned.
        suspect_after: Seconds of silence after which a peer is suspected; 0: never.
        lost_after: And after which it is lost; 0: never.

    Example:
        >>> detector = FailureDetector(1.0, suspect_after=2.0, lost_after=3.0)
        >>> looks = [detector.tick(now, {"peer": Sighting(received=7, sent=0, every=0.5)}) for now in range(4)]
        >>> [look.suspected for look in looks], looks[3].lost
        ([{}, {}, {'peer': 2.0}, {}], {'peer': 3.0})
    """

    def __init__(self, interval: float, *, suspect_after: float, lost_after: float) -> None:
        self._most = 2 * interval
        self._suspect_after = suspect_after or _NEVER
        self._lost_after = lost_after or _NEVER
        self._last: float | None = None
        self._watched: dict[K, _PeerState] = {}

    def tick(
        self, now: float, sights: Mapping[K, Sighting], unread: Callable[[K], bool] = lambda _: False
    ) -> LivenessReport[K]:
        """Look at all channels there are. Those that are not among ``sights`` any more are forgotten.

        Args:
            now: The time.
            sights: What is to be seen of each channel.
            unread: Whether something waits to be read there. Asked only where a peer is about to be suspected or lost.
        """
        passed = 0.0 if self._last is None else min(max(now - self._last, 0.0), self._most)
        self._last = now
        found: LivenessReport[K] = LivenessReport()
        before, self._watched = self._watched, {}
        for key, sight in sights.items():
            watched = before.get(key)
            if watched is None:
                watched = _PeerState(sight)
            elif sight.received != watched.received:
                watched.received, watched.silence = sight.received, 0.0
            else:
                watched.silence += passed
            if sight.sent <= watched.sent or watched.sent < 0:
                found.beat.append(key)
            watched.sent = sight.sent
            if self._silent(watched, sight.every) and unread(key):
                watched.silence = 0.0
            if self._judge(key, watched, sight.every, found):
                self._watched[key] = watched
        return found

    def _suspicious(self, every: float) -> float:
        """After how many seconds of silence a peer is suspected."""
        return max(self._suspect_after, _BEATS / 2 * every)

    def _hopeless(self, every: float) -> float:
        """And after how many it is lost."""
        return max(self._lost_after, _BEATS * every if self._lost_after < _NEVER else 0)

    def _silent(self, watched: _PeerState, every: float) -> bool:
        """Whether a channel has been silent for so long that something follows from it."""
        return bool(every) and watched.silence >= min(self._suspicious(every), self._hopeless(every))

    def _judge(self, key: K, watched: _PeerState, every: float, found: LivenessReport[K]) -> bool:
        """Put down what is to be said of a channel; whether to watch it further."""
        silence = watched.silence
        if every and silence >= self._hopeless(every):
            found.lost[key] = silence
            return False
        suspected = bool(every) and silence >= self._suspicious(every)
        if suspected:
            found.suspected[key] = silence
        if suspected != watched.suspected:
            (found.alarmed if suspected else found.recovered).append(key)
            watched.suspected = suspected
        return True
