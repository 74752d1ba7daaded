"""Compiles the native core, and keeps it for this version of the sources, of torch and of Python.

The compiled library is in the user's cache folder, because the package's own folder may be read-only. This file also
runs as a script: then it needs neither torch nor Backhaul, so that finding the library in place takes 50 ms.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

SWITCH = "BACKHAUL_NATIVE"
"""The environment variable that turns the core off if it is ``0``. The path of a library is loaded instead."""

SOURCES = Path(__file__).parent / "core"

FLAGS = ("-std=c++20", "-O2", "-DNDEBUG", "-fPIC", "-shared", "-fvisibility=hidden")

COMPILE_SECONDS = 600  # more than any machine needs
_KEPT_SECONDS = 30 * 24 * 3600.0  # since a library was last used
_USE_SECONDS = 24 * 3600.0  # a use of a library is noted at most once in this time

NO_COMPILER = "There is no C++ compiler, or no Python.h, so Backhaul runs without its native core."


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("the native core needs torch")
    return Path(spec.origin).parent


def _fingerprint() -> str:
    """Names the sources, the compiler's flags, and what the library is compiled against."""
    folder = _torch_folder()
    library = os.stat(folder / "lib" / "libtorch_python.so")
    parts = [
        (folder / "version.py").read_text(),
        f"{library.st_size} {library.st_mtime_ns}",
        sys.version,
        platform.machine(),
        os.confstr("CS_GNU_LIBC_VERSION") or "",
        *FLAGS,
    ]
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".h", ".cpp"):
            parts += [path.name, path.read_text()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def library_path() -> Path:
    """Where the library is, once it is compiled."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    suffix = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
    return cache / "backhaul" / f"core-{_fingerprint()}{suffix}"


def is_own(path: Path) -> bool:
    """Whether nobody but this user, or root, can have written the library."""
    for each in (path, path.parent):
        found = each.stat()
        if found.st_uid not in (0, os.geteuid()) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return False
    return True


def command(output: Path, *extra: str) -> list[str] | None:
    """The command that compiles the core; None if there is no compiler. ``extra``: more flags, such as sanitizers."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    python = Path(sysconfig.get_paths()["include"])
    if compiler is None or not (python / "Python.h").exists():
        return None
    torch = _torch_folder()
    includes = (torch / "include", torch / "include" / "torch" / "csrc" / "api" / "include", python)
    return [
        *shlex.split(compiler),
        *FLAGS,
        *extra,
        *(part for include in includes for part in ("-isystem", str(include))),
        str(SOURCES / "module.cpp"),
        f"-L{torch / 'lib'}",
        "-ltorch_python",
        "-ltorch_cpu",
        "-lc10",
        "-o",
        str(output),
    ]


def build(*, wait: bool = True, again: bool = True) -> str:
    """Compile the core unless it is there. Returns one line that says what was done.

    Args:
        wait: Whether to wait for another process that compiles it.
        again: Whether to try again if it could not be compiled before.
    """
    path = library_path()
    failed = path.with_suffix(".failed")
    if path.exists():
        return f"The native core is at {path}."
    if command(path) is None:
        return NO_COMPILER
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock"), wait=wait) as mine:
            if not mine:
                return "Another process compiles the native core."
            if path.exists():  # since this process has waited
                return f"The native core is at {path}."
            if failed.exists() and not again:
                return failed.read_text()
            said = _compile(path)
            if path.exists():
                failed.unlink(missing_ok=True)
                _forget_old(path.parent)
            else:
                failed.write_text(said)
            return said
    except OSError as error:
        return f"The native core cannot be kept, so Backhaul runs without it: {error}"


@contextlib.contextmanager
def _locked(path: Path, *, wait: bool) -> Iterator[bool]:
    """Hold a lock among processes; whether it is held. It is free again if its holder is killed."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def _compile(path: Path) -> str:
    for left in path.parent.glob(f"{path.stem}-*"):  # of a compiler that was killed
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f"{path.stem}-") as folder:
        made = Path(folder) / path.name
        run = command(made)
        assert run is not None
        try:
            done = subprocess.run(
                run, capture_output=True, text=True, errors="replace", check=False, timeout=COMPILE_SECONDS
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"The native core does not compile, so Backhaul runs without it: {error}"
        if done.returncode or not made.exists():
            lines = done.stderr.strip().splitlines()
            why = next((line for line in lines if "error" in line), lines[-1] if lines else f"{run[0]} failed")
            return f"The native core does not compile, so Backhaul runs without it: {why}"
        made.chmod(0o700)
        made.replace(path)  # at once: another process may look for it
    return f"The native core was compiled to {path}."


def note_use(path: Path) -> None:
    """Note that the library was used, so that it is kept."""
    with contextlib.suppress(OSError):
        if path.stat().st_mtime < time.time() - _USE_SECONDS:
            os.utime(path)


def _forget_old(folder: Path) -> None:
    """Remove libraries that were not used for a long time: those of other versions."""
    for path in folder.glob("core-*.so"):
        if path.stat().st_mtime < time.time() - _KEPT_SECONDS:
            for each in folder.glob(f"{path.stem}.*"):
                each.unlink(missing_ok=True)


def build_later() -> None:
    """Compile the core in a process of its own, which outlives this one. Returns at once."""
    subprocess.run([sys.executable, __file__, "--later"], check=False, stdin=subprocess.DEVNULL)


def main(check: Callable[[], str | None] = lambda: None) -> str | None:
    """Compile the core, and print what was done. ``check``: says why the library cannot be loaded; what it says is
    returned.
    """
    parser = argparse.ArgumentParser(description="Compiles the native core of Backhaul.")
    parser.add_argument("--later", action="store_true", help="in the background, unless that failed before")
    parser.add_argument(
        "--quiet", action="store_true", help="print nothing if there is nothing to do; do not repeat what failed before"
    )
    given = parser.parse_args()
    if given.later:
        _build_in_background()
        return None
    path = library_path()
    if given.quiet and (path.exists() or os.environ.get(SWITCH) == "0"):
        return None
    if not (path.exists() or (given.quiet and path.with_suffix(".failed").exists()) or command(path) is None):
        print("Compiling the native core of Backhaul; this takes half a minute, once.", flush=True)
    said = build(again=not given.quiet)
    wrong = check()
    if wrong is None:
        print(said)
    return wrong


def _build_in_background() -> None:
    if os.fork():
        return
    os.setsid()
    os.nice(19)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    build(wait=False, again=False)
    os._exit(0)


if __name__ == "__main__":
    main()
