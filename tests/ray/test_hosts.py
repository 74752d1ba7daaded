"""Ray nodes on two hosts: workers listen on the addresses of their nodes, with TLS, and come back there."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Host, ip, make_hosts

from .conftest import PROGRAMS, needs, ray_environment

pytestmark = [needs("ray"), pytest.mark.timeout(240)]

PORT = 6379  # of the head node, in a host of its own
RAY = Path(sys.executable).parent / "ray"
END_SECONDS = 60.0


def end_all(host: Host) -> None:
    """Kill what runs in the host: Ray's processes are not children of the test."""
    deadline = time.monotonic() + END_SECONDS
    while pids := ip("netns", "pids", host.namespace).split():
        assert time.monotonic() < deadline, f"processes of {host.name} do not end: {pids}"
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.02)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[list[Host], dict[str, str]]]:
    """Two hosts with a Ray node each, and the environment of a program that uses them."""
    with make_hosts(2, tmp_path) as hosts, ray_environment() as environment:
        del environment["RAY_ADDRESS"]
        try:
            for host in hosts:
                first = host is hosts[0]
                head = ["--head", f"--port={PORT}", "--include-dashboard=false"]
                join = [f"--address={hosts[0].address}:{PORT}"]
                done = host.run(
                    RAY,
                    "start",
                    *(head if first else join),
                    f"--node-ip-address={host.address}",
                    "--num-cpus=1",
                    "--disable-usage-stats",
                    environment=environment,
                )
                assert done.returncode == 0, done.stdout + done.stderr
            yield hosts, environment
        finally:
            for host in hosts:
                end_all(host)


def test_workers_on_two_hosts(nodes: tuple[list[Host], dict[str, str]]) -> None:
    hosts, environment = nodes
    here, there = (host.address for host in hosts)
    done = hosts[0].run(
        sys.executable, PROGRAMS / "on_hosts.py", f"{here}:{PORT}", here, environment=environment, cwd=PROGRAMS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = re.findall(r"^FOUND (.*)$", done.stdout, re.MULTILINE)
    found = json.loads(line)
    for places in (found["places"], found["places again"]):
        assert sorted(address for address, _, _ in places) == [here, here, there]
        for address, listens, _ in places:
            assert listens.startswith(f"tcp:{address}:")
    assert found["encrypted"] == [True] * 3
    assert found["steps"] == [0, 1, 2, 3, 4, 3, 4, 5, 6, 7]
    assert found["difference"] < 1e-6
