"""CUDA's driver, for what torch does not offer: memory and flags that two processes share.

Imported only where there is CUDA.

torch could share tensors and events between processes. But its shared tensors tie memory to files that count references
and that remain when a process is killed; and the driver's events between processes leave a file in ``/dev/shm`` even
when all goes well. A number in host memory that one stream writes and another waits for needs no file. The host can
read it without the driver, and any process can set it when it finds that the writer has ended.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import torch

_HANDLE = 64  # bytes
_OUT_OF_MEMORY = 2
_PORTABLE_AND_MAPPED = 1 | 2
_WITH_PEERS = 1
_THREAD_LOCAL = 1


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * _HANDLE),)


_OUT = ctypes.POINTER(ctypes.c_uint64)
_TAKES: dict[str, tuple[Any, ...]] = {
    "cuCtxPopCurrent_v2": (ctypes.POINTER(ctypes.c_void_p),),
    "cuCtxPushCurrent_v2": (ctypes.c_void_p,),
    "cuCtxSetCurrent": (ctypes.c_void_p,),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_int),
    "cuIpcCloseMemHandle": (ctypes.c_uint64,),
    "cuIpcGetMemHandle": (ctypes.POINTER(_Handle), ctypes.c_uint64),
    "cuIpcOpenMemHandle_v2": (_OUT, _Handle, ctypes.c_uint),
    "cuMemAlloc_v2": (_OUT, ctypes.c_size_t),
    "cuMemFree_v2": (ctypes.c_uint64,),
    "cuMemGetAddressRange_v2": (_OUT, ctypes.POINTER(ctypes.c_size_t), ctypes.c_uint64),
    "cuMemHostGetDevicePointer_v2": (_OUT, ctypes.c_void_p, ctypes.c_uint),
    "cuMemHostRegister_v2": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint),
    "cuMemHostUnregister": (ctypes.c_void_p,),
    "cuMemcpyAsync": (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p),
    "cuStreamWaitValue32_v2": (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint),
    "cuStreamWriteValue32_v2": (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint),
    "cuThreadExchangeStreamCaptureMode": (ctypes.POINTER(ctypes.c_int),),
}


class _ThreadContext(threading.local):
    relaxed = False
    bound = False  # whether the context of the only device is current in this thread


class Library:
    """Functions of the driver. They raise ``RuntimeError`` with the driver's text. The first call starts CUDA.

    Args:
        count: How many devices there are.
    """

    def __init__(self, count: int) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        for name, takes in _TAKES.items():
            getattr(self._cuda, name).argtypes = takes
        self._alone = count == 1
        self._contexts: dict[int, int] = {}
        self._here = _ThreadContext()
        self._copy = self._cuda.cuMemcpyAsync
        self._write = self._cuda.cuStreamWriteValue32_v2
        self._wait = self._cuda.cuStreamWaitValue32_v2

    def copy(self, device: int, to: int, source: int, nbytes: int, stream: int) -> None:
        """Copy bytes from address to address, of the host or of devices, on a stream of ``device``."""
        self._on(device, self._copy, to, source, nbytes, stream)

    def write(self, device: int, address: int, value: int, stream: int) -> None:
        """Queue the write of a number on a stream, after all its earlier work is visible."""
        self._on(device, self._write, stream, address, value, 0)

    def wait(self, device: int, address: int, value: int, stream: int) -> None:
        """Queue a wait on a stream, until the number at ``address`` is no longer behind ``value``."""
        self._on(device, self._wait, stream, address, value, 0)

    def allocate(self, device: int, nbytes: int) -> int:
        """Allocate memory of a device. Raises ``torch.OutOfMemoryError``."""
        return self._out(device, self._cuda.cuMemAlloc_v2, nbytes)

    def free(self, device: int, address: int) -> None:
        """Free memory that ``allocate`` has made. Waits until the device has done all its work."""
        self._on(device, self._cuda.cuMemFree_v2, address)

    def handle(self, device: int, address: int) -> bytes:
        """The handle by which another process opens memory that ``allocate`` has made."""
        made = _Handle()
        self._on(device, self._cuda.cuIpcGetMemHandle, ctypes.byref(made), address)
        return bytes(made.bytes)

    def open(self, device: int, handle: bytes, nbytes: int) -> int:
        """Open memory of another process that has at least ``nbytes`` bytes."""
        address = self._out(device, self._cuda.cuIpcOpenMemHandle_v2, _Handle.from_buffer_copy(handle), _WITH_PEERS)
        size = ctypes.c_size_t()
        start = self._out(device, self._cuda.cuMemGetAddressRange_v2, ctypes.byref(size), address)
        if start != address or size.value < nbytes:
            self.close(device, address)
            raise RuntimeError(f"the peer offered {nbytes} bytes of device memory, and the handle has {size.value}")
        return address

    def close(self, device: int, address: int) -> None:
        """Close memory that ``open`` has opened."""
        self._on(device, self._cuda.cuIpcCloseMemHandle, address)

    def pin(self, device: int, address: int, nbytes: int) -> int:
        """Make host memory accessible to devices; return its address for them."""
        self._on(device, self._cuda.cuMemHostRegister_v2, address, nbytes, _PORTABLE_AND_MAPPED)
        try:
            return self._out(device, self._cuda.cuMemHostGetDevicePointer_v2, address, 0)
        except BaseException:
            self.unpin(device, address)
            raise

    def unpin(self, device: int, address: int) -> None:
        """Undo ``pin``."""
        self._on(device, self._cuda.cuMemHostUnregister, address)

    def relax(self) -> None:
        """From now on the calling thread does not disturb other threads that capture a CUDA graph."""
        torch.cuda.init()
        self._here.relaxed = True
        mode = ctypes.c_int(_THREAD_LOCAL)
        self._check(self._cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)))

    def _out(self, device: int, function: Any, *args: Any) -> int:
        made = ctypes.c_uint64()
        self._on(device, function, ctypes.byref(made), *args)
        return made.value

    def _on(self, device: int, function: Any, *args: Any) -> None:
        """Call a function in a device's context."""
        if not self._here.relaxed:
            self.relax()
        if self._alone:
            if not self._here.bound:
                self._check(self._cuda.cuCtxSetCurrent(self._context(device)))
                self._here.bound = True
            code = function(*args)
        else:
            self._check(self._cuda.cuCtxPushCurrent_v2(self._context(device)))
            try:
                code = function(*args)
            finally:
                self._cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
        if code:
            self._check(code)

    def _context(self, device: int) -> int:
        found = self._contexts.get(device)
        if found is None:
            made = ctypes.c_void_p()
            self._check(self._cuda.cuDevicePrimaryCtxRetain(ctypes.byref(made), device))
            found = self._contexts[device] = made.value or 0
        return found

    def _check(self, code: int) -> None:
        if not code:
            return
        text = ctypes.c_char_p()
        self._cuda.cuGetErrorString(code, ctypes.byref(text))
        message = f"CUDA error: {(text.value or b'unknown').decode()}"
        raise torch.OutOfMemoryError(message) if code == _OUT_OF_MEMORY else RuntimeError(message)
