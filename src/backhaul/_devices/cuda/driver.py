"""Streams and events: ``backend.StreamBackend`` by torch.cuda. Imported only where there is CUDA."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from backhaul._devices.backend import Key
from backhaul._devices.cuda import device_query
from backhaul._devices.cuda.ipc import HostFlag
from backhaul._devices.cuda.library import Library

log = logging.getLogger("backhaul")

_VISIBLE = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
"""Environment variables that select the devices that a process sees, and their order."""

_raw_current: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_has_context: Any = getattr(torch._C, "_cuda_hasPrimaryContext", None)
_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
_set_stream: Any = getattr(torch._C, "_cuda_setStream", None)


def available() -> bool:
    """Whether this process can use CUDA at all. May start CUDA, but creates no context."""
    return _raw_current is not None and torch.cuda.is_available()


def identities() -> tuple[str, ...]:
    """The identities of the visible devices, by index: equal in all processes of a host for the same hardware. Does not
    start CUDA where another process can be asked.
    """
    if _raw_current is None or torch.cuda._is_in_bad_fork():
        return ()
    if torch.version.hip is not None:  # not NVIDIA's driver
        return _identities_by_torch()
    if torch.cuda.is_initialized():
        return device_query.identities_here()
    return _identities_by_query(*map(os.environ.get, _VISIBLE))


@functools.cache
def _identities_by_query(visible: str | None, *rest: str | None) -> tuple[str, ...]:
    """The identities that another process finds, with these values of ``_VISIBLE``."""
    if visible == "" or not device_query.has_driver():
        return ()
    try:
        return device_query.identities_elsewhere()
    except OSError as error:
        log.debug("starting CUDA in this process to find its devices: %s", error)
        return _identities_by_torch()


def verify(expected: Sequence[str]) -> None:
    """Start CUDA. Raises ``RuntimeError`` if its devices are not those that this worker has announced to others."""
    torch.cuda.init()
    found = identities()
    if found != tuple(expected):
        raise RuntimeError(
            f"the CUDA devices of this process are {', '.join(found) or 'none'}, but they were "
            f"{', '.join(expected)} when the worker started; set CUDA_VISIBLE_DEVICES before bh.init, and do not "
            "change it later"
        )


def _identities_by_torch() -> tuple[str, ...]:
    """The identities that torch finds. Starts CUDA."""
    if not available():
        return ()
    found = ((index, torch.cuda.get_device_properties(index)) for index in range(torch.cuda.device_count()))
    return tuple(str(getattr(properties, "uuid", "")) or f"?{os.getpid()}:{index}" for index, properties in found)


class CudaStream:
    """A ``backend.Stream``: torch's stream, with the attributes cached that are needed all the time."""

    __slots__ = ("cuda_stream", "device_index", "key", "query", "stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self.query: Callable[[], bool] = stream.query
        self.device_index: int = stream.device_index
        self.cuda_stream: int = stream.cuda_stream
        self.key = self.device_index, self.cuda_stream


class Driver:
    """A ``backend.StreamBackend``. Thread-safe. Does not start CUDA before it is asked for a stream.

    Args:
        count: How many devices there are.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._used: list[int] = []
        self._streams: dict[Key, CudaStream] = {}  # few, and they live as long as the process
        self._defaults: dict[int, CudaStream] = {}
        self._library: Library | None
        try:
            self._library = Library(count)
        except (OSError, AttributeError):  # not NVIDIA's
            self._library = None

    def devices(self) -> Sequence[int]:
        used = self._used
        if len(used) < self._count and torch.cuda.is_initialized():
            # A device without a context has nothing to wait for, and to ask for its streams would create a context.
            seen = range(min(self._count, torch.cuda.device_count()))
            found = [device for device in seen if _has_context is None or _has_context(device)]
            if len(found) > len(used):
                self._used = used = found
        return used

    def current(self, device: int) -> CudaStream:
        found = self._streams.get((device, _raw_current(device)))
        if found is None:
            found = CudaStream(torch.cuda.current_stream(device))
            if self.lasting(found):  # else another stream may get its address later
                found = self._streams.setdefault(found.key, found)
        return found

    def default(self, device: int) -> CudaStream:
        found = self._defaults.get(device)
        if found is None:
            found = CudaStream(torch.cuda.default_stream(device))
            found = self._defaults.setdefault(device, self._streams.setdefault(found.key, found))
        return found

    def fresh(self, device: int) -> CudaStream:
        found = CudaStream(torch.cuda.Stream(device))
        return self._streams.setdefault(found.key, found)

    def use(self, stream: Any) -> None:
        before, own = torch.cuda.current_device(), stream.stream
        _set_stream(stream_id=own.stream_id, device_index=own.device_index, device_type=own.device_type)
        if before != stream.device_index:
            torch.cuda.set_device(before)

    def lasting(self, stream: Any) -> bool:
        # The default stream and torch's own streams, which have odd ids, are never destroyed; others may be.
        number: int = stream.stream.stream_id
        return number == 0 or number & 1 == 1

    def event(self, device: int) -> torch.cuda.Event:
        return torch.cuda.Event()

    def record(self, event: Any, stream: Any) -> None:
        event.record(stream if type(event) is HostFlag else stream.stream)

    def wait(self, stream: Any, event: Any) -> None:
        event.wait(stream if type(event) is HostFlag else stream.stream)

    def adopt(self, tensor: torch.Tensor, stream: Any) -> None:
        tensor.record_stream(stream.stream)

    def relax(self) -> bool:
        if not torch.cuda.is_initialized():
            return False
        if self._library is not None:
            self._library.relax()
        return True

    def capturing(self) -> bool:
        return bool(self._used) and bool(_capturing())
