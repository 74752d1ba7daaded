"""Compiles the native core, and keeps it for this version of the sources, of torch and of Python.

The compiled library is in the user's cache folder, so that a package folder which cannot be written to is no obstacle.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch

SOURCES = Path(__file__).parent / "core"

_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden")


def _fingerprint() -> str:
    """Names the sources, the compiler's flags, and what the library is compiled against."""
    parts = [torch.__version__, sys.version, platform.machine(), *_FLAGS]
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".h", ".cpp"):
            parts += [path.name, path.read_text()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def library_path() -> Path:
    """Where the library is, once it is compiled."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    suffix = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
    return Path(cache) / "backhaul" / f"core-{_fingerprint()}{suffix}"


def command(output: Path, *extra: str) -> list[str] | None:
    """The command that compiles the core; None if there is no compiler. ``extra``: more flags, such as sanitizers."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    python = Path(sysconfig.get_paths()["include"])
    if compiler is None or not (python / "Python.h").exists():
        return None
    root = Path(torch.__file__).parent
    includes = (root / "include", root / "include" / "torch" / "csrc" / "api" / "include", python)
    return [
        *compiler.split(),
        *_FLAGS,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *extra,
        *(part for include in includes for part in ("-isystem", str(include))),
        str(SOURCES / "module.cpp"),
        f"-L{root / 'lib'}",
        "-ltorch_python",
        "-ltorch_cpu",
        "-lc10",
        "-o",
        str(output),
    ]


def build() -> str:
    """Compile the core unless it is there. Returns one line that says what was done."""
    path = library_path()
    if path.exists():
        return f"The native core is at {path}."
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        run = command(made)
        if run is None:
            return "There is no C++ compiler, or no Python.h, so Backhaul runs without its native core."
        done = subprocess.run(run, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [""])[-1]
            return f"The native core does not compile, so Backhaul runs without it: {last}"
        made.replace(path)  # at once: another process may look for it
    return f"The native core was compiled to {path}."


def main() -> None:
    """Compile the core, and print what was done."""
    print(build())
