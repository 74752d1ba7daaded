"""Checks of this host: Python, torch, the native core, packages, memory, limits and GPUs. Imports no torch."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator

from backhaul._command import machine
from backhaul._command.findings import Finding

_OLDEST_PYTHON, _NEWEST_PYTHON = (3, 11), (3, 13)
# As in ``_torch_support``, which imports torch; a test compares them.
OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 15)

_FILES = 1024  # open files that are enough for hundreds of workers: a worker opens about twenty, and one for each peer
_FEW_FILES = 64
_FEW_PROCESSES = 512  # a worker has five threads when it is idle, and torch one for each processor
_SMALL_SHARED_MEMORY = 256 << 20
_SMALL_MEMORY = 2 << 30


def check_python() -> Iterator[Finding]:
    """The interpreter and the system."""
    version, name = sys.version_info[:2], platform.python_version()
    if platform.system() != "Linux":
        yield Finding(
            "system",
            "wrong",
            f"this is {platform.system()}, and Backhaul needs Linux for workers in several processes",
            "use Linux, also in a container or a virtual machine",
        )
    if version < _OLDEST_PYTHON:
        yield Finding("python", "wrong", f"Python {name} is too old", "use Python 3.11, 3.12 or 3.13")
    elif version > _NEWEST_PYTHON:
        yield Finding("python", "note", f"Python {name} was not tested", "use Python 3.11, 3.12 or 3.13")
    else:
        yield Finding("python", "good", f"Python {name}")


def check_torch_version() -> Iterator[Finding]:
    """The version of torch, as its files say."""
    facts = machine.torch_facts()
    version = facts.get("version", "")
    match = re.match(r"(\d+)\.(\d+)", version)
    fix = f"pip install 'torch>={_text(OLDEST_TORCH)},<{NEWEST_TORCH[0]}.{NEWEST_TORCH[1] + 1}'"
    if match is None:
        yield Finding("torch", "wrong", "torch is not installed", fix)
    elif (release := (int(match[1]), int(match[2]))) < OLDEST_TORCH:
        yield Finding("torch", "wrong", f"torch {version} is older than {_text(OLDEST_TORCH)}", fix)
    elif release > NEWEST_TORCH:
        yield Finding("torch", "note", f"torch {version} is newer than {_text(NEWEST_TORCH)}, the newest tested", fix)
    else:
        tested = f"{_text(OLDEST_TORCH)} to {_text(NEWEST_TORCH)}"
        yield Finding("torch", "good", f"torch {version}; tested are {tested}")


def _text(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))


def check_core() -> Iterator[Finding]:
    """The native core. Everything works without it, more slowly."""
    if not machine.torch_facts():
        return
    state, details = machine.core_state()
    slower = "Backhaul runs in Python, with more processor time for each call"
    match state:
        case "ready":
            yield Finding("native core", "good", "compiled for this torch and this Python")
        case "off":
            yield Finding("native core", "note", f"turned off: {slower}", f"unset {details.partition('=')[0]}")
        case "failed":
            yield Finding(
                "native core", "note", details, "install g++ 12 or newer, and run: python -m backhaul._native"
            )
        case "missing":
            yield Finding(
                "native core", "note", f"not compiled yet: {slower}", "compile it: python -m backhaul._native"
            )
        case _:
            yield Finding(
                "native core",
                "note",
                f"no C++ compiler, or no Python.h: {slower}",
                "install g++ and the headers of Python (apt-get install g++ python3-dev), then run: "
                "python -m backhaul._native",
            )


def check_packages() -> Iterator[Finding]:
    """What Backhaul needs, and its extras."""
    found = {name: machine.version_of(name) for name in machine.PACKAGES}
    missing = [name for name, version in found.items() if version is None]
    if missing:
        yield Finding("packages", "wrong", f"not installed: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    else:
        yield Finding("packages", "good", ", ".join(f"{name} {version}" for name, version in found.items()))
    there = [extra for extra, names in machine.EXTRAS.items() if _has_extra(extra, names)]
    absent = [extra for extra in machine.EXTRAS if extra not in there]
    text = f"installed: {', '.join(there) or 'none'}"
    if absent:
        text += f"; others, if you need them: pip install 'backhaul[{','.join(absent)}]'"
    yield Finding("extras", "good", text)


def _has_extra(extra: str, names: tuple[str, ...]) -> bool:
    in_python = extra == "compression" and sys.version_info >= (3, 14)
    return in_python or all(machine.version_of(name) is not None for name in names)


def check_memory() -> Iterator[Finding]:
    """Memory, and memory that processes share."""
    memory = machine.memory_bytes()
    text = f"{machine.show_bytes(memory)}; {machine.processors():g} processors"
    if memory < _SMALL_MEMORY:
        yield Finding("memory", "note", text, "a worker with torch takes about 250 MiB; start few workers")
    else:
        yield Finding("memory", "good", text)
    try:
        os.close(os.memfd_create("backhaul-doctor"))
    except (OSError, AttributeError) as error:
        yield Finding(
            "shared memory",
            "note",
            f"this system makes no shared memory ({error}): tensors go through sockets",
            "allow memfd_create, which a seccomp profile may forbid",
        )
    else:
        yield Finding("shared memory", "good", "workers of this host pass large tensors without copying (memfd)")
    size = machine.shared_memory_bytes()
    if size is None or size < _SMALL_SHARED_MEMORY:
        yield Finding(
            "/dev/shm",
            "note",
            "there is none"
            if size is None
            else f"{machine.show_bytes(size)}; Backhaul does not use it, but DataLoader does",
            "start the container with --shm-size=2g if you use DataLoader with workers",
        )
    else:
        yield Finding("/dev/shm", "good", machine.show_bytes(size))


def check_limits() -> Iterator[Finding]:
    """How many files, processes and threads there may be."""
    limits = machine.limits()
    files = limits["open_files"]
    if files is not None and files < _FILES:
        yield Finding(
            "open files",
            "wrong" if files < _FEW_FILES else "note",
            f"a process may open {files} files; a worker needs about twenty, and one for each peer",
            "ulimit -n 4096, or LimitNOFILE=4096 in a systemd unit",
        )
    else:
        yield Finding("open files", "good", f"up to {files or 'any number'} in each process")
    counts = [count for count in (limits["processes"], machine.process_limit()) if count is not None]
    if counts and min(counts) < _FEW_PROCESSES:
        yield Finding(
            "processes",
            "note",
            f"there may be {min(counts)} processes and threads; each worker has five threads or more",
            "ulimit -u 4096, or --pids-limit 4096 for a container",
        )
    else:
        yield Finding("processes", "good", f"up to {min(counts) if counts else 'any number'}, threads included")


def check_gpus() -> Iterator[Finding]:
    """GPUs that the driver shows, and whether this torch can use them."""
    found, facts = machine.gpus(), machine.torch_facts()
    if found and not (facts.get("cuda") or facts.get("hip")):
        yield Finding(
            "GPUs",
            "note",
            f"{len(found)} ({found[0]}), but this torch is built without CUDA",
            "install a torch that is built for CUDA: https://pytorch.org/get-started",
        )
    elif found:
        yield Finding("GPUs", "good", f"{len(found)} ({found[0]}), and torch for CUDA {facts.get('cuda')}")
    else:
        yield Finding("GPUs", "good", "none on this host; tensors stay on the CPU")
