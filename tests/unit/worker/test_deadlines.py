"""Scopes with a clock of the test's own: no time passes here."""

from __future__ import annotations

import contextvars

import pytest

import backhaul as bh
from backhaul._runtime.runtime import OneShotEvent
from backhaul._worker import deadlines
from backhaul._worker.deadlines import FOREVER, Block, CancelScope


class Clock:
    time = 100.0

    def __call__(self) -> float:
        return self.time


class Handler(CancelScope):
    label = "handler"

    def __init__(self, now: Clock, until: float = FOREVER) -> None:
        self.now = now
        self.until = until


def test_the_sooner_of_two_deadlines_holds_and_is_blamed() -> None:
    clock = Clock()
    outer = Handler(clock, 110.0)
    shorter, longer = Block("block", 3, clock, outer), Block("block", 30, clock, outer)
    assert (shorter.left, shorter.label) == (3, "block")
    assert (longer.left, longer.label) == (10, "handler")
    clock.time = 108
    assert (shorter.left, longer.left) == (0, 2)


def test_cancelling_reaches_what_lies_inside() -> None:
    outer = Handler(Clock())
    inner = Block("inner", 5, Clock(), Block("middle", 6, Clock(), outer))
    woken: list[str] = []
    forgotten = inner.wake_with(lambda: woken.append("forgotten"))
    inner.wake_with(lambda: woken.append("inner"))
    outer.wake_with(lambda: woken.append("outer"))
    inner.forget(forgotten)
    outer.cancel()
    assert inner.left == 0
    assert woken == ["inner", "outer"]
    inner.wake_with(lambda: woken.append("late"))
    assert woken[-1] == "late"


def within(scope: CancelScope, function: object) -> object:
    def run() -> object:
        deadlines.current.set(scope)
        return function()  # type: ignore[operator]

    return contextvars.Context().run(run)


def test_waits_end_with_their_deadline() -> None:
    clock = Clock()
    late, unwanted = Handler(clock, clock.time), Handler(clock)
    with pytest.raises(bh.CallTimeoutError) as caught:
        within(late, lambda: deadlines.wait(OneShotEvent(), None, "nothing came"))
    assert caught.value.cut_by == "handler"
    assert within(late, bh.time_left) == 0
    assert not within(late, bh.cancelled)
    unwanted.cancel()
    with pytest.raises(bh.CallCancelledError):
        within(unwanted, lambda: deadlines.wait(OneShotEvent(), None, "nothing came"))
    assert within(unwanted, bh.time_left) == 0
    assert within(unwanted, bh.cancelled)
    assert within(Handler(clock), bh.time_left) is None
    assert not within(Handler(clock), lambda: deadlines.wait(OneShotEvent(), 0, "nothing came"))


def test_a_block_without_a_deadline_ignores_those_around() -> None:
    outer = Handler(Clock(), 0.0)
    outer.cancel()

    def run() -> object:
        with bh.deadline(None):
            free = bh.time_left(), bh.cancelled()
        return free, bh.time_left(), bh.cancelled()

    assert within(outer, run) == ((None, False), 0, True)


def test_a_deadline_may_be_entered_again_and_nests() -> None:
    block = bh.deadline(1000)
    with block, block, bh.deadline(2000):
        left = bh.time_left()
        assert left is not None
        assert left <= 1000
    assert bh.time_left() is None
    for wrong in (-1, float("nan")):
        with pytest.raises(ValueError):
            bh.deadline(wrong)
