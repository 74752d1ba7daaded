"""The compiler, fresh for each test, and workers in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import backhaul as bh


@pytest.fixture(scope="session", autouse=True)
def first_compilation() -> None:
    """What the compiler keeps for good is there before a test is watched."""
    import torch._dynamo

    torch.compile(torch.sin, backend="aot_eager")(torch.ones(1))


@pytest.fixture(autouse=True)
def forget_what_was_compiled() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.fixture
def workers() -> Iterator[list[bh.Worker]]:
    with bh.cluster(3) as made:
        yield made
