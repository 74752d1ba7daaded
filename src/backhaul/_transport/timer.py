"""A timer that an epoll set can wait for (timerfd), which Python offers from 3.13 on."""

from __future__ import annotations

import ctypes
import os

_libc = ctypes.CDLL(None, use_errno=True)
_CLOCK_MONOTONIC = 1
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC


class _Spec(ctypes.Structure):
    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("s", ctypes.c_long),
        ("ns", ctypes.c_long),
    )


class Timer:
    """Its descriptor becomes readable once, some time after ``start``. Starting again begins anew."""

    def __init__(self) -> None:
        self.fd = _libc.timerfd_create(_CLOCK_MONOTONIC, _FLAGS)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "no timer to be had")
        self._specs: dict[float, object] = {}

    def start(self, seconds: float) -> None:
        """Go off in so many seconds."""
        spec = self._specs.get(seconds)
        if spec is None:
            spec = self._specs[seconds] = ctypes.byref(_Spec(0, 0, int(seconds), int(seconds % 1 * 1e9)))
        _libc.timerfd_settime(self.fd, 0, spec, None)

    def close(self) -> None:
        """Free the descriptor."""
        os.close(self.fd)
