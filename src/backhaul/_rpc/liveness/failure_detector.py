"""Decides which peers are alive, and over which channels a heartbeat is due. Pure: counters in, verdicts out; no I/O
and no clock of its own.

A peer shows a sign of life when the count of bytes that its channel has received changes. The detector is called at
regular times and adds up the time for which this worker has listened. One tick adds at most two intervals, however late
it comes: a worker that was stopped, or did not get the processor, has not listened and must not blame its peers for
that. The same holds where bytes have arrived that this worker has not read: a channel is asked for such bytes before
its peer is suspected or lost.

[Note: quiet channels] With a heartbeat on each channel in each interval, the cost of an idle cluster would grow with
the square of its size. So above some number of channels the time between two heartbeats grows with the square of their
number, except where something waits: all heartbeats of a full mesh together then cost the same at any size. Each
heartbeat says how long the peer may have to wait for the next one (``Pace``), so the peer knows how long
silence means nothing. A worker that waits for a silent peer *asks*: its heartbeat says that it waits. The peer then
sends heartbeats at the full rate, and its silence counts from the question on. A worker waits for a peer if a call or a
pass does, and also if it has sent anything since the last sign of life: what it sent may be what others wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)

_NEVER = float("inf")
QUIET_TICK = 2
"""How many intervals may lie between two ticks while no channel has to be looked at (``LivenessReport.look_at``)."""

_LOST_AFTER_BEATS = 4  # a peer with a long heartbeat interval may be silent for this many of its own intervals
_LONGEST_QUIET_SECONDS = 60.0  # between two heartbeats, however many channels there are
_GOLDEN_RATIO = 0.618033988749895  # its multiples spread evenly over 0 to 1
_MILLISECONDS_BITS = 31  # of each time in the number of a heartbeat
_MOST_MILLISECONDS = (1 << _MILLISECONDS_BITS) - 1


class Pace(NamedTuple):
    """What a heartbeat says about those that follow, see [Note: quiet channels].

    Attributes:
        within: Seconds within which the sender sends something again.
        wish: Seconds between heartbeats that the sender can afford where nothing waits. The longer wish of the two
            ends holds for both.
        waits: Whether the sender waits for something from the receiver, which then sends heartbeats at its full rate.

    Example:
        >>> Pace.read(Pace(12.7, 0.5, True).number)
        Pace(within=12.7, wish=0.5, waits=True)
        >>> Pace.read(0) is None
        True
    """

    within: float
    wish: float
    waits: bool

    @property
    def number(self) -> int:
        """The number of the frame: never 0. Heartbeats that say nothing have 0."""
        within, wish = (min(round(seconds * 1000), _MOST_MILLISECONDS) for seconds in (self.within, self.wish))
        return 1 | self.waits << 1 | within << 2 | wish << 2 + _MILLISECONDS_BITS

    @classmethod
    def read(cls, number: int) -> Pace | None:
        """The pace that is in the number of a frame; None if there is none."""
        if not number & 1:
            return None
        times = number >> 2
        within, wish = times & _MOST_MILLISECONDS, times >> _MILLISECONDS_BITS & _MOST_MILLISECONDS
        return cls(within / 1000, wish / 1000, bool(number & 2))


class Sighting(NamedTuple):
    """What a channel shows at one moment.

    Attributes:
        received: Counts what has arrived; any change is a sign of life.
        sent: Counts what was sent, without heartbeats.
        every: Seconds within which the peer promises to send something; 0: it promises nothing.
        pace: What the last heartbeat of the peer said; None: nothing.
        awaited: Whether something waits for the peer.
    """

    received: int
    sent: int
    every: float
    pace: Pace | None = None
    awaited: bool = False


@dataclass(frozen=True, slots=True)
class LivenessReport(Generic[K]):
    """The result of one tick.

    Attributes:
        beat: Channels that need a heartbeat, and what it says.
        suspected: All channels that are suspected now, with their seconds of silence.
        alarmed: Those of them that were not suspected before.
        recovered: Channels that are suspected no longer.
        lost: Channels that were silent for too long, with their seconds of silence; they are watched no more.
        look_at: When to look at each channel again, even if its counters and its pace are the same.
    """

    beat: dict[K, Pace] = field(default_factory=dict)
    suspected: dict[K, float] = field(default_factory=dict)
    alarmed: list[K] = field(default_factory=list)
    recovered: list[K] = field(default_factory=list)
    lost: dict[K, float] = field(default_factory=dict)
    look_at: dict[K, float] = field(default_factory=dict)


class _ChannelState:
    """A channel, as of the last look at it.

    Attributes:
        received, sent: See ``Sighting``.
        told: What the last heartbeat over the channel said; None: there was none yet.
        owed: Whether something was sent since the last sign of life.
        since: When something was last sent, as far as a tick has seen it, or somewhat before (``_early``).
        heard: The last sign of life, in seconds for which this worker has listened.
        asked: When this worker began to ask, likewise.
        suspected: Whether the peer is suspected.
    """

    __slots__ = ("asked", "heard", "owed", "received", "sent", "since", "suspected", "told")

    def __init__(self, sighting: Sighting, listened: float) -> None:
        self.received = sighting.received
        self.sent = sighting.sent
        self.told: Pace | None = None  # a heartbeat always follows the first look
        self.owed = False
        self.since = -_NEVER
        self.heard = listened
        self.asked = _NEVER
        self.suspected = False


class FailureDetector(Generic[K]):
    """Watches channels, of whatever type. Used by one thread at a time.

    Args:
        interval: Planned seconds from one tick to the next.
        suspect_after: Seconds of silence after which a peer is suspected; 0: never.
        lost_after: Seconds of silence after which a peer is lost; 0: never.
        quiet_above: With more channels than this, heartbeats are rare where nothing waits.

    Example:
        >>> detector = FailureDetector(1.0, suspect_after=2.0, lost_after=3.0)
        >>> ticks = [detector.tick(now, {"peer": Sighting(received=7, sent=0, every=0.5)}) for now in range(4)]
        >>> [tick.suspected for tick in ticks], ticks[3].lost
        ([{}, {}, {'peer': 2.0}, {}], {'peer': 3.0})
    """

    def __init__(
        self, interval: float, *, suspect_after: float, lost_after: float, quiet_above: float = _NEVER
    ) -> None:
        self._interval = interval
        self._suspect_after = suspect_after or _NEVER
        self._lost_after = lost_after or _NEVER
        self._quiet_above = quiet_above
        self._last: float | None = None
        self._listened = 0.0  # seconds
        self._wish = interval
        self._turn = 0.0  # 0 to 1: where in its range the next time lies that is drawn
        self._watched: dict[K, _ChannelState] = {}

    def tick(
        self, now: float, sightings: Mapping[K, Sighting], unread: Callable[[K], bool] = lambda _: False
    ) -> LivenessReport[K]:
        """Look at channels: at least at all that are new or whose sighting has changed, and at those whose time has
        come (``LivenessReport.look_at``).

        Args:
            now: The time.
            sightings: What each channel shows.
            unread: Whether bytes wait to be read on a channel. Asked only before its peer is suspected or lost.
        """
        if self._last is not None:
            self._listened += min(max(now - self._last, 0.0), 2 * self._interval)
        self._last = now
        for key, sighting in sightings.items():
            if key not in self._watched:
                self._watched[key] = _ChannelState(sighting, self._listened)
        crowd = max(len(self._watched) / self._quiet_above, 1.0)
        self._wish = max(min(self._interval * crowd**2, _LONGEST_QUIET_SECONDS), self._interval)
        report: LivenessReport[K] = LivenessReport()
        for key, sighting in sightings.items():
            state = self._watched[key]
            heard = sighting.received != state.received
            if heard:
                state.received, state.heard = sighting.received, self._listened
            if (pace := self._due(state, sighting, now, heard)) is not None:
                report.beat[key] = state.told = pace
                state.since = now - self._early(pace)
            if self._silent(state, sighting) and unread(key):
                state.heard = self._listened
            if self._judge(key, state, sighting, report):
                report.look_at[key] = self._look_at(state, sighting, now)
            else:
                del self._watched[key]
        return report

    def forget(self, key: K) -> None:
        """A channel is gone."""
        self._watched.pop(key, None)

    # Sending.

    def _due(self, state: _ChannelState, sighting: Sighting, now: float, heard: bool) -> Pace | None:
        """The heartbeat that is due on a channel; None: none is due."""
        told, pace = state.told, sighting.pace
        used, state.sent = sighting.sent > state.sent, sighting.sent
        state.owed = used or (state.owed and not heard)
        if used and told is not None:
            state.since = now - self._early(told)
        asked = told is not None and told.waits
        slow = pace is not None and pace.within > sighting.every
        asks = (sighting.awaited or state.owed) and (asked or (slow and not heard))
        wanted = pace is not None and pace.waits
        if told is not None and (asked or not asks):
            soon = now - state.since + self._ahead(told) >= told.within
            if used or not (soon or wanted or asks != asked):
                return None
        within = self._interval
        if not asks and not wanted and (pace is not None or not sighting.every):
            within = max(self._wish, 0.0 if pace is None else min(pace.wish, _LONGEST_QUIET_SECONDS))
        if asks != asked:
            state.asked = self._listened if asks else _NEVER
        return Pace(within, self._wish, asks)

    def _ahead(self, told: Pace) -> float:
        """How long before its time a heartbeat is sent: until the next tick, which comes later if all is quiet."""
        return self._interval if told.within <= self._interval else QUIET_TICK * self._interval

    def _early(self, told: Pace) -> float:
        """How much sooner than promised the next heartbeat of a quiet channel is sent, up to a quarter. All
        channels may have been used at the same moment, and their heartbeats should not come at the same moment.
        """
        if told.within <= self._interval:
            return 0.0
        self._turn = (self._turn + _GOLDEN_RATIO) % 1.0
        return self._turn * told.within / 4

    def _look_at(self, state: _ChannelState, sighting: Sighting, now: float) -> float:
        """When to look at a channel again."""
        told, pace = state.told, sighting.pace
        if told is None or told.waits or sighting.awaited or state.owed or state.suspected:
            return now
        if pace is not None and pace.waits:
            return now
        due = state.since + told.within - self._ahead(told)
        if not sighting.every:
            return due
        return min(due, now + min(self._limits(sighting)) - self._excess(state, sighting))

    # Judging.

    def _limits(self, sighting: Sighting) -> tuple[float, float]:
        """Seconds of silence after which a peer that sends at its full rate is suspected, and lost."""
        every = sighting.every
        lost = max(self._lost_after, _LOST_AFTER_BEATS * every if self._lost_after < _NEVER else 0)
        return max(self._suspect_after, _LOST_AFTER_BEATS / 2 * every), lost

    def _excess(self, state: _ChannelState, sighting: Sighting) -> float:
        """How long the peer has been silent, less the time for which it was allowed to be silent."""
        pace, every = sighting.pace, sighting.every
        silence = self._listened - state.heard
        if pace is None or pace.within <= every:
            return silence
        allowed = min(pace.within, max(_LONGEST_QUIET_SECONDS, every))
        return max(silence - allowed, min(silence, self._listened - state.asked))

    def _silent(self, state: _ChannelState, sighting: Sighting) -> bool:
        """Whether a channel was silent for so long that its peer is about to be suspected or lost."""
        return bool(sighting.every) and self._excess(state, sighting) >= min(self._limits(sighting))

    def _judge(self, key: K, state: _ChannelState, sighting: Sighting, report: LivenessReport[K]) -> bool:
        """Add the verdict about a channel to the report. False: the channel is lost and watched no more."""
        silence, excess = self._listened - state.heard, self._excess(state, sighting)
        suspect, lost = self._limits(sighting)
        if sighting.every and excess >= lost:
            report.lost[key] = silence
            return False
        suspected = bool(sighting.every) and excess >= suspect
        if suspected:
            report.suspected[key] = silence
        if suspected != state.suspected:
            (report.alarmed if suspected else report.recovered).append(key)
            state.suspected = suspected
        return True
