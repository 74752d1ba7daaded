"""Asks NVIDIA's driver which devices there are. Run as a program it prints them, one in a line, so that a process can
learn of them without starting CUDA itself: once CUDA is started, processes that are forked cannot use it.

Needs nothing but the standard library: the program starts without any other.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import uuid
from typing import Any

_PATIENCE = 60.0  # seconds; to start the driver takes a second or two where there are many devices


def is_there() -> bool:
    """Whether there is a driver, which need not be in order. Starts nothing."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def ask() -> tuple[str, ...]:
    """What the visible devices are, by index, as another process says. Raises ``OSError`` if it does not."""
    if not sys.executable:
        raise OSError("there is no interpreter to start")
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=True,
        )
    except subprocess.SubprocessError as error:
        raise OSError(f"the process that asks for CUDA devices failed: {error}") from error
    return tuple(done.stdout.split())


def look() -> tuple[str, ...]:
    """The same, as this process sees it. Starts CUDA."""
    cuda = ctypes.CDLL("libcuda.so.1")
    code = cuda.cuInit(0)
    if code:  # it is not in order, and torch would find nothing either
        return ()
    count = ctypes.c_int()
    _check(cuda.cuDeviceGetCount(ctypes.byref(count)))
    return tuple(_identity(cuda, index) for index in range(count.value))


def _identity(cuda: Any, index: int) -> str:
    device, found = ctypes.c_int(), ctypes.create_string_buffer(16)
    _check(cuda.cuDeviceGet(ctypes.byref(device), index))
    try:
        ask = cuda.cuDeviceGetUuid_v2  # tells parts of one device apart
    except AttributeError:
        ask = cuda.cuDeviceGetUuid
    _check(ask(found, device))
    return str(uuid.UUID(bytes=found.raw))


def _check(code: int) -> None:
    if code:
        raise OSError(f"CUDA error {code}")


if __name__ == "__main__":
    print(*look(), sep="\n", flush=True)
    os._exit(0)  # the driver takes its time to end
