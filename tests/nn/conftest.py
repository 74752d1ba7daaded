"""Three workers for each test; when it is over, no references are left on any of them."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import pytest

import backhaul as bh

PATIENCE = 30.0  # seconds after which what must come is taken not to come


@pytest.fixture
def workers() -> Iterator[list[bh.Worker]]:
    with bh.cluster(3) as made:
        yield made
        await_references(0)


def await_references(wanted: int) -> None:
    """Wait until all workers together own so many values that are referred to: release is told, not waited for."""
    deadline = time.monotonic() + PATIENCE
    while (found := references()) != wanted:
        assert time.monotonic() < deadline, f"expected {wanted} references, found {found}"
        gc.collect()  # errors keep frames in circles, those of handlers too, which may have been at work a moment ago


def references() -> int:
    infos = [bh.rpc_sync(info, bh.get_debug_info) for info in bh.get_worker_infos()]
    return sum(info["num_owner_rrefs"] for info in infos)
