"""Runs each program with every combination of options that a pass can have."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

pytest.register_assert_rewrite(f"{__package__}.worlds")

WAYS: dict[str, dict[str, Any]] = {
    "context": {},
    "deterministic": {"deterministic": True},
    "grad": {"accumulate": "grad"},
}


@pytest.fixture(params=WAYS)
def check(request: pytest.FixtureRequest) -> Callable[..., None]:
    """``worlds.check`` with one combination of options."""
    from . import worlds

    return functools.partial(worlds.check, **WAYS[request.param])
