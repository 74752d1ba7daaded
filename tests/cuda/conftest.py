from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _device() -> None:
    """What CUDA opens for good is there before tests look at what they leave behind."""
    if torch.cuda.is_available():
        torch.ones(1, device="cuda").add(1).cpu()
        torch.cuda.synchronize()
