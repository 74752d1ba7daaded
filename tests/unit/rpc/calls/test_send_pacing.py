"""Calls that follow each other closely go out together; a call on its own is never held back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backhaul._rpc.calls.send_pacing import BURST_CALLS, CLOSE_SECONDS, WINDOW_SECONDS, SendPacing


def paced(gaps: list[float]) -> list[tuple[bool, bool]]:
    """For each call, so long after the one before: whether it was held back, and whether it was sent then."""
    pacing, now, found = SendPacing(), 100.0, []
    for gap in gaps:
        now += gap
        held = pacing.holds_back(now)
        found.append((held, held and pacing.ends_window(now)))
    return found


@given(st.lists(st.floats(CLOSE_SECONDS * 1.01, 1.0), max_size=30))
def test_calls_apart_from_each_other_are_sent_at_once(gaps: list[float]) -> None:
    assert not any(held for held, _ in paced(gaps))


def test_the_first_calls_of_a_burst_are_sent_at_once() -> None:
    found = paced([1.0] + [CLOSE_SECONDS / 4] * 20)
    assert [held for held, _ in found] == [False] * BURST_CALLS + [True] * (21 - BURST_CALLS)


@given(st.lists(st.floats(0, CLOSE_SECONDS * 0.99), min_size=BURST_CALLS, max_size=200))
def test_no_call_of_a_burst_is_held_back_for_longer_than_the_window(gaps: list[float]) -> None:
    since: float | None = None
    for gap, (held, sent) in zip(gaps, paced(gaps), strict=True):
        since = None if since is None else since + gap
        if held and since is None:
            since = 0.0
        if since is not None:
            assert since <= WINDOW_SECONDS + CLOSE_SECONDS
        if sent:
            since = None


def test_a_call_after_a_pause_is_sent_at_once_again() -> None:
    found = paced([1.0] + [0.0] * 10 + [CLOSE_SECONDS * 2])
    assert found[10][0]
    assert not found[11][0]
