"""Three workers for each test; when it is over, nothing of its contexts and references is left on any of them."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import pytest
import torch

import backhaul as bh

PATIENCE = 30.0  # seconds after which what must come is taken not to come
NOTHING = ("num_owner_rrefs", "num_user_rrefs", "num_autograd_contexts", "num_current_backward_passes")


@pytest.fixture
def workers() -> Iterator[list[bh.Worker]]:
    with bh.cluster(3) as made:
        yield made
        gc.collect()  # pytest.raises keeps frames in a circle
        await_nothing()


def await_nothing() -> None:
    """Wait until workers have let go of everything: release is told, not waited for."""
    deadline = time.monotonic() + PATIENCE
    while found := leftovers():
        assert time.monotonic() < deadline, f"still there: {found}"


def leftovers() -> dict[str, int]:
    infos = [bh.rpc_sync(info, bh.get_debug_info) for info in bh.get_worker_infos()]
    return {name: count for name in NOTHING if (count := sum(info[name] for info in infos))}


@pytest.fixture
def leaves() -> tuple[torch.Tensor, torch.Tensor]:
    """Two that need gradients."""
    return torch.tensor([0.3, 2.0], requires_grad=True), torch.tensor([1.5, -0.7], requires_grad=True)
