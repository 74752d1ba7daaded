"""Runs each program with every combination of options that a pass can have, and outside contexts."""

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
def check_context(request: pytest.FixtureRequest) -> Callable[..., None]:
    """``worlds.check`` with one combination of options."""
    from . import worlds

    return functools.partial(worlds.check, **WAYS[request.param])


@pytest.fixture(params=[*WAYS, "plain"])
def check(request: pytest.FixtureRequest) -> Callable[..., None]:
    """``worlds.check`` with one combination of options, or ``worlds.check_outside``."""
    from . import worlds

    if request.param == "plain":
        return worlds.check_outside
    return functools.partial(worlds.check, **WAYS[request.param])
