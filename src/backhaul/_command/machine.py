"""Facts about this machine and its Python, without an import of torch. Says nothing about what is good or wrong."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shutil
import ssl
import subprocess
from pathlib import Path
from types import ModuleType

import backhaul

PACKAGES = ("msgspec", "cloudpickle", "rich", "cryptography")
"""What Backhaul needs besides torch."""

EXTRAS = {
    "compression": ("backports.zstd",),
    "ray": ("ray",),
    "frameworks": ("lightning", "accelerate", "transformers"),
}
"""The extras of Backhaul, and what they install."""

_SECONDS = 10.0  # for a command to answer


def version_of(package: str) -> str | None:
    """The installed version; None: it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def torch_facts() -> dict[str, str]:
    """The version of torch and what it was built for; empty if it is not installed."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    found = {}
    with contextlib.suppress(OSError):
        text = Path(spec.origin).with_name("version.py").read_text()
        for name, value in re.findall(r"^(\w+)(?:: [^=]+)? = '([^']*)'", text, re.MULTILINE):
            found["version" if name == "__version__" else name] = value
    found.pop("git_version", None)
    return found


def core_build() -> ModuleType:
    """``_native/build.py``, which its package would load with torch."""
    path = Path(backhaul.__file__).parent / "_native" / "build.py"
    spec = importlib.util.spec_from_file_location("backhaul_core_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def core_state() -> tuple[str, str]:
    """One word for the native core: ``off``, ``ready``, ``failed``, ``missing`` or ``no compiler``; and the details."""
    build = core_build()
    if os.environ.get(build.SWITCH) == "0":
        return "off", f"{build.SWITCH}=0"
    try:
        path: Path = build.library_path()
    except (OSError, ModuleNotFoundError) as error:
        return "missing", str(error)
    failed = path.with_suffix(".failed")
    if path.exists():
        return "ready", path.name
    if failed.exists():
        return "failed", failed.read_text().strip()
    return ("no compiler", "") if build.command(path) is None else ("missing", "it was not compiled yet")


def compiler() -> str:
    """The first line that the C++ compiler says about itself; empty: there is none."""
    name = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    return "" if name is None else _first_line([*name.split(), "--version"])


def gpus() -> list[str]:
    """The names of the NVIDIA GPUs that the driver shows."""
    if shutil.which("nvidia-smi") is None:
        return []
    return _run(["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]).splitlines()


def _first_line(command: list[str]) -> str:
    return next(iter(_run(command).splitlines()), "")


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def memory_bytes() -> int:
    """The memory of the machine, or of the container, if that has less."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            found = min(found, int(Path(path).read_text()))
    return found


def processors() -> float:
    """How many processors this process may use at once."""
    from backhaul._transport.processors import PROCESSORS

    return PROCESSORS.count


def shared_memory_bytes() -> int | None:
    """The size of ``/dev/shm``; None: there is none."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return None
    return found.f_frsize * found.f_blocks


def limits() -> dict[str, int | None]:
    """Limits of this process; None: no limit."""
    found = {
        "open_files": resource.RLIMIT_NOFILE,
        "processes": resource.RLIMIT_NPROC,
        "locked": resource.RLIMIT_MEMLOCK,
    }
    values = {name: resource.getrlimit(kind)[0] for name, kind in found.items()}
    return {name: None if value == resource.RLIM_INFINITY else value for name, value in values.items()}


def process_limit() -> int | None:
    """How many processes and threads the container may have; None: no limit."""
    for path in ("/sys/fs/cgroup/pids.max", "/sys/fs/cgroup/pids/pids.max"):
        with contextlib.suppress(OSError, ValueError):
            return int(Path(path).read_text())
    return None


def system_facts() -> dict[str, str]:
    """The operating system, the C library and OpenSSL."""
    release = {}
    with contextlib.suppress(OSError):
        release = platform.freedesktop_os_release()
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "distribution": release.get("PRETTY_NAME", "unknown"),
        "c_library": os.confstr("CS_GNU_LIBC_VERSION") or "unknown",
        "openssl": ssl.OPENSSL_VERSION,
    }


def show_bytes(size: float) -> str:
    """A size for people.

    Example:
        >>> show_bytes(67108864), show_bytes(25.3 * 2**30), show_bytes(512)
        ('64 MiB', '25 GiB', '512 bytes')
    """
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            value = size / unit
            return f"{value:.0f} {name}" if value >= 10 else f"{value:.1f} {name}".replace(".0 ", " ")
    return f"{size:.0f} bytes"
