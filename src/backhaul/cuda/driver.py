"""torch.cuda as ``streams`` wants it. Imported where there is CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from backhaul.cuda.library import Library
from backhaul.cuda.streams import Key

_raw_current: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_has_context: Any = getattr(torch._C, "_cuda_hasPrimaryContext", None)
_set_stream: Any = getattr(torch._C, "_cuda_setStream", None)


def available() -> bool:
    """Whether this process can use CUDA at all. Makes no context."""
    return _raw_current is not None and torch.cuda.is_available()


def identities() -> tuple[str, ...]:
    """What the visible devices are, by index: equal in all processes of a host for the same piece of hardware."""
    if not available():
        return ()
    found = (torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count()))
    return tuple(str(getattr(properties, "uuid", "")) or f"?{properties.name}" for properties in found)


class Driver:
    """A ``streams.Backend``. Thread-safe."""

    def __init__(self) -> None:
        self._count = torch.cuda.device_count()
        self._used: list[int] = []
        self._streams: dict[Key, torch.cuda.Stream] = {}  # by device and address; they are few, and never end
        self._defaults: dict[int, torch.cuda.Stream] = {}
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

    def current(self, device: int) -> torch.cuda.Stream:
        address = _raw_current(device)
        stream = self._streams.get((device, address))
        if stream is None:
            stream = torch.cuda.current_stream(device)
            if not self.lasting(stream):
                return stream  # its address may be another's later
            stream = self._streams.setdefault((device, address), stream)
        return stream

    def default(self, device: int) -> torch.cuda.Stream:
        stream = self._defaults.get(device)
        if stream is None:
            stream = torch.cuda.default_stream(device)
            stream = self._defaults.setdefault(device, self._streams.setdefault((device, stream.cuda_stream), stream))
        return stream

    def fresh(self, device: int) -> torch.cuda.Stream:
        stream = torch.cuda.Stream(device)
        return self._streams.setdefault((device, stream.cuda_stream), stream)

    def use(self, stream: Any) -> None:
        before = torch.cuda.current_device()
        _set_stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)
        if before != stream.device_index:
            torch.cuda.set_device(before)

    def key(self, stream: Any) -> Key:
        return stream.device_index, stream.cuda_stream

    def lasting(self, stream: Any) -> bool:
        # The default stream and torch's own, which have odd ids, are never destroyed; one from elsewhere may be.
        number: int = stream.stream_id
        return number == 0 or number & 1 == 1

    def event(self, device: int) -> torch.cuda.Event:
        return torch.cuda.Event()

    def record(self, event: Any, stream: Any) -> None:
        event.record(stream)

    def wait(self, stream: Any, event: Any) -> None:
        event.wait(stream)

    def relax(self) -> None:
        if self._library is not None:
            self._library.relax()

    def capturing(self) -> bool:
        return bool(self._used) and torch.cuda.is_current_stream_capturing()
