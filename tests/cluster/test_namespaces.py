"""Two hosts, as network namespaces with a cable between them that can be pulled. Needs root and iproute2."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "namespaced.py"
WAIT_SECONDS = 90.0


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, timeout=30)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Names of two namespaces that reach each other as 10.213.0.1 and 10.213.0.2; their cable is ``cable`` in each."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need iproute2 and root")
    mark = secrets.token_hex(3)
    names = (f"bh-{mark}-a", f"bh-{mark}-b")
    made: list[str] = []
    try:
        try:
            for name in names:
                ip("netns", "add", name)
                made.append(name)
            ends = [f"bh{mark}a", f"bh{mark}b"]
            ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
            for number, (name, end) in enumerate(zip(names, ends, strict=True), 1):
                ip("link", "set", end, "netns", name)
                ip("-n", name, "link", "set", end, "name", "cable")
                ip("-n", name, "addr", "add", f"10.213.0.{number}/24", "dev", "cable")
                ip("-n", name, "link", "set", "cable", "up")
                ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.decode().strip()}")
        yield names
    finally:
        for name in made:
            ip("netns", "delete", name)  # this deletes the cable too


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + WAIT_SECONDS
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} does not come"
        time.sleep(0.02)
    return path.read_text()


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
def workers(hosts: tuple[str, str], folder: Path) -> Iterator[Driver]:
    processes = []
    try:
        for rank, name in enumerate(hosts):
            command = [
                "ip",
                "netns",
                "exec",
                name,
                sys.executable,
                "-W",
                "ignore",
                str(PROGRAM),
                str(folder),
                str(rank),
            ]
            processes.append(subprocess.Popen([*command, f"10.213.0.{rank + 1}"]))
        for rank in range(2):
            wait_for(folder / f"up{rank}")
        yield Driver(folder)
        (folder / "end").touch()
        assert [process.wait(30) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.timeout(240)
def test_two_hosts_that_are_cut_off_from_each_other(hosts: tuple[str, str], tmp_path: Path) -> None:
    with workers(hosts, tmp_path) as driver:
        assert driver.step()[0] == "right"
        ip("-n", hosts[1], "link", "set", "cable", "down")
        how, took = driver.step()
        assert how in ("CallTimeoutError about worker1", "PeerLostError about worker1")
        assert took < 30
        ip("-n", hosts[1], "link", "set", "cable", "up")
        deadline = time.monotonic() + 60  # TCP sends lost packets again after a while
        while (how := driver.step()[0]) != "right":
            assert time.monotonic() < deadline, how
        assert driver.step()[0] == "right"
