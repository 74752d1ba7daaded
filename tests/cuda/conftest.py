from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _device() -> None:
    """Start CUDA first, so that leak checks do not report what CUDA keeps open for good."""
    if torch.cuda.is_available():
        torch.ones(1, device="cuda").add(1).cpu()
        torch.cuda.synchronize()
