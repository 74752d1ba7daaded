"""Files by which monitors of the same user find the workers of this host: where each listens, and the cluster's secret.

They are in a folder that only this user can read. A worker removes its file when it ends. A file that a killed worker
has left behind is removed by the next worker that starts, and by the next monitor.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

log = logging.getLogger("backhaul")

FOLDER_VARIABLE = "BACKHAUL_RUNTIME_DIR"
"""Names the folder. If it is set and empty, workers write no files."""

_SUFFIX = ".json"


class WorkerFile(msgspec.Struct, frozen=True):
    """What a worker leaves for monitors.

    Attributes:
        started: When its process started, in ticks of the system: tells it from a later process with the same id.
        secret: The secret of the cluster, as hexadecimal digits.
    """

    name: str
    id: int
    incarnation: str
    pid: int
    started: int
    addresses: tuple[str, ...]
    secret: str

    @property
    def cluster(self) -> str:
        """Equal for workers with the same secret. Does not tell the secret."""
        return hashlib.sha256(b"backhaul/cluster/" + self.secret.encode()).hexdigest()[:8]


class LocalCluster(msgspec.Struct, frozen=True):
    """The workers of one cluster that run on this host."""

    name: str
    workers: tuple[WorkerFile, ...]

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where they listen, the first address of each."""
        return tuple(worker.addresses[0] for worker in self.workers if worker.addresses)

    @property
    def secret(self) -> bytes:
        """The secret of the cluster."""
        return bytes.fromhex(self.workers[0].secret)


def folder(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Where the files of this user are; None: there are none."""
    given = environment.get(FOLDER_VARIABLE)
    if given is not None:
        return Path(given) if given else None
    runtime = environment.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isdir(runtime):
        return Path(runtime) / "backhaul"
    return Path(tempfile.gettempdir()) / f"backhaul-{os.getuid()}"


def write(worker: WorkerFile) -> Path | None:
    """Write the file of a worker; None if there is no safe place for it, or the system refuses."""
    where = folder()
    if where is None:
        return None
    path = where / f"{worker.pid}-{worker.incarnation}{_SUFFIX}"
    try:
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_private(where):
            log.info("worker '%s' leaves no file for monitors: others can change %s", worker.name, where)
            return None
        _remove_those_of_the_dead(where)
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(msgspec.json.encode(worker))
    except OSError as error:
        log.info("worker '%s' leaves no file for monitors: %s", worker.name, error)
        return None
    return path


def remove(path: Path) -> None:
    """Remove the file of a worker that ends."""
    with contextlib.suppress(OSError):
        path.unlink()


def _remove_those_of_the_dead(where: Path) -> None:
    """Remove files whose processes are gone. Whether another process has the same id by now, ``find`` sees."""
    for path in where.glob(f"*{_SUFFIX}"):
        pid = path.name.partition("-")[0]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            remove(path)


def find() -> list[LocalCluster]:
    """The clusters of this user that have workers on this host. Removes the files of workers that have ended."""
    where = folder()
    found: dict[str, list[WorkerFile]] = {}
    if where is None or not where.is_dir() or not _is_private(where):
        return []
    for path in where.glob(f"*{_SUFFIX}"):
        try:
            worker = msgspec.json.decode(path.read_bytes(), type=WorkerFile)
        except (OSError, msgspec.DecodeError):  # it has just ended, or is just being written
            continue
        if started(worker.pid) == worker.started:
            found.setdefault(worker.cluster, []).append(worker)
        else:
            remove(path)
    return [
        LocalCluster(name, tuple(sorted(workers, key=lambda worker: worker.id)))
        for name, workers in sorted(found.items())
    ]


def started(pid: int) -> int:
    """When a process started, in ticks of the system; 0 if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    state, *fields = text[text.rindex(")") + 2 :].split()
    return 0 if state in "ZX" else int(fields[18])


def _is_private(where: Path) -> bool:
    found = os.lstat(where)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
