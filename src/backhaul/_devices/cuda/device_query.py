"""Asks NVIDIA's driver which devices there are. Run as a program it prints them, one per line. So a process can find
its devices without starting CUDA itself: once CUDA is started, forked processes cannot use it.

Imports the standard library only, because the program starts without any other.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import uuid
from typing import Any

_QUERY_SECONDS = 60.0  # limit; the driver takes a second or two to start where there are many devices


def has_driver() -> bool:
    """Whether a driver is installed, which may not work. Starts nothing."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def identities_elsewhere() -> tuple[str, ...]:
    """The identities of the visible devices, by index, found by another process. Raises ``OSError`` if that fails."""
    if not sys.executable:
        raise OSError("sys.executable is empty, so no Python process can be started")
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_QUERY_SECONDS,
            check=True,
        )
    except subprocess.SubprocessError as error:
        raise OSError(f"the process that asks for CUDA devices failed: {error}") from error
    return tuple(done.stdout.split())


def identities_here() -> tuple[str, ...]:
    """The identities of the visible devices, by index, found by this process. Starts CUDA."""
    cuda = ctypes.CDLL("libcuda.so.1")
    code = cuda.cuInit(0)
    if code:  # the driver does not work, and torch would find nothing either
        return ()
    count = ctypes.c_int()
    _check(cuda.cuDeviceGetCount(ctypes.byref(count)))
    return tuple(_identity(cuda, index) for index in range(count.value))


def _identity(cuda: Any, index: int) -> str:
    device, found = ctypes.c_int(), ctypes.create_string_buffer(16)
    _check(cuda.cuDeviceGet(ctypes.byref(device), index))
    try:
        get_uuid = cuda.cuDeviceGetUuid_v2  # tells partitions of one device apart
    except AttributeError:
        get_uuid = cuda.cuDeviceGetUuid
    _check(get_uuid(found, device))
    return str(uuid.UUID(bytes=found.raw))


def _check(code: int) -> None:
    if code:
        raise OSError(f"CUDA error {code}")


if __name__ == "__main__":
    print(*identities_here(), sep="\n", flush=True)
    os._exit(0)  # the driver would take long to shut down
