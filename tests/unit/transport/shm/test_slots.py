"""Slots of shared memory: none is lent twice, all come back, and the pool keeps to its limits."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from backhaul._transport.shm.slots import FREE, LENT, MAX_SLOTS, RESERVE, Budget, Pool, Segment

KIB, MIB = 1 << 10, 1 << 20
numbers = itertools.count(1)
sizes = st.one_of(st.integers(1, 200 * KIB), st.sampled_from([64 * KIB, MIB, 5 * MIB, 64 * MIB]))


def grown(pool: Pool, size: int, *, now: float = 0.0) -> Segment:
    """Ask often enough for a segment, and add it."""
    wish = None
    while wish is None:
        wish = pool.wish(size)
    slot_bytes, count = wish
    segment = Segment(next(numbers), slot_bytes, bytearray(count), now)
    pool.add(segment)
    segment.ready = True
    return segment


class PoolMachine(RuleBasedStateMachine):
    """Any history of lending, returning, growing and shrinking."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.now = Pool(), 0.0
        self.lent: list[tuple[Segment, int]] = []

    @rule(size=sizes)
    def send(self, size: int) -> None:
        slot = self.pool.take(size, self.now)
        if slot is None:
            wish = self.pool.wish(size)
            if wish is not None:
                slot_bytes, count = wish
                assert size <= slot_bytes <= 2 * max(size, 4096)
                assert 0 < count <= MAX_SLOTS
                self.pool.add(Segment(next(numbers), slot_bytes, bytearray(count), self.now))
            return
        segment, _ = slot
        assert segment.ready
        assert size <= segment.slot_bytes <= 2 * size
        assert slot not in self.lent, "lent twice"
        self.lent.append(slot)

    @rule()
    def accept(self) -> None:
        for segment in self.pool:
            segment.ready = True

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        segment, index = self.lent.pop(data.draw(st.integers(0, len(self.lent) - 1)))
        assert segment.states[index] == LENT
        segment.states[index] = FREE

    @rule(seconds=st.sampled_from([0.1, 5.0, 20.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for segment in self.pool.drop_unused(self.now):
            assert segment.ready
            assert not any(held is segment for held, _ in self.lent), "dropped in use"

    @invariant()
    def what_is_lent_is_known(self) -> None:
        assert sum(segment.lent for segment in self.pool) == len(self.lent)
        assert all(segment in list(self.pool) for segment, _ in self.lent)

    def teardown(self) -> None:
        for segment, index in self.lent:
            segment.states[index] = FREE
        self.accept()
        self.pool.drop_unused(self.now + 100)
        assert sum(segment.nbytes for segment in self.pool) <= RESERVE
        assert not self.pool.may_shrink()


TestPool = PoolMachine.TestCase


def test_a_size_that_came_once_makes_no_segment() -> None:
    pool = Pool()
    assert pool.wish(MIB) is None
    assert pool.wish(MIB) is not None


def test_a_segment_on_its_way_is_waited_for() -> None:
    pool = Pool()
    segment = grown(pool, MIB)
    segment.ready = False
    assert pool.take(MIB, 0.0) is None
    assert pool.wish(MIB) is None
    segment.ready = True
    assert pool.take(MIB, 0.0) == (segment, 0)


def test_the_slot_that_was_used_before_is_used_again() -> None:
    pool = Pool()
    segment = grown(pool, 100 * KIB)
    assert [pool.take(100 * KIB, 0.0) for _ in range(3)] == [(segment, 0), (segment, 1), (segment, 2)]
    segment.states[1] = FREE
    assert pool.take(100 * KIB, 0.0) == (segment, 1)


def test_a_little_goes_into_no_large_slot() -> None:
    pool = Pool()
    grown(pool, 8 * MIB)
    assert pool.take(MIB, 0.0) is None
    assert pool.take(4 * MIB, 0.0) is not None


def test_unused_segments_go_the_largest_first() -> None:
    pool = Pool()
    small, large, busy = (grown(pool, size) for size in (MIB, 64 * MIB, 128 * MIB))
    assert pool.take(128 * MIB, 0.0) == (busy, 0)
    assert pool.drop_unused(9.0) == []
    assert pool.drop_unused(10.0) == [large]
    assert list(pool) == [small, busy]
    assert pool.may_shrink()
    busy.states[0] = FREE
    assert pool.drop_unused(10.0) == [busy]
    assert not pool.may_shrink()
    assert pool.may_shrink(reserve=0)
    assert pool.drop_unused(10.0, reserve=0) == [small]
    assert not pool.may_shrink(reserve=0)


@given(st.lists(st.integers(1, 60), max_size=20))
def test_a_budget_keeps_to_its_limit(wanted: list[int]) -> None:
    budget, taken = Budget(100), []
    for size in wanted:
        if budget.take(size):
            taken.append(size)
        else:
            assert sum(taken) + size > 100
        assert budget.used == sum(taken) <= 100
    for size in taken:
        budget.give_back(size)
    assert budget.used == 0


@pytest.mark.parametrize("limit", [0, 5])
def test_a_budget_that_is_too_small_gives_nothing(limit: int) -> None:
    assert not Budget(limit).take(6)
