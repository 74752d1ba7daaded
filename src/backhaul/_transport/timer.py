"""A timer that an epoll set can wait for (timerfd). Python has its own from version 3.13 on."""

from __future__ import annotations

import ctypes
import os
import threading

_libc = ctypes.CDLL(None, use_errno=True)
_libc_with_interpreter = ctypes.PyDLL(None)  # does not release the interpreter, for calls that never block
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
    """Its descriptor becomes readable once, some time after ``start``. Thread-safe."""

    def __init__(self) -> None:
        self.fd = _libc.timerfd_create(_CLOCK_MONOTONIC, _FLAGS)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "cannot create a timer (timerfd_create failed)")
        self._specs: dict[float, object] = {}
        self._lock = threading.Lock()  # guards the descriptor: a thread may call ``start`` after ``close``
        self._closed = False

    def start(self, seconds: float) -> None:
        """Expire in so many seconds. A timer that runs already starts again. Does nothing after ``close``."""
        spec = self._specs.get(seconds)
        if spec is None:
            spec = self._specs[seconds] = ctypes.byref(_Spec(0, 0, int(seconds), int(seconds % 1 * 1e9)))
        with self._lock:
            if not self._closed:
                _libc_with_interpreter.timerfd_settime(self.fd, 0, spec, None)

    def close(self) -> None:
        """Close the descriptor."""
        with self._lock:
            self._closed = True
            os.close(self.fd)

    def sever(self) -> None:
        """Close the descriptor of a copy in a forked process. Takes no lock: a thread of the parent may hold it."""
        self._lock = threading.Lock()
        self.close()
