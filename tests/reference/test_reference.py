"""Of the reference's tests that pass with Backhaul in its place, a sample: none may stop passing.

All of them: ``make reference ARGS=--floor``, which ``.ci/run`` does next.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest

from tests.reference import run

COUNT = 40
SLOW = 1.5  # seconds; those that take longer are left to the whole

# What restarts a process that did not come back leaves another behind.
pytestmark = [pytest.mark.timeout(400), pytest.mark.may_leak]


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
def process() -> Iterator[run.Process]:
    """Runs the tests of a module, and is there before the first of them is watched."""
    made = run.Process(os.environ.get("PYTEST_XDIST_WORKER", "0"))
    yield made
    made.close()


@pytest.mark.parametrize("name", sample())
def test_still_passes(name: str, process: run.Process) -> None:
    result = process.run(name)
    assert result["outcome"] == "passes", result["why"]
