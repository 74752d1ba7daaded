"""A pytest plugin that fails a test which leaves threads, file descriptors, child processes or shared memory behind.

Load it with ``pytest_plugins = ["backhaul.testing.leaks"]``. A test that must leave something behind is marked
``@pytest.mark.may_leak``. Linux only; elsewhere only threads are looked at.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

_PATIENCE = 5.0  # seconds for what is ending to end
_ENDING = 0.1  # of these, those before garbage is collected, which takes long in a large process
_XDIST = "PYTEST_XDIST_WORKER"  # names a worker of pytest-xdist, in its environment and in that of what it starts


@dataclass(frozen=True)
class Snapshot:
    """What the process has at one moment; each thing as (identity, description)."""

    threads: frozenset[tuple[int, str]] = field(default_factory=frozenset)
    descriptors: frozenset[tuple[str, str]] = field(default_factory=frozenset)
    processes: frozenset[tuple[int, str]] = field(default_factory=frozenset)
    segments: frozenset[tuple[str, str]] = field(default_factory=frozenset)

    def beyond(self, before: Snapshot) -> list[str]:
        """What is here now and was not before, for people."""
        found = []
        for kind in ("threads", "descriptors", "processes", "segments"):
            known = {identity for identity, _ in getattr(before, kind)}
            extra = sorted(text for identity, text in getattr(self, kind) if identity not in known)
            if extra:
                found.append(f"{kind}: {', '.join(extra)}")
        return found


def take_snapshot() -> Snapshot:
    """Look at what this process has."""
    return Snapshot(
        threads=frozenset((t.ident or 0, t.name) for t in threading.enumerate()),
        descriptors=frozenset(_descriptors()),
        processes=frozenset(_children()),
        segments=frozenset((name, name) for name in _segments()),
    )


def _segments() -> Iterator[str]:
    """Files of shared memory. All processes of the machine share the folder: what has been mapped by tests that
    pytest-xdist runs beside these is theirs.
    """
    names = [path.name for path in _list(Path("/dev/shm"))]
    own = os.environ.get(_XDIST)
    if names and own:
        others = "".join(_maps_of_others(own))
        names = [name for name in names if f"/dev/shm/{name}" not in others]
    yield from names


def _maps_of_others(own: str) -> Iterator[str]:
    """What is mapped by the other workers of pytest-xdist, which have our parent, and by processes they started."""
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
        except OSError:  # it has ended
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
        except OSError:  # the one used for listing
            continue
        # Sockets and pipes have unique targets; for the rest the number tells them apart.
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


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test if something it made is still there."""
    if request.node.get_closest_marker("may_leak") is not None:
        yield
        return
    before = take_snapshot()
    yield
    now = time.monotonic()
    ending, deadline = now + _ENDING, now + _PATIENCE
    while take_snapshot().beyond(before):
        now = time.monotonic()
        if now > ending:
            gc.collect()
        if now > deadline and (left := take_snapshot().beyond(before)):
            pytest.fail("the test left behind " + "; ".join(left), pytrace=False)
        time.sleep(0.002 if now < ending else 0.01)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", "may_leak: this test may leave threads, descriptors or processes behind")
