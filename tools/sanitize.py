"""Compiles the native core with the address and undefined-behavior sanitizers, and runs tests and broken input with it.

    make sanitize                                     the fuzz targets that the core is part of, and its tests
    make sanitize ARGS="--inputs 1000000"             more broken input
    make sanitize ARGS="-- python -m pytest tests/rref"    any other command

A report of a sanitizer ends the process that it is about, and makes the command fail.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from backhaul._native import build

ROOT = Path(__file__).resolve().parent.parent
FLAGS = (
    *("-O1", "-g", "-UNDEBUG", "-fno-omit-frame-pointer"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
    "-fno-sanitize=vptr",  # it needs type information that torch's libraries do not export
)
TARGETS = ("calls", "cuts", "frames", "slots", "tensors")


class SanitizerError(Exception):
    """There are no sanitizers here."""


def runtime() -> Path:
    """The library of the address sanitizer, which must be loaded before all others. Raises ``SanitizerError``."""
    compiler = shlex.split(os.environ.get("CXX") or shutil.which("g++") or "")
    if not compiler:
        raise SanitizerError("there is no g++")
    found = subprocess.run(
        [*compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=False
    ).stdout.strip()
    if not os.path.isabs(found):  # the compiler repeats the name of a file that it does not find
        raise SanitizerError(f"{compiler[0]} has no libasan.so")
    return Path(found).resolve()


def compile_core() -> Path:
    """Compile the core with sanitizers, unless that was done before. Raises ``SanitizerError``."""
    name = hashlib.sha256(f"{build.library_path()} {FLAGS}".encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"backhaul-sanitized-{os.geteuid()}" / f"{name}.so"
    if path.exists():
        return path
    path.parent.mkdir(mode=0o700, exist_ok=True)
    made = path.with_suffix(f".{os.getpid()}")
    run = build.command(made, *FLAGS)
    if run is None:
        raise SanitizerError(build.NO_COMPILER)
    print("Compiling the native core with sanitizers; this takes a minute.", flush=True)
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SanitizerError(f"the core does not compile with sanitizers:\n{done.stderr}")
    made.replace(path)
    return path


def environment(library: Path) -> Mapping[str, str]:
    """The environment of a program that uses the sanitized core. Objects of Python are allocated one by one, so that
    the sanitizer sees the use of one that is gone.
    """
    return {
        **os.environ,
        "LD_PRELOAD": f"{runtime()}:libstdc++.so.6",  # the sanitizer wraps a function of the second, which throws
        # Python and torch free little at their end. Freed memory is kept, so that its use is seen, but not all of it.
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:quarantine_size_mb=32",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        build.SWITCH: str(library),
    }


def main(args: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0 if nothing was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=300_000, help="how many broken inputs")
    parser.add_argument("command", nargs="*", help="what to run instead, after --")
    options = parser.parse_args(args)
    try:
        env = environment(compile_core())
    except SanitizerError as error:
        print(f"Not run: {error}")
        return 0
    python = sys.executable
    fuzz = [python, "-u", "-W", "ignore", "-m", "tools.fuzz", "--inputs", str(options.inputs)]
    commands = [
        [python, "-c", "import ctypes; ctypes.CDLL(None).__asan_init; import backhaul._native as n; assert n.core"],
        [*fuzz, "--targets", ",".join(TARGETS)],
        [python, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "-m", "not slow", "tests/native"],
    ]
    if options.command:
        commands[1:] = [options.command]
    for command in commands:
        if status := subprocess.run(command, cwd=ROOT, env=env, check=False).returncode:
            print(f"{shlex.join(command)}: status {status}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
