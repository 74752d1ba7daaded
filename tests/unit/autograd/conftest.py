"""These tests have no workers, so they install what autograd patches in torch themselves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from backhaul._autograd.torch_engine import patches


@pytest.fixture(autouse=True)
def torch_patches() -> Iterator[None]:
    patches.install()
    yield
    patches.uninstall()
