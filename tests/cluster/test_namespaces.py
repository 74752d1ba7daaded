"""Two hosts, as network namespaces with a cable between them that can be pulled. Needs root and iproute2."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from .hosts import Host, wait_all, wait_for

PROGRAM = Path(__file__).parent / "programs" / "namespaced.py"


class Driver:
    """What the test tells the first worker to do."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._done = 0

    def step(self) -> tuple[str, float]:
        (self._folder / f"go{self._done}").touch()
        how, _, took = wait_for(self._folder / f"answer{self._done}").rpartition(" ")
        self._done += 1
        return how, float(took)


@contextlib.contextmanager
def workers(hosts: Sequence[Host], folder: Path) -> Iterator[Driver]:
    processes = [
        host.start(sys.executable, "-W", "ignore", PROGRAM, folder, str(rank), host.address)
        for rank, host in enumerate(hosts)
    ]
    for rank in range(len(hosts)):
        wait_for(folder / f"up{rank}")
    yield Driver(folder)
    (folder / "end").touch()
    assert wait_all(processes) == [0] * len(hosts)


@pytest.mark.timeout(240)
def test_two_hosts_that_are_cut_off_from_each_other(hosts: list[Host], tmp_path: Path) -> None:
    with workers(hosts[:2], tmp_path) as driver:
        assert driver.step()[0] == "right"
        hosts[1].cut()
        how, took = driver.step()
        assert how in ("CallTimeoutError about worker1", "PeerLostError about worker1")
        assert took < 30
        hosts[1].heal()
        deadline = time.monotonic() + 60  # TCP sends lost packets again after a while
        while (how := driver.step()[0]) != "right":
            assert time.monotonic() < deadline, how
        assert driver.step()[0] == "right"
