"""How many processors are free for this process. Reads the system's own counters; knows nothing of spinning.

Three limits count. The affinity of the process says which processors it may use. The cpu quotas of its control groups
say how much processor time: a group that uses more is stopped for the rest of the period, and every thread of the
container with it. Other threads use processors too. Their number is that of the threads that run now, where the process
may use all processors of the machine. Otherwise it is estimated from what the control group of this process uses.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import NamedTuple

_SAMPLE_SECONDS = 0.02  # a number of free processors is used for so long; also the shortest time to measure usage over
_SURVEY_SECONDS = 10.0  # affinity and quotas are read again after this time, since they may change


class ControlGroup(NamedTuple):
    """A control group of this process.

    Attributes:
        processors: How many processors it may use on average; None: any number.
        usage: The file that says how much processor time it has used.
    """

    processors: float | None
    usage: Path

    def used_seconds(self) -> float:
        """The processor time that the group has used. Raises ``OSError`` or ``ValueError`` if nothing says that."""
        text = self.usage.read_text()
        if self.usage.name == "cpu.stat":  # "usage_usec N", in version 2
            return int(text.split(maxsplit=2)[1]) / 1e6
        return int(text) / 1e9


def control_groups(root: Path) -> list[ControlGroup]:
    """The control groups of this process that count its processor time: its own, then those around it. Raises
    ``OSError`` or ``ValueError`` if the system does not tell.

    Args:
        root: Where the file system begins.
    """
    groups: list[ControlGroup] = []
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mounts = [root / "sys/fs/cgroup"]
            make = _group_of_version_2
        elif "cpu" in controllers.split(","):
            mounts = [root / "sys/fs/cgroup" / name for name in ("cpu", controllers)]
            make = _group_of_version_1
        else:
            continue
        for mount in mounts:
            # Inside a container the path may be that of the host, and the mount that of the container.
            own = mount / path.lstrip("/")
            for folder in (own, *own.parents) if own.is_dir() else (mount,):
                if mount in (folder, *folder.parents) and (group := make(folder)) is not None:
                    groups.append(group)
            if groups:
                return groups
    return groups


def _group_of_version_2(folder: Path) -> ControlGroup | None:
    usage = folder / "cpu.stat"
    if not usage.is_file():
        return None
    limit = None
    with contextlib.suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        limit = int(quota) / int(period)  # a quota of "max" is no number, and none
    return ControlGroup(limit, usage)


def _group_of_version_1(folder: Path) -> ControlGroup | None:
    usage = folder / "cpuacct.usage"
    if not usage.is_file():  # the controllers may be mounted apart
        usage = Path(str(usage).replace("/cgroup/cpu/", "/cgroup/cpuacct/"))
    if not usage.is_file():
        return None
    limit = None
    with contextlib.suppress(OSError, ValueError):
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        limit = quota / int((folder / "cpu.cfs_period_us").read_text()) if quota > 0 else None
    return ControlGroup(limit, usage)


class Processors:
    """The processors that this process may use. Threads may race here: a race only repeats a measurement.

    Args:
        root: Where the file system begins.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._surveyed = self._sampled = float("-inf")  # when
        self._count = 1.0
        self._free = 0.0
        self._alone = True  # this process may use all processors of the machine
        self._own: ControlGroup | None = None  # the innermost group
        self._limited: ControlGroup | None = None  # the group with the lowest quota
        self._used: dict[Path, tuple[float, float]] = {}  # file -> when it was read, and what it said

    @property
    def count(self) -> float:
        """How many processors this process may use at once."""
        if time.monotonic() >= self._surveyed + _SURVEY_SECONDS:
            self._survey()
        return self._count

    def _survey(self) -> None:
        allowed, online = len(os.sched_getaffinity(0)), os.cpu_count() or 1
        groups: list[ControlGroup] = []
        with contextlib.suppress(OSError, ValueError):  # else the system does not tell
            groups = control_groups(self._root)
        limited = [group for group in groups if group.processors is not None]
        self._own = groups[0] if groups else None
        self._limited = min(limited, key=_quota_of, default=None)
        self._count = min(allowed, online if self._limited is None else _quota_of(self._limited))
        self._alone = allowed >= online
        self._surveyed = time.monotonic()

    def free(self) -> float:
        """How many processors other threads do not use now. The processor of the calling thread is not free."""
        now = time.monotonic()
        if now >= self._sampled + _SAMPLE_SECONDS:
            try:
                self._free = self._measure(self.count, now)
            except (OSError, ValueError, IndexError):
                self._free = 0.0  # the system does not tell
            self._sampled = now
        return self._free

    def _measure(self, count: float, now: float) -> float:
        free = count
        if self._alone:
            running = (self._root / "proc/loadavg").read_text().split()[3].partition("/")[0]
            free = (os.cpu_count() or 1) - int(running)
        elif self._own is not None:
            free -= self._usage(self._own, now)
        else:
            free = 0.0
        if self._limited is not None:
            free = min(free, _quota_of(self._limited) - self._usage(self._limited, now))
        return free

    def _usage(self, group: ControlGroup, now: float) -> float:
        """How many processors a group has used since the last measurement, on average."""
        used = group.used_seconds()
        then, before = self._used.get(group.usage, (float("nan"), 0.0))
        self._used[group.usage] = now, used
        rate = (used - before) / (now - then) if now > then else float("nan")
        return rate if rate >= 0 else float("inf")  # the first measurement says nothing


def _quota_of(group: ControlGroup) -> float:
    assert group.processors is not None
    return group.processors


PROCESSORS = Processors()
"""The processors of this machine, for all parts of this process."""
