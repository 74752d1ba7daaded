"""The reference's tests for CUDA devices, with Backhaul in its place: those for which there are enough devices."""

from __future__ import annotations

import pytest
import torch

from tests.reference import run

JOBS = 3  # each is two to four processes on one device

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(1500),
    pytest.mark.may_leak,  # see test_reference
]


def test_none_fails_that_is_not_known_to(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print()
        results = run.run(jobs=JOBS, limit=run.CUDA_LIMIT, quiet=False, cuda=True)
        run.show(results)
        unknown = run.tell(results)
    again = (
        run.run(unknown, jobs=1, limit=run.CUDA_LIMIT, cuda=True) if unknown else {}
    )  # in case the machine was too busy
    still = {name: result["why"] for name, result in again.items() if result["outcome"] != "passes"}
    assert not still
    assert any(result["outcome"] == "passes" for result in results.values())
