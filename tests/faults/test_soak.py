"""Some seconds of ``make soak``."""

from __future__ import annotations

import pytest

from tools.soak import SoakSetting, plot, run, table

pytestmark = pytest.mark.filterwarnings("ignore:Using backward:UserWarning")


@pytest.mark.timeout(240)
def test_a_few_seconds() -> None:
    verdict, _ = run(SoakSetting(seconds=5, workers=2, threads=2, every=1.5, sampled=1.5, growth=1 << 40))
    assert verdict.problems == []
    assert verdict.kills >= 1
    assert sum(count for (_, how), count in verdict.outcomes.items() if how == "right") > 10
    assert len(table(verdict)) == 1 + len(verdict.samples)
    assert plot(verdict).count("<polyline") == 5
