"""What a process holds at one moment: threads, file descriptors, child processes and shared memory.

Linux only; on other systems a snapshot has threads only. Needs no pytest.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_XDIST = "PYTEST_XDIST_WORKER"  # the environment variable that pytest-xdist sets in its workers and their children


_OF_OTHERS = frozenset(("tqdm_monitor",))  # one for the process, from the first progress bar of tqdm to the end


@dataclass(frozen=True)
class Snapshot:
    """What the process holds, each item as (identity, description)."""

    threads: frozenset[tuple[int, str]] = field(default_factory=frozenset)
    descriptors: frozenset[tuple[str, str]] = field(default_factory=frozenset)
    processes: frozenset[tuple[int, str]] = field(default_factory=frozenset)
    segments: frozenset[tuple[str, str]] = field(default_factory=frozenset)

    def beyond(self, before: Snapshot) -> list[str]:
        """List what is here now and was not in ``before``, as text."""
        found = []
        for kind in ("threads", "descriptors", "processes", "segments"):
            known = {identity for identity, _ in getattr(before, kind)}
            extra = sorted(text for identity, text in getattr(self, kind) if identity not in known)
            if extra:
                found.append(f"{kind}: {', '.join(extra)}")
        return found


def take_snapshot() -> Snapshot:
    """Take a snapshot of this process."""
    return Snapshot(
        threads=frozenset((t.ident or 0, t.name) for t in threading.enumerate() if t.name not in _OF_OTHERS),
        descriptors=frozenset(_descriptors()),
        processes=frozenset(_children()),
        segments=frozenset((name, name) for name in _segments()),
    )


def _segments() -> Iterator[str]:
    """Names of shared memory files. All processes of the machine share the folder, so files that other workers of
    pytest-xdist have mapped are left out. Semaphores of Python's multiprocessing are left out too: the resource tracker
    of a process that has ended removes them some time later, and nothing maps them meanwhile.
    """
    names = [path.name for path in _list(Path("/dev/shm")) if not path.name.startswith("sem.mp-")]
    own = os.environ.get(_XDIST)
    if names and own:
        others = "".join(_maps_of_others(own))
        names = [name for name in names if f"/dev/shm/{name}" not in others]
    yield from names


def _maps_of_others(own: str) -> Iterator[str]:
    """The memory maps of other workers of pytest-xdist, which have the same parent, and of their children."""
    for process in _list(Path("/proc")):
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        try:
            variables = (process / "environ").read_bytes().split(b"\0")
            names = [each.decode() for each in variables if each.startswith(f"{_XDIST}=".encode())]
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            theirs = names[0] != f"{_XDIST}={own}" if names else parent == os.getppid()
            if theirs:
                yield (process / "maps").read_text()
        except OSError:  # the process has ended
            continue


def _list(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _descriptors() -> Iterator[tuple[str, str]]:
    for link in _list(Path("/proc/self/fd")):
        try:
            target = os.readlink(link)
        except OSError:  # the descriptor that lists the folder
            continue
        # Sockets and pipes have unique targets. All others are distinguished by their number.
        unique = target if ":[" in target and "anon_inode" not in target else f"{target} as {link.name}"
        if not target.startswith(("/dev/", "/proc/")):
            yield unique, f"{link.name} -> {target}"


def _children() -> Iterator[tuple[int, str]]:
    for task in _list(Path("/proc/self/task")):
        try:
            pids = (task / "children").read_text().split()
        except OSError:
            continue
        for pid in pids:
            try:
                command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
            except OSError:
                continue
            yield int(pid), f"{pid} {command[:80]}"
