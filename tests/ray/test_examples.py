"""The examples run on Ray, in a short form."""

from __future__ import annotations

import re

import pytest

from .conftest import EXAMPLES, needs, run_program

pytestmark = [needs("ray"), pytest.mark.timeout(180)]


def number_after(what: str, text: str) -> float:
    found = re.search(rf"{what}\D*([0-9][0-9.e+-]*)", text)
    assert found is not None, text
    return float(found.group(1))


def test_train_transformer_on_ray(environment: dict[str, str]) -> None:
    printed = run_program(
        EXAMPLES / "train_transformer.py", "--on", "ray", "--workers", "2", "--steps", "3", environment=environment
    )
    assert number_after("difference of a gradient to one process", printed) < 1e-5


@needs("pandas")
@needs("pyarrow")
def test_each_trial_is_a_cluster(environment: dict[str, str]) -> None:
    printed = run_program(
        EXAMPLES / "ray_tune_sweep.py", "--rates", "0.0001", "0.01", "--steps", "10", "--check", environment=environment
    )
    assert number_after("difference of a loss to one process", printed) < 1e-5
    assert number_after("best rate", printed) == 0.01
