"""A worker of ``backhaul.compat.rpc`` in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from backhaul.compat import rpc


@pytest.fixture
def single_worker(tmp_path: Path) -> Iterator[None]:
    """A group of one worker, whose name is "single"."""
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/store", rpc_timeout=30)
    rpc.init_rpc("single", rank=0, world_size=1, rpc_backend_options=options)
    yield
    if rpc.api._is_current_rpc_agent_set():
        rpc.shutdown()
