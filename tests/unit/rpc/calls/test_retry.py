"""When a call is made again: pure, so over any policy and any time."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import backhaul as bh

policies = st.builds(
    bh.Retry,
    attempts=st.integers(1, 60),
    backoff=st.floats(0, 1e3),
    factor=st.floats(1, 1e12),
    longest=st.floats(0, 1e3),
    jitter=st.floats(0, 1),
)
chances = st.floats(0, 1)


@given(policies, st.integers(1, 2000), chances)
def test_a_pause_lies_within_its_bounds(retry: bh.Retry, attempt: int, chance: float) -> None:
    pause, longest = retry.pause(attempt, chance), retry.pause(attempt)
    assert 0 <= pause <= longest <= retry.longest
    assert longest * (1 - retry.jitter) <= pause or math.isclose(longest * (1 - retry.jitter), pause)
    assert retry.pause(attempt + 1) >= longest


@given(policies, st.lists(chances, min_size=60, max_size=60), st.floats(0, 1e4), st.floats(0, 10))
def test_attempts_and_pauses_stay_within_number_and_time(
    retry: bh.Retry, draws: list[float], total: float, each: float
) -> None:
    now, attempts = 0.0, 0
    while True:
        attempts += 1
        now += min(each, total - now)
        pause = retry.next(attempts, bh.PeerLostError("gone"), total - now, draws[attempts - 1])
        if pause is None:
            break
        now += pause
        assert now <= total or math.isclose(now, total)
    assert 1 <= attempts <= retry.attempts


@given(policies, st.integers(1, 100))
def test_only_what_was_asked_for_is_tried_again(retry: bh.Retry, attempt: int) -> None:
    for error in (bh.CallTimeoutError("late"), bh.CallCancelledError("not wanted"), ValueError("its own")):
        assert retry.next(attempt, error, math.inf) is None


def test_a_timeout_is_tried_again_if_asked_for() -> None:
    retry = bh.Retry(timeout=1, on=(bh.PeerLostError, bh.CallTimeoutError), jitter=0)
    assert retry.next(1, bh.CallTimeoutError("late"), 10) == pytest.approx(0.1)
    assert retry.next(1, bh.CallTimeoutError("late"), 0.05) is None
    assert retry.next(3, bh.CallTimeoutError("late"), 10) is None


def test_a_worker_that_is_unknown_is_waited_for_only_if_it_was_known() -> None:
    retry = bh.Retry()
    assert retry.next(1, bh.errors.UnknownWorkerError("who?"), 10) is None
    assert retry.next(2, bh.errors.UnknownWorkerError("who?"), 10) is not None


@pytest.mark.parametrize(
    "wrong",
    [
        {"attempts": 0},
        {"backoff": -1},
        {"backoff": math.nan},
        {"longest": math.inf},
        {"factor": 0.5},
        {"jitter": 1.5},
        {"jitter": math.nan},
        {"timeout": 0},
        {"on": (bh.CallTimeoutError,)},
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        bh.Retry(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("on", [(ValueError,), (bh.BackhaulError,), ("lost",)])
def test_only_losses_and_timeouts_may_be_tried_again(on: object) -> None:
    with pytest.raises(TypeError):
        bh.Retry(on=on, timeout=1)  # type: ignore[arg-type]
