"""Numbers of passes: two threads may begin passes at the same time."""

from __future__ import annotations

from backhaul._autograd.backward.pass_numbers import PassNumbers


def test_a_pass_counts_as_under_way_when_it_has_a_number() -> None:
    """Another thread could begin a pass between the two steps. Workers then took the first pass for over, dropped its
    share, and it never ended.
    """
    numbers, held = PassNumbers(), []
    get = numbers.new

    def new() -> int:
        held.append(numbers._lock.locked())  # no other thread begins a pass meanwhile
        return get()

    numbers.new = new
    assert [numbers.begin(0), numbers.begin(0)] == [(1, 1), (2, 1)]
    assert held == [True, True]


def test_passes_of_other_contexts_do_not_count() -> None:
    numbers = PassNumbers()
    assert [numbers.begin(1), numbers.begin(2), numbers.begin(1, number=7)] == [(1, 1), (2, 2), (7, 1)]
    numbers.end(1)
    assert numbers.begin(1) == (3, 3)
