"""Two failure detectors at the two ends of a channel, each among other channels: however rare the heartbeats are, no
end that runs is suspected, and an end that stops is lost in time where something waits for it.
"""

from __future__ import annotations

import collections

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backhaul._rpc.liveness.failure_detector import QUIET_TICK, FailureDetector, LivenessReport, Pace, Sighting

INTERVAL, SUSPECT, LOST, QUIET_ABOVE = 0.5, 2.0, 10.0, 4
STEP = 0.125
MOST_DELAY = SUSPECT - 2 * INTERVAL - 2 * STEP  # a heartbeat is up to two intervals late: a tick sees a send late


class End:
    """One worker, as its channel to the other one sees it."""

    def __init__(self, phase: float) -> None:
        self.detector: FailureDetector[object] = FailureDetector(
            INTERVAL, suspect_after=SUSPECT, lost_after=LOST, quiet_above=QUIET_ABOVE
        )
        self.due = phase
        self.arriving: collections.deque[tuple[float, Pace | None]] = collections.deque()
        self.received = self.sent = self.others = self.watched = self.beats = 0
        self.pace: Pace | None = None
        self.awaited = self.calm = False
        self.stopped = False
        self.report: LivenessReport[object] = LivenessReport()
        self.seen: Sighting | None = None
        self.look_at = 0.0

    def receive(self, now: float) -> None:
        while self.arriving and self.arriving[0][0] <= now and not self.stopped:
            pace = self.arriving.popleft()[1]
            self.received += 1
            self.pace = self.pace if pace is None else pace
            if pace is not None and pace.waits and self.calm:
                self.due = now

    def tick(self, now: float, other: End, delay: float) -> None:
        if self.stopped or now < self.due:
            return
        sightings: dict[object, Sighting] = {number: Sighting(0, 0, 0.0) for number in range(self.watched, self.others)}
        for number in range(self.others, self.watched):
            self.detector.forget(number)
        self.watched = self.others
        sighting = Sighting(self.received, self.sent, INTERVAL, self.pace, self.awaited)
        if sighting != self.seen or now >= self.look_at:  # the detector need not look more often
            self.seen = sightings["peer"] = sighting
        self.report = self.detector.tick(now, sightings)
        self.look_at = self.report.look_at.get("peer", self.look_at)
        self.calm = not self.awaited and all(at > now for at in self.report.look_at.values())
        self.due = now + INTERVAL * (QUIET_TICK if self.calm else 1)
        pace = self.report.beat.get("peer")
        if pace is not None:
            self.beats += 1
            other.put(now + delay, Pace.read(pace.number))

    def put(self, when: float, pace: Pace | None) -> None:
        self.arriving.append((max(when, self.arriving[-1][0] if self.arriving else 0.0), pace))


class Channel:
    """Both ends, in steps of time."""

    def __init__(self, others: tuple[int, int]) -> None:
        self.ends = End(0.0), End(0.3)
        self.now = 0.0
        for end, count in zip(self.ends, others, strict=True):
            end.others = count

    def run(self, seconds: float, delay: float = 0.0) -> None:
        for _ in range(round(seconds / STEP)):
            self.now += STEP
            for end, other in (self.ends, self.ends[::-1]):
                end.receive(self.now)
                end.tick(self.now, other, delay)
                if not other.stopped:
                    assert "peer" not in end.report.suspected
                    assert "peer" not in end.report.lost

    def send(self, source: int, delay: float = 0.0) -> None:
        self.ends[source].sent += 1
        self.ends[1 - source].put(self.now + delay, None)

    def seconds_until(self, verdict: str, seen_by: int) -> float:
        """How long it takes until an end says that about the other one."""
        since = self.now
        while "peer" not in getattr(self.ends[seen_by].report, verdict):
            self.run(STEP)
            assert self.now < since + 200
        return self.now - since


few = settings(max_examples=20)


def pace_of(mine: int, theirs: int) -> float:
    """The seconds between two heartbeats on a quiet channel between two ends that have so many others."""
    return INTERVAL * max(1.0, (max(mine, theirs) + 1) / QUIET_ABOVE) ** 2


many = st.integers(0, 30)
delays = st.integers(0, int(MOST_DELAY / STEP)).map(lambda steps: steps * STEP)
moves = st.one_of(
    st.tuples(st.just("run"), st.integers(0, 120), delays),
    st.tuples(st.just("send"), st.integers(0, 1), delays),
    st.tuples(st.just("await"), st.integers(0, 1), st.booleans()),
    st.tuples(st.just("others"), st.integers(0, 1), many),
)


@given(st.tuples(many, many), st.lists(moves, max_size=25))
def test_no_end_that_runs_is_suspected(others: tuple[int, int], history: list[tuple[str, int, float]]) -> None:
    channel = Channel(others)
    for what, number, more in history:
        if what == "run":
            channel.run(number / 4, more)
        elif what == "send":
            channel.send(number, more)
        elif what == "await":
            channel.ends[number].awaited = bool(more)
        else:
            channel.ends[number].others = int(more)


@given(many, many, st.integers(0, 200), st.booleans(), st.booleans())
def test_an_end_that_stops_is_lost_in_time_if_something_waits_for_it(
    mine: int, theirs: int, quarters: int, before: bool, sends: bool
) -> None:
    """The wait begins before or after the end stops. It is enough that something was sent to it."""
    channel = Channel((mine, theirs))
    watcher, stopped = channel.ends
    channel.run(40 + quarters / 4)

    def begin() -> None:
        if sends:
            channel.send(0)
        else:
            watcher.awaited = True

    if before and not sends:
        begin()
        channel.run(3)
    stopped.stopped = True
    if not before or sends:
        begin()
    assert channel.seconds_until("suspected", 0) <= SUSPECT + 4 * INTERVAL + STEP
    assert channel.seconds_until("lost", 0) <= LOST - SUSPECT + 4 * INTERVAL + STEP


@few
@given(many, many)
def test_a_quiet_end_that_stops_is_lost_after_the_time_that_it_has_announced(mine: int, theirs: int) -> None:
    channel = Channel((mine, theirs))
    channel.run(150)
    pace = channel.ends[0].pace
    assert pace is not None
    longest = pace_of(mine, theirs)
    assert pace.within == pytest.approx(longest, abs=0.001)
    channel.ends[1].stopped = True
    assert channel.seconds_until("lost", 0) <= LOST + pace.within + QUIET_TICK * INTERVAL + STEP


@few
@given(many, many)
def test_quiet_channels_have_a_rate_in_all(mine: int, theirs: int) -> None:
    channel = Channel((mine, theirs))
    channel.run(130)
    end = channel.ends[0]
    before = end.beats
    channel.run(240)
    longest = pace_of(mine, theirs)
    least = max(0.75 * longest - QUIET_TICK * INTERVAL, INTERVAL)
    assert 240 / (longest + INTERVAL) - 1 <= end.beats - before <= 240 / least + 1


@few
@given(many, many)
def test_an_end_that_has_got_its_answer_does_not_ask_any_more(mine: int, theirs: int) -> None:
    channel = Channel((mine, theirs))
    channel.run(130)
    channel.ends[0].awaited = True
    channel.run(20)
    channel.ends[0].awaited = False
    channel.run(5)
    for end in channel.ends:
        assert end.pace is not None
        assert not end.pace.waits


def test_channels_that_were_used_together_do_not_get_their_heartbeats_together() -> None:
    detector: FailureDetector[int] = FailureDetector(INTERVAL, suspect_after=SUSPECT, lost_after=LOST, quiet_above=8)
    pace, beats = Pace(INTERVAL, INTERVAL, False), []
    for tick in range(300):
        used = int(tick >= 150)
        channels = {key: Sighting(tick, used, INTERVAL, pace) for key in range(80)}
        beats.append(len(detector.tick(tick * INTERVAL, channels).beat))
    assert max(beats[50:150]) <= 8  # 80 channels, each has a turn in about 90 ticks
    assert max(beats[151:]) <= 8


def test_a_peer_whose_heartbeats_say_nothing_gets_one_in_each_interval() -> None:
    detector: FailureDetector[int] = FailureDetector(
        INTERVAL, suspect_after=SUSPECT, lost_after=LOST, quiet_above=QUIET_ABOVE
    )
    for tick in range(100):
        report = detector.tick(tick * INTERVAL, {key: Sighting(tick, 0, INTERVAL) for key in range(100)})
        assert set(report.beat) == set(range(100))


@given(st.integers(0, (1 << 64) - 1))
def test_any_number_is_a_pace_or_none(number: int) -> None:
    pace = Pace.read(number)
    if pace is not None:
        assert Pace.read(pace.number) == pace
