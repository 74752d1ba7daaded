"""torch.cuda as ``streams`` wants it. Imported where there is CUDA."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from backhaul.cuda.ipc import HostFlag
from backhaul.cuda.library import Library
from backhaul.cuda.streams import Key

_raw_current: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_has_context: Any = getattr(torch._C, "_cuda_hasPrimaryContext", None)
_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
_set_stream: Any = getattr(torch._C, "_cuda_setStream", None)


def available() -> bool:
    """Whether this process can use CUDA at all. Makes no context."""
    return _raw_current is not None and torch.cuda.is_available()


def identities() -> tuple[str, ...]:
    """What the visible devices are, by index: equal in all processes of a host for the same piece of hardware."""
    if not available() or torch.cuda._is_in_bad_fork():
        return ()
    found = ((index, torch.cuda.get_device_properties(index)) for index in range(torch.cuda.device_count()))
    return tuple(str(getattr(properties, "uuid", "")) or f"?{os.getpid()}:{index}" for index, properties in found)


class Lane:
    """A ``streams.Stream``: torch's, with what is asked of it all the time."""

    __slots__ = ("cuda_stream", "device_index", "key", "query", "stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self.query: Callable[[], bool] = stream.query
        self.device_index: int = stream.device_index
        self.cuda_stream: int = stream.cuda_stream
        self.key = self.device_index, self.cuda_stream


class Driver:
    """A ``streams.Backend``. Thread-safe."""

    def __init__(self) -> None:
        self._count = torch.cuda.device_count()
        self._used: list[int] = []
        self._lanes: dict[Key, Lane] = {}  # they are few, and never end
        self._defaults: dict[int, Lane] = {}
        self._library: Library | None
        try:
            self._library = Library()
        except (OSError, AttributeError):  # not NVIDIA's
            self._library = None

    def devices(self) -> Sequence[int]:
        used = self._used
        if len(used) < self._count and torch.cuda.is_initialized():
            # One that has no context has nothing to wait for, and asking for its streams would make one.
            found = [device for device in range(self._count) if _has_context is None or _has_context(device)]
            if len(found) > len(used):
                self._used = used = found
        return used

    def current(self, device: int) -> Lane:
        lane = self._lanes.get((device, _raw_current(device)))
        if lane is None:
            lane = Lane(torch.cuda.current_stream(device))
            if self.lasting(lane):  # else its address may be another's later
                lane = self._lanes.setdefault(lane.key, lane)
        return lane

    def default(self, device: int) -> Lane:
        lane = self._defaults.get(device)
        if lane is None:
            lane = Lane(torch.cuda.default_stream(device))
            lane = self._defaults.setdefault(device, self._lanes.setdefault(lane.key, lane))
        return lane

    def fresh(self, device: int) -> Lane:
        lane = Lane(torch.cuda.Stream(device))
        return self._lanes.setdefault(lane.key, lane)

    def use(self, stream: Any) -> None:
        before, own = torch.cuda.current_device(), stream.stream
        _set_stream(stream_id=own.stream_id, device_index=own.device_index, device_type=own.device_type)
        if before != stream.device_index:
            torch.cuda.set_device(before)

    def lasting(self, stream: Any) -> bool:
        # The default stream and torch's own, which have odd ids, are never destroyed; one from elsewhere may be.
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

    def relax(self) -> None:
        if self._library is not None:
            self._library.relax()

    def capturing(self) -> bool:
        return bool(self._used) and bool(_capturing())
