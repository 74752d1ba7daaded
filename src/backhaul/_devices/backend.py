"""What Backhaul needs of a device: the interfaces that ``cuda`` implements, and that tests fake with CPU memory.

Nothing else in ``_devices`` calls CUDA, so tests can have streams that find a missing wait. Only interfaces are here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from backhaul._devices.flag_reaper import Span
from backhaul._transport.shm.segments import Mapping
from backhaul._wire.device_link import Form

Key = tuple[int, int]
"""Names a stream: its device and a number."""

HANDLE_BYTES = 64
"""Size of the handle by which another process opens device memory."""


class DeviceEvent(Protocol):
    """A point on a stream, for which any stream may wait."""

    def query(self) -> bool:
        """Whether the stream has passed it. True also if it was never recorded."""


class OwnEvent(DeviceEvent, Protocol):
    """An event of this process. After the first record, only streams of the same device may record it."""

    def synchronize(self) -> None:
        """Block the host until the stream has passed it."""


class Stream(Protocol):
    """A queue of work on one device. The work is done in order."""

    @property
    def key(self) -> Key:
        """Its name."""

    def query(self) -> bool:
        """Whether it is idle."""


class StreamBackend(Protocol):
    """Streams and events. All calls are cheap; they raise ``RuntimeError`` where a device has failed."""

    def devices(self) -> Sequence[int]:
        """The devices that this process has used."""

    def current(self, device: int) -> Stream:
        """The calling thread's stream."""

    def default(self, device: int) -> Stream:
        """The stream that threads begin with."""

    def fresh(self, device: int) -> Stream:
        """A stream of the pool."""

    def use(self, stream: Stream) -> None:
        """Make it the calling thread's stream. The thread's current device stays the same."""

    def lasting(self, stream: Stream) -> bool:
        """Whether the stream lives as long as the process."""

    def event(self, device: int) -> OwnEvent:
        """A new event."""

    def record(self, event: DeviceEvent, stream: Stream) -> None:
        """Put the event at the end of the stream's queue."""

    def wait(self, stream: Stream, event: DeviceEvent) -> None:
        """Work that is queued on the stream from now on starts after the event."""

    def adopt(self, tensor: torch.Tensor, stream: Stream) -> None:
        """The tensor's memory is used on the stream: the allocator must not reuse it before that is done."""

    def relax(self) -> bool:
        """From now on the calling thread does not disturb other threads that capture a CUDA graph. False: CUDA has not
        been started, so there are no graphs, and the caller asks again later.
        """

    def capturing(self) -> bool:
        """Whether the calling thread captures a CUDA graph: then its streams are left alone."""


class Memory(Protocol):
    """Device memory, and host memory that devices can copy to and from."""

    def empty(self, device: int, nbytes: int) -> torch.Tensor:
        """Bytes on a device."""

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Host memory that a device copies to and from without blocking the host."""

    def copy(self, to: torch.Tensor, flat: torch.Tensor) -> None:
        """Copy bytes, on the current streams."""

    def total(self, device: int) -> int:
        """How many bytes a device has."""


class Flag(DeviceEvent, Protocol):
    """An event that two processes see. One of them records it, repeatedly, but never before it was passed."""

    def force(self) -> None:
        """Count it as passed, because the process that records it has ended."""


class MemoryBlock(Protocol):
    """Contiguous memory that is freed when nothing refers to this object any more."""

    @property
    def address(self) -> int:
        """Its address for devices."""


class Ipc(Protocol):
    """Memory and flags that other processes can open. All calls raise ``RuntimeError`` where that is impossible."""

    def allocate(self, device: int, nbytes: int) -> MemoryBlock:
        """Memory of a device."""

    def export(self, memory: Any) -> bytes:
        """The handle by which others open memory that ``allocate`` has made."""

    def open(self, handle: bytes, device: int, nbytes: int) -> MemoryBlock:
        """Memory of another process."""

    def pin(self, mapping: Mapping, device: int) -> MemoryBlock:
        """Make mapped host memory accessible to devices."""

    def flag(self, pinned: Any, offset: int) -> Flag:
        """The flag at an offset of pinned memory."""

    def view(self, memory: Any, offset: int, nbytes: int, device: int, form: Form) -> tuple[torch.Tensor, object]:
        """A part of the memory as a device's tensor with a storage of its own, and an object that dies with the
        storage.
        """

    def copy(self, memory: Any, offset: int, stretch: tuple[int, int], device: int) -> None:
        """Copy bytes (an address and a count) to an offset of the memory, on the calling thread's stream of
        ``device``.
        """

    def on_host(self, address: int, nbytes: int) -> int:
        """The host address of bytes of a device that lie in pinned memory; else 0."""

    def copy_on_host(self, pinned: Any, offset: int, source: int, nbytes: int) -> None:
        """Copy bytes from a host address to an offset of pinned memory, at once."""

    def watch(self, file: int, process: int, span: Span) -> object:
        """Set the flags of a process when it has ended, even if no thread of this process can run. Lasts as long as the
        object that is returned.
        """
