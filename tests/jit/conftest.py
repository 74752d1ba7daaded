"""Three workers for each test. After the test, no contexts and references are left on any of them."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import pytest
import torch

import backhaul as bh

TIMEOUT_SECONDS = 30.0
COUNTERS = ("num_owner_rrefs", "num_user_rrefs", "num_autograd_contexts", "num_current_backward_passes")


@pytest.fixture
def workers() -> Iterator[list[bh.Worker]]:
    with bh.cluster(3) as made:
        yield made
        await_cleanup()


def await_cleanup() -> None:
    """Wait until all workers have released everything. Workers send releases without waiting for them.

    ``pytest.raises`` keeps frames in a reference cycle. It is garbage once no thread holds the error any more.
    """
    deadline = time.monotonic() + TIMEOUT_SECONDS
    gc.collect()
    while found := leftovers():
        gc.collect()
        assert time.monotonic() < deadline, f"not released: {found}"


def leftovers() -> dict[str, int]:
    infos = [bh.rpc_sync(info, bh.get_debug_info) for info in bh.get_worker_infos()]
    return {name: count for name in COUNTERS if (count := sum(info[name] for info in infos))}


@pytest.fixture
def leaves() -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors that require gradients."""
    return torch.tensor([0.3, 2.0], requires_grad=True), torch.tensor([1.5, -0.7], requires_grad=True)
