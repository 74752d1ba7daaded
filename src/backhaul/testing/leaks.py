"""A pytest plugin that fails a test if it leaves threads, file descriptors, child processes or shared memory behind.

Load it with ``pytest_plugins = ["backhaul.testing.leaks"]``. Mark a test that must leave something behind with
``@pytest.mark.may_leak``. Linux only; on other systems the plugin checks threads only.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import pytest

from backhaul.testing.snapshots import take_snapshot

_GRACE_SECONDS = 20.0  # how long threads, processes and so on may take to end
_BEFORE_GC_SECONDS = 0.1  # of these, without garbage collection, which takes long in a large process


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test if something that it created still exists."""
    if request.node.get_closest_marker("may_leak") is not None:
        yield
        return
    before = take_snapshot()
    yield
    now = time.monotonic()
    collect_after, deadline = now + _BEFORE_GC_SECONDS, now + _GRACE_SECONDS
    while take_snapshot().beyond(before):
        now = time.monotonic()
        if now > collect_after:
            gc.collect()
        if now > deadline and (left := take_snapshot().beyond(before)):
            pytest.fail(
                "the test left behind " + "; ".join(left) + "; close it, or mark the test with may_leak", pytrace=False
            )
        time.sleep(0.002 if now < collect_after else 0.01)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", "may_leak: this test may leave threads, descriptors or processes behind")
