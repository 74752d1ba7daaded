"""Builds the sdist and the wheel. The same files give the same bytes, whoever builds them, when and where.

Only files that git tracks are built. The wheel is built from the sdist, so what the sdist lacks is noticed.
"""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD_SECONDS = 300

_BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def find_epoch() -> int:
    """The time that the files get: ``SOURCE_DATE_EPOCH``, or the time of the last commit."""
    given = os.environ.get("SOURCE_DATE_EPOCH") or _output("git", "log", "-1", "--format=%ct")
    return int(given)


def build(folder: Path, epoch: int) -> tuple[Path, Path]:
    """Build both into a folder. Returns the paths of the sdist and of the wheel."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        sources, unpacked, made = (Path(temporary) / name for name in ("sources", "unpacked", "made"))
        for name in _output("git", "ls-files", "-z").split("\0"):
            if name and (ROOT / name).exists():
                _copy(ROOT / name, sources / name, epoch)
        sdist = folder / (name := _run_backend("build_sdist", sources, made, epoch))
        _write_again(made / name, sdist, epoch)
        with tarfile.open(sdist) as archive:
            archive.extractall(unpacked, filter="data")
        wheel = folder / (name := _run_backend("build_wheel", next(unpacked.iterdir()), made, epoch))
        shutil.copyfile(made / name, wheel)
    return sdist, wheel


def _copy(file: Path, target: Path, epoch: int) -> None:
    """Copy a file, without what differs between checkouts: its time, and most of its mode."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, target)
    target.chmod(0o755 if os.access(file, os.X_OK) else 0o644)
    os.utime(target, (epoch, epoch))


def _run_backend(hook: str, project: Path, target: Path, epoch: int) -> str:
    """Run a hook of the build backend. Returns the name of the file that it has made."""
    target.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _BUILD, hook, str(target)],
        cwd=project,
        env={**os.environ, "SOURCE_DATE_EPOCH": str(epoch)},
        umask=0o022,
        capture_output=True,
        text=True,
        timeout=BUILD_SECONDS,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{hook} failed in {project}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return done.stdout.splitlines()[-1]


def _write_again(sdist: Path, target: Path, epoch: int) -> None:
    """Write an sdist without what depends on who built it and when: owners, times, modes and the order of files."""
    with (
        tarfile.open(sdist) as old,
        target.open("wb") as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=epoch) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda each: each.name):
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mtime, member.pax_headers = epoch, {}
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            new.addfile(member, old.extractfile(member) if member.isfile() else None)


def _output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
