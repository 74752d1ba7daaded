"""The failure detector's logic: whatever the counters and the clock do, no peer is blamed that speaks, none that is
silent is missed, and what this worker slept through counts against nobody.
"""

from __future__ import annotations

import functools

from hypothesis import given
from hypothesis import strategies as st

from backhaul._rpc.liveness.failure_detector import FailureDetector, Sighting

INTERVAL, SUSPECT, LOST = 1.0, 3.0, 10.0


def pulse() -> FailureDetector[str]:
    return FailureDetector(INTERVAL, suspect_after=SUSPECT, lost_after=LOST)


steps = st.lists(
    st.tuples(
        st.integers(0, 400).map(lambda quarters: quarters / 4),  # the time to the next look
        st.dictionaries(st.sampled_from("abc"), st.tuples(st.booleans(), st.booleans())),  # heard, sent to
    ),
    max_size=60,
)


@given(steps)
def test_verdicts_follow_from_what_was_heard(history: list[tuple[float, dict[str, tuple[bool, bool]]]]) -> None:
    detector, now = pulse(), 0.0
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
        beaten &= set(seen)
        suspected &= set(seen)
        found = detector.tick(now, {key: Sighting(received[key], sent[key], INTERVAL) for key in seen})
        lost = {key for key, value in silence.items() if value >= LOST}
        doubtful = {key for key, value in silence.items() if SUSPECT <= value < LOST}
        assert set(found.lost) == lost
        assert found.suspected == {key: silence[key] for key in doubtful}
        assert set(found.alarmed) == doubtful - suspected
        assert set(found.recovered) == suspected - doubtful - lost
        assert set(found.beat) == {key for key, (_, used) in seen.items() if not used or key not in beaten}
        suspected, beaten = doubtful, set(seen) - lost
        for key in lost:
            del silence[key]


@given(st.lists(st.floats(0.0, 1000.0), min_size=1, max_size=40))
def test_a_peer_that_is_heard_at_every_look_is_never_doubted(pauses: list[float]) -> None:
    detector, now = pulse(), 0.0
    for number, pause in enumerate(pauses):
        now += pause
        found = detector.tick(now, {"peer": Sighting(number, 0, INTERVAL)})
        assert (found.suspected, found.lost, found.alarmed, found.recovered) == ({}, {}, [], [])


@given(st.lists(st.tuples(st.integers(0, 8), st.booleans()), max_size=80))
def test_a_peer_whose_bytes_nobody_has_read_is_not_doubted(history: list[tuple[int, bool]]) -> None:
    """And whether there are any is asked only where a peer would be doubted."""
    detector, now, silence, asked = pulse(), 0.0, 0.0, 0
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
        found = detector.tick(now, {"peer": Sighting(5, 0, INTERVAL)}, functools.partial(ask, unread=unread))
        assert asked - before == doubtful
        if doubtful and unread:
            silence = 0.0
        assert bool(found.lost) == (silence >= LOST)
        assert bool(found.suspected) == (SUSPECT <= silence < LOST)
        if found.lost:
            silence = 0.0  # it is watched anew


@given(st.floats(0.0, 1e6))
def test_a_long_sleep_of_our_own_is_nobodys_fault(slept: float) -> None:
    detector = pulse()
    sights = {"peer": Sighting(5, 0, INTERVAL)}
    assert not detector.tick(0.0, sights).lost
    found = detector.tick(slept, sights)
    assert not found.lost
    assert not found.suspected


@given(st.floats(0.1, 2.0))
def test_a_silent_peer_is_suspected_then_lost_in_time(pause: float) -> None:
    detector, now, sights = pulse(), 0.0, {"peer": Sighting(5, 0, INTERVAL)}
    verdicts: dict[str, float] = {}
    for _ in range(500):
        found = detector.tick(now, sights)
        if found.alarmed:
            verdicts["suspected"] = now
        if found.lost:
            verdicts["lost"] = now
            break
        now += pause
    assert SUSPECT <= verdicts["suspected"] < SUSPECT + pause + 1e-6
    assert LOST <= verdicts["lost"] < LOST + pause + 1e-6


@given(st.integers(1, 100))
def test_one_that_promises_nothing_may_be_silent_and_a_slow_one_gets_its_time(looks: int) -> None:
    detector = pulse()
    for now in range(looks):
        sights = {"mute": Sighting(1, 0, 0.0), "slow": Sighting(now // 20, 0, 20.0)}
        found = detector.tick(float(now), sights)
        assert not found.lost
        assert not found.suspected


def test_zero_means_never() -> None:
    detector: FailureDetector[str] = FailureDetector(INTERVAL, suspect_after=0, lost_after=0)
    for now in range(1000):
        found = detector.tick(float(now), {"peer": Sighting(1, 0, INTERVAL)})
        assert not found.lost
        assert not found.suspected
