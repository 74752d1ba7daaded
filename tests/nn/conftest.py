"""Three workers for each test. After it no references are left on any of them."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import pytest

import backhaul as bh

DEADLINE_SECONDS = 30.0  # a test fails if what it waits for takes longer


@pytest.fixture
def workers() -> Iterator[list[bh.Worker]]:
    with bh.cluster(3) as made:
        yield made
        await_references(0)


def await_references(wanted: int) -> None:
    """Wait until all workers together own that many referenced values. Releases arrive asynchronously."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while (found := references()) != wanted:
        assert time.monotonic() < deadline, f"expected {wanted} references, found {found}"
        gc.collect()  # errors keep frames, also of handlers, in reference cycles


def references() -> int:
    infos = [bh.rpc_sync(info, bh.get_debug_info) for info in bh.get_worker_infos()]
    return sum(info["num_owner_rrefs"] for info in infos)
