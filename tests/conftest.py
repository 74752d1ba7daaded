"""Leak checks for every test; a fork server that all process tests share; torch keeps to one thread, so that tests are
steady.
"""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal

import pytest
import torch
import torch.distributed
from hypothesis import settings

pytest_plugins = ["backhaul.testing.leaks"]

# Killed workers leave files for monitors behind. The tests of monitors have a folder of their own.
os.environ["BACKHAUL_RUNTIME_DIR"] = ""

# A shell that starts the tests in the background lets them ignore it; some of them, and programs they start, must not.
signal.signal(signal.SIGINT, signal.default_int_handler)

# What fails today has to fail tomorrow, and no test fails for being slow. ``make explore`` looks further.
settings.register_profile("steady", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile("steady")

# These take longest, the first most of all; of files that run side by side they must not be the last to begin.
LONG = (
    "tests/reference/test_reference.py",
    "tests/test_examples.py",
    "tests/frameworks/test_examples.py",
    "tests/test_documentation.py",
    "tests/test_site.py",
    "tests/cluster/test_interrupts.py",
    "tests/sim/test_simulation.py",
    "tests/profiler/test_report_browser.py",
    "tests/command/test_doctor.py",
    "tests/command/test_run.py",
    "tests/command/test_run_by_ssh.py",
    "tests/monitoring/test_recording.py",
    "tests/cluster/test_processes.py",
    "tests/cluster/test_tutorial_on_two_hosts.py",
    "tests/cluster/test_notebooks.py",
    "tests/cluster/test_lifecycle.py",
    "tests/conformance/test_transports.py",
    "tests/compile/test_remote_op.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {file: place for place, file in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(LONG)))


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> None:
    """Start it once, before the first test is watched: it stays for the whole session."""
    multiprocessing.set_forkserver_preload(["tests.preloaded"])
    multiprocessing.resource_tracker.ensure_running()
    multiprocessing.forkserver.ensure_running()


@pytest.fixture(scope="module", autouse=True)
def what_is_there_stays() -> None:
    """Collecting garbage costs only what the tests of a module have made. With all of torch and of the tests to look
    through it takes half a second, and is done by many tests.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def first_store() -> None:
    """The first TCPStore of a process opens a pipe of libuv's that stays for good: before a test is watched."""
    torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
