"""Leak checks for every test; a fork server that all process tests share."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker

import pytest

pytest_plugins = ["backhaul.testing.leaks"]


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> None:
    """Start it once, before the first test is watched: it stays for the whole session."""
    multiprocessing.set_forkserver_preload(["backhaul"])
    multiprocessing.resource_tracker.ensure_running()
    multiprocessing.forkserver.ensure_running()
