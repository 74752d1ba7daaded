"""How many processors are free, as files of the system say that a test has written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from backhaul._transport import processors as module
from backhaul._transport.processors import Processors, control_groups


class System:
    """The files of a machine, and its clock.

    Args:
        root: Where the files are.
        monkeypatch: Replaces what the process asks the system.
        online: How many processors the machine has.
        allowed: How many of them this process may use.
    """

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, online: int, allowed: int) -> None:
        self.root = root
        self.now = 1000.0
        monkeypatch.setattr(os, "cpu_count", lambda: online)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(allowed)))
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def run(self, threads: int) -> None:
        self.write("proc/loadavg", f"0.50 0.25 0.10 {threads}/345 6789\n")


def test_a_machine_without_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = System(tmp_path, monkeypatch, 16, 16)
    found = Processors(tmp_path)
    assert found.count == 16
    assert found.free() == 0, "the system does not tell"
    system.now += 1
    system.run(3)
    assert found.free() == 13
    system.run(20)
    assert found.free() == 13, "not measured all the time"
    system.now += 1
    assert found.free() == -4


def write_v2(system: System, folder: str, quota: str, used: float) -> None:
    system.write(f"sys/fs/cgroup/{folder}cpu.max", f"{quota}\n")
    system.write(f"sys/fs/cgroup/{folder}cpu.stat", f"usage_usec {int(used * 1e6)}\nuser_usec 1\nsystem_usec 2\n")


@pytest.mark.parametrize("path", ["/", "/a/b", "/of/the/host"])
def test_a_container_counts_as_a_small_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Quotas of control groups of version 2. Some containers see the path of the host."""
    system = System(tmp_path, monkeypatch, 64, 64)
    system.run(2)
    system.write("proc/self/cgroup", f"0::{path}\n")
    write_v2(system, "", "200000 100000", 100)
    if path == "/a/b":
        write_v2(system, "a/", "max 100000", 100)
        write_v2(system, "a/b/", "800000 100000", 50)
    found = Processors(tmp_path)
    assert found.count == 2
    assert found.free() < 0, "the first measurement says nothing"
    system.now += 0.5
    write_v2(system, "", "200000 100000", 100.25)
    assert found.free() == pytest.approx(1.5)
    system.now += 0.5
    write_v2(system, "", "200000 100000", 101.25)
    assert found.free() == pytest.approx(0)
    system.run(64)
    system.now += 0.5
    assert found.free() == 0, "all processors of the machine are busy"


def test_a_quota_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = System(tmp_path, monkeypatch, 64, 64)
    system.write("proc/self/cgroup", "0::/\n")
    write_v2(system, "", "150000 100000", 0)
    found = Processors(tmp_path)
    assert found.count == 1.5
    write_v2(system, "", "max 100000", 0)
    assert found.count == 1.5
    system.now += 60
    assert found.count == 64


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
def test_control_groups_of_version_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mount: str) -> None:
    system = System(tmp_path, monkeypatch, 64, 64)
    system.run(1)
    controllers = "cpu" if mount == "cpu" else "cpu,cpuacct"
    accounts = "cpuacct" if mount == "cpu" else mount
    system.write("proc/self/cgroup", f"9:name=systemd:/\n3:cpuset:/\n2:cpuacct:/x\n1:{controllers}:/x\n0::/\n")
    for folder, quota in (("", -1), ("/x", 300_000)):
        system.write(f"sys/fs/cgroup/{mount}{folder}/cpu.cfs_quota_us", f"{quota}\n")
        system.write(f"sys/fs/cgroup/{mount}{folder}/cpu.cfs_period_us", "100000\n")
        system.write(f"sys/fs/cgroup/{accounts}{folder}/cpuacct.usage", "5000000000\n")
    assert [group.processors for group in control_groups(tmp_path)] == [3.0, None]
    found = Processors(tmp_path)
    assert found.count == 3
    found.free()
    system.now += 2
    system.write(f"sys/fs/cgroup/{accounts}/x/cpuacct.usage", "7000000000\n")
    assert found.free() == pytest.approx(2)


def test_a_part_of_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that run on the other processors do not count."""
    system = System(tmp_path, monkeypatch, 64, 8)
    system.run(60)
    found = Processors(tmp_path)
    assert found.count == 8
    assert found.free() == 0, "nothing says who uses the eight"
    system.write("proc/self/cgroup", "0::/job\n")
    write_v2(system, "job/", "max 100000", 10)
    system.now += 60
    assert found.count == 8
    found.free()
    system.now += 1
    write_v2(system, "job/", "max 100000", 13)
    assert found.free() == pytest.approx(5)


@pytest.mark.parametrize("text", ["", "nonsense\n", "1:2\n", "0.5 0.5 0.5 x/y 1\n"])
def test_files_that_nobody_understands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    system = System(tmp_path, monkeypatch, 16, 16)
    system.write("proc/loadavg", text)
    system.write("proc/self/cgroup", text and f"0::/\n{text}")
    system.write("sys/fs/cgroup/cpu.max", text)
    system.write("sys/fs/cgroup/cpu.stat", text)
    found = Processors(tmp_path)
    assert found.count == 16
    assert found.free() == 0


def test_this_machine() -> None:
    found = Processors()
    assert 0 < found.count <= len(os.sched_getaffinity(0))
    assert found.free() <= (os.cpu_count() or 1)
