"""Processor time of all processes of a group: user and system, of threads that have ended too."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def group_members(group: int) -> list[int]:
    """The processes of a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            fields = _stat(int(entry.name))
            if fields and int(fields[2]) == group:
                found.append(int(entry.name))
    return found


def processor_seconds(processes: Sequence[int]) -> float:
    """The processor time of these processes together. Those that have ended count as 0."""
    return sum(map(_seconds_of, processes))


def _seconds_of(process: int) -> float:
    # Linux makes the clock of another process from its id like this: it counts nanoseconds, /proc counts ticks.
    try:
        return time.clock_gettime((~process << 3) | 2)
    except OSError:
        return ticks_of(process)


def ticks_of(process: int) -> float:
    """The same from ``/proc``, in steps of 10 ms."""
    fields = _stat(process)
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND if fields else 0.0


def _stat(process: int) -> list[str]:
    """The fields of ``/proc/PID/stat`` after the name, which may contain anything; none if the process has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
