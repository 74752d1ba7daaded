"""Of the reference's tests that pass with Backhaul in its place, a sample: none may stop passing.

All of them: ``make reference ARGS=--floor``.
"""

from __future__ import annotations

import itertools

import pytest

from tests.reference import run

COUNT = 120
SLOW = 1.5  # seconds; those that take longer are left to the whole

pytestmark = pytest.mark.timeout(400)


def sample() -> list[str]:
    """As many of each suite as its size asks for, spread over it, and one of each at least."""
    quick = [name for name, seconds in run.floor().items() if seconds <= SLOW]
    chosen = []
    for _, suite in itertools.groupby(quick, key=lambda name: name.partition(".")[0]):
        names = list(suite)
        count = max(1, COUNT * len(names) // len(quick))
        chosen += [names[place * len(names) // count] for place in range(count)]
    return chosen


@pytest.fixture(scope="module")
def results() -> run.Results:
    found = run.run(sample())
    again = [name for name, result in found.items() if result["outcome"] != "passes"]
    if again:  # alone, in case the machine was too busy
        found.update(run.run(again, jobs=1))
    return found


@pytest.mark.parametrize("name", sample())
def test_still_passes(name: str, results: run.Results) -> None:
    assert results[name]["outcome"] == "passes", results[name]["why"]
