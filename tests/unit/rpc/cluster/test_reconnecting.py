"""Workers that do not answer: how long calls try, and when the background tries."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backhaul._rpc.cluster.reconnecting import SHORT_SECONDS, SilentPeer

FULL = 10.0


def test_a_worker_that_answers_gets_all_the_time() -> None:
    peer = SilentPeer()
    assert peer.seconds(FULL) == FULL
    assert peer.failed(0.01) is None  # refused at once: the next refusal comes as fast
    assert peer.seconds(FULL) == FULL


def test_after_a_slow_failure_attempts_are_short_until_the_worker_is_reached() -> None:
    peer = SilentPeer()
    assert peer.failed(FULL) == 0.5
    assert (peer.seconds(FULL), peer.seconds(0.2)) == (SHORT_SECONDS, 0.2)
    assert peer.failed(SHORT_SECONDS) is None  # one attempt in the background is enough
    peer.reached()
    assert peer.seconds(FULL) == FULL


def test_what_the_failure_detector_says_counts() -> None:
    peer = SilentPeer()
    peer.went_silent()
    assert peer.seconds(FULL) == SHORT_SECONDS
    assert peer.failed(0.3) == 0.5


def test_pauses_and_attempts_grow_and_end() -> None:
    peer = SilentPeer()
    pauses, seconds = [peer.failed(FULL)], []
    while pauses[-1] is not None:
        seconds.append(peer.probe_seconds(FULL))
        pauses.append(peer.probe_failed())
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30, None]
    assert seconds == [1, 2, 4, 8, 10, 10, 10, 10]
    assert peer.failed(SHORT_SECONDS) == 30  # until a call asks again
    peer.reached()
    assert peer.failed(FULL) == 0.5


EVENTS = st.lists(
    st.sampled_from(["fail fast", "fail slowly", "go silent", "be reached", "probe"]),
    max_size=60,
)


@given(EVENTS)
def test_one_attempt_is_planned_at_a_time_and_only_for_silent_workers(events: list[str]) -> None:
    peer, planned, asked = SilentPeer(), False, 0
    for event in events:
        pause, before = None, peer.round
        if event.startswith("fail"):
            pause = peer.failed(0.1 if event == "fail fast" else FULL)
            asked = 0
            assert pause is None or not planned
            assert planned or pause is not None or not peer.silent
            planned = planned or pause is not None
        elif event == "go silent":
            peer.went_silent()
        elif event == "be reached":
            peer.reached()
            assert peer.round == before + 1
            assert not peer.silent
            planned = False  # it is void
        elif planned:
            asked += 1
            assert 0 < peer.probe_seconds(FULL) <= FULL
            planned = peer.probe_failed() is not None
            assert asked <= 8
        assert peer.silent or not planned
        assert peer.seconds(FULL) == (SHORT_SECONDS if peer.silent else FULL)
