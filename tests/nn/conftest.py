"""Three workers for each test; when it is over, no references are left on any of them."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed

import backhaul as bh

PATIENCE = 30.0  # seconds after which what must come is taken not to come


@pytest.fixture(scope="package", autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def first_store() -> None:
    """The first TCPStore of a process opens a pipe of libuv's that stays for good: before a test is watched."""
    torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def workers() -> Iterator[list[bh.Worker]]:
    with bh.cluster(3) as made:
        yield made
        gc.collect()  # pytest.raises keeps frames in a circle
        await_references(0)


def await_references(wanted: int) -> None:
    """Wait until all workers together own so many values that are referred to: release is told, not waited for."""
    deadline = time.monotonic() + PATIENCE
    while (found := references()) != wanted:
        assert time.monotonic() < deadline, f"expected {wanted} references, found {found}"


def references() -> int:
    infos = [bh.rpc_sync(info, bh.get_debug_info) for info in bh.get_worker_infos()]
    return sum(info["num_owner_rrefs"] for info in infos)
