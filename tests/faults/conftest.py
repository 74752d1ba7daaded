"""What the fault tests attack."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .attackers import BareEndpoint, Target, WholeWorker, bare_endpoint, whole_worker


@pytest.fixture
def bare() -> Iterator[BareEndpoint]:
    with bare_endpoint() as target:
        yield target


@pytest.fixture
def whole() -> Iterator[WholeWorker]:
    with whole_worker() as target:
        yield target


@pytest.fixture(params=["endpoint", "worker"])
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    with bare_endpoint() if request.param == "endpoint" else whole_worker() as made:
        yield made
