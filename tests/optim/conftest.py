"""Torch keeps to one thread, so that tests are steady."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed

pytest.register_assert_rewrite(f"{__package__}.training")


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
