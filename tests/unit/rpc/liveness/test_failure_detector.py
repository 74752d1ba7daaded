"""The failure detector's logic. Whatever the counters and the clock do: a peer that sends is never blamed, a silent
peer is noticed, and time that this worker slept through counts against no peer.
"""

from __future__ import annotations

import functools

from hypothesis import given
from hypothesis import strategies as st

from backhaul._rpc.liveness.failure_detector import FailureDetector, Sighting

INTERVAL, SUSPECT, LOST = 1.0, 3.0, 10.0


def new_detector() -> FailureDetector[str]:
    return FailureDetector(INTERVAL, suspect_after=SUSPECT, lost_after=LOST)


steps = st.lists(
    st.tuples(
        st.integers(0, 400).map(lambda quarters: quarters / 4),  # seconds to the next tick
        st.dictionaries(st.sampled_from("abc"), st.tuples(st.booleans(), st.booleans())),  # heard, sent to
    ),
    max_size=60,
)


@given(steps)
def test_verdicts_follow_from_what_was_heard(history: list[tuple[float, dict[str, tuple[bool, bool]]]]) -> None:
    detector, now = new_detector(), 0.0
    received = dict.fromkeys("abc", 0)
    sent = dict.fromkeys("abc", 0)
    silence: dict[str, float] = {}
    suspected: set[str] = set()
    beaten: set[str] = set()
    first = True
    for pause, seen in history:
        now += pause
        counted = 0.0 if first else min(pause, 2 * INTERVAL)
        first = False
        for key, (heard, used) in seen.items():
            received[key] += heard
            sent[key] += used
            silence[key] = 0.0 if heard or key not in silence else silence[key] + counted
        for key in set(silence) - set(seen):  # its channel is gone
            del silence[key]
            detector.forget(key)
        beaten &= set(seen)
        suspected &= set(seen)
        report = detector.tick(now, {key: Sighting(received[key], sent[key], INTERVAL) for key in seen})
        lost = {key for key, value in silence.items() if value >= LOST}
        doubtful = {key for key, value in silence.items() if SUSPECT <= value < LOST}
        assert set(report.lost) == lost
        assert report.suspected == {key: silence[key] for key in doubtful}
        assert set(report.alarmed) == doubtful - suspected
        assert set(report.recovered) == suspected - doubtful - lost
        assert set(report.beat) == {key for key, (_, used) in seen.items() if not used or key not in beaten}
        suspected, beaten = doubtful, set(seen) - lost
        for key in lost:
            del silence[key]


@given(st.lists(st.floats(0.0, 1000.0), min_size=1, max_size=40))
def test_a_peer_heard_at_every_tick_is_never_suspected(pauses: list[float]) -> None:
    detector, now = new_detector(), 0.0
    for number, pause in enumerate(pauses):
        now += pause
        report = detector.tick(now, {"peer": Sighting(number, 0, INTERVAL)})
        assert (report.suspected, report.lost, report.alarmed, report.recovered) == ({}, {}, [], [])


@given(st.lists(st.tuples(st.integers(0, 8), st.booleans()), max_size=80))
def test_a_peer_with_unread_bytes_is_not_suspected(history: list[tuple[int, bool]]) -> None:
    """The detector asks for unread bytes only before it would suspect a peer."""
    detector, now, silence, asked = new_detector(), 0.0, 0.0, 0
    detector.tick(now, {"peer": Sighting(5, 0, INTERVAL)})

    def ask(key: str, unread: bool) -> bool:
        nonlocal asked
        asked += 1
        return unread

    for quarters, unread in history:
        pause, before = quarters / 4, asked
        now += pause
        silence += min(pause, 2 * INTERVAL)
        doubtful = silence >= SUSPECT
        report = detector.tick(now, {"peer": Sighting(5, 0, INTERVAL)}, functools.partial(ask, unread=unread))
        assert asked - before == doubtful
        if doubtful and unread:
            silence = 0.0
        assert bool(report.lost) == (silence >= LOST)
        assert bool(report.suspected) == (SUSPECT <= silence < LOST)
        if report.lost:
            silence = 0.0  # the detector watches it from the start again


@given(st.floats(0.0, 1e6))
def test_a_worker_that_slept_long_blames_no_peer(slept: float) -> None:
    detector = new_detector()
    sightings = {"peer": Sighting(5, 0, INTERVAL)}
    assert not detector.tick(0.0, sightings).lost
    report = detector.tick(slept, sightings)
    assert not report.lost
    assert not report.suspected


@given(st.floats(0.1, 2.0))
def test_a_silent_peer_is_suspected_then_lost_in_time(pause: float) -> None:
    detector, now, sightings = new_detector(), 0.0, {"peer": Sighting(5, 0, INTERVAL)}
    verdicts: dict[str, float] = {}
    for _ in range(500):
        report = detector.tick(now, sightings)
        if report.alarmed:
            verdicts["suspected"] = now
        if report.lost:
            verdicts["lost"] = now
            break
        now += pause
    assert SUSPECT <= verdicts["suspected"] < SUSPECT + pause + 1e-6
    assert LOST <= verdicts["lost"] < LOST + pause + 1e-6


@given(st.integers(1, 100))
def test_a_peer_without_heartbeats_may_be_silent_and_a_slow_one_gets_more_time(ticks: int) -> None:
    detector = new_detector()
    for now in range(ticks):
        sightings = {"mute": Sighting(1, 0, 0.0), "slow": Sighting(now // 20, 0, 20.0)}
        report = detector.tick(float(now), sightings)
        assert not report.lost
        assert not report.suspected


def test_zero_means_never() -> None:
    detector: FailureDetector[str] = FailureDetector(INTERVAL, suspect_after=0, lost_after=0)
    for now in range(1000):
        report = detector.tick(float(now), {"peer": Sighting(1, 0, INTERVAL)})
        assert not report.lost
        assert not report.suspected
