"""Where the memory of one message goes: which parts share memory, and which buffer or slot each part is sent in.

This module sees strided tensors only. It knows no spec of a logical tensor and no message.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from backhaul._wire.device_link import Lease, Link, Shipment, flat_bytes
from backhaul._wire.memory import Buffer
from backhaul._wire.tensors.dtypes import DTYPE_NAMES, NO_WARNING, UNCOPIED, silence_warnings
from backhaul._wire.tensors.specs import MAX_SPREAD, Part
from backhaul.errors import SerializationError

_PYBUF_READ = 0x100
_view_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_memory.restype = ctypes.py_object
_view_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


class OutgoingMemory:
    """The memory that one message sends: in buffers of the frame, or in slots of a link for tensors that it takes.

    Attributes:
        buffers: The buffers of the frame.
        keep: The tensors that own the memory.
    """

    __slots__ = ("_link", "_shipment", "buffers", "keep")

    def __init__(self, link: Link | None) -> None:
        self.buffers: list[Buffer] = []
        self.keep: list[torch.Tensor] = []
        self._link = link
        self._shipment: Shipment | None = None

    def target_device(self, tensor: torch.Tensor) -> str | None:
        """The device of the receiver on which ``tensor`` arrives; None if the link does not take the tensor."""
        link, device = self._link, tensor.device
        return link.name(device) if link is not None and link.takes(device) else None

    def put(self, tensor: torch.Tensor, start: int, nbytes: int) -> tuple[int, str, tuple[int, int] | None]:
        """Add ``nbytes`` of the storage of ``tensor``, from byte ``start``. Returns the buffer, device and slot."""
        device = self.target_device(tensor)
        if device is None:
            self.buffers.append(_memory_at(tensor, start - _start(tensor), nbytes))
            return len(self.buffers) - 1, "", None
        if self._shipment is None:
            assert self._link is not None
            self._shipment = Shipment(self._link)
        buffer, slot = self._shipment.put(flat_bytes(tensor, start, nbytes), device, self.buffers)
        return buffer, device, slot

    def finish(self) -> Lease | None:
        """Complete all copies. Returns the slots that the message takes, if any."""
        if self._shipment is None:
            return None
        self._shipment.finish(self.buffers, self.keep)
        return self._shipment.lease if self._shipment.lease.slots else None

    def drop(self) -> None:
        """Give the slots back, because the message is not sent."""
        if self._shipment is not None:
            self._shipment.lease.end()


def find_shared_memory(parts: Sequence[torch.Tensor]) -> list[list[int]]:
    """Sort the indices of the parts into clusters whose memory overlaps."""
    if len(parts) == 1:
        return [[0]]
    alone: list[list[int]] = []
    by_storage: dict[int, list[int]] = {}
    for index, part in enumerate(parts):
        if part.numel() == 0 or part.device.type == "meta":
            alone.append([index])
        else:
            by_storage.setdefault(part.untyped_storage().data_ptr(), []).append(index)
    clusters = alone
    for indices in by_storage.values():
        if _interleaved([parts[i] for i in indices]):
            clusters.extend([i] for i in indices)
            continue
        spans = sorted((_start(parts[i]), i) for i in indices)
        reach: int = -1
        for start, index in spans:
            if start >= reach:
                clusters.append([])
            clusters[-1].append(index)
            reach = max(reach, start + _span(parts[index]) * parts[index].itemsize)
    return clusters


def _interleaved(parts: Sequence[torch.Tensor]) -> bool:
    """Whether parts of one storage alternate in memory without sharing an element, as columns of a matrix do."""
    first = min(map(_start, parts))
    last = max(_start(part) + _span(part) * part.itemsize for part in parts)
    used = sum(part.numel() * part.itemsize for part in parts)
    if len(parts) == 1 or last - first <= 2 * used or len({part.itemsize for part in parts}) > 1:
        return False
    places = [torch.arange(_span(part)).as_strided(part.shape, part.stride()).flatten() for part in parts]
    found = torch.cat([place + int(part.storage_offset()) for place, part in zip(places, parts, strict=True)])
    return bool(found.unique().numel() == found.numel())


def _start(tensor: torch.Tensor) -> int:
    """Where in its storage a tensor begins, in bytes."""
    return int(tensor.storage_offset()) * tensor.itemsize


def _span(tensor: torch.Tensor) -> int:
    """How many elements lie between a non-empty tensor's first and last, both included."""
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def place_alone(tensor: torch.Tensor, memory: OutgoingMemory) -> Part:
    """Add a part that shares memory with no other part."""
    dtype, shape = DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)
    if tensor.device.type == "meta":
        return Part(-1, dtype, shape, tensor.stride(), 0, "meta")
    if tensor.numel() == 0:
        return Part(-1, dtype, shape, tensor.stride(), 0, memory.target_device(tensor) or "")
    stride = spread = None
    elements = tensor.numel()
    if not tensor.is_contiguous():
        if tensor.dtype not in NO_WARNING:
            silence_warnings()
        if (span := _span(tensor)) > elements:  # the tensor has gaps: send its elements only
            if span <= MAX_SPREAD * elements and tensor.dtype not in UNCOPIED and _disjoint(tensor):
                spread = tensor.stride()
            tensor = _compact(tensor)
        if spread is not None:
            tensor = tensor.contiguous()
        else:
            elements = _span(tensor)  # fewer if the tensor is expanded
            stride = tensor.stride()
    buffer, device, slot = memory.put(tensor, _start(tensor), elements * tensor.itemsize)
    memory.keep.append(tensor)
    return Part(buffer, dtype, shape, stride, 0, device, spread, slot)


def _disjoint(tensor: torch.Tensor) -> bool:
    """Whether the strides rule out that two elements share memory."""
    reach = 1
    for stride, count in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if count > 1:
            if stride < reach:
                return False
            reach += (count - 1) * stride
    return True


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype in UNCOPIED:
        return tensor.view(torch.uint8).clone(memory_format=torch.preserve_format).view(tensor.dtype)
    return tensor.clone(memory_format=torch.preserve_format)


def place_together(
    parts: Sequence[torch.Tensor],
    cluster: list[int],
    placed: list[Part | None],
    memory: OutgoingMemory,
) -> None:
    """Add the memory that a cluster of parts covers once. Every part of the cluster becomes a view of it."""
    align = max(parts[i].itemsize for i in cluster)
    starts = {i: _start(parts[i]) for i in cluster}
    first = min(starts.values()) // align * align
    last = max(starts[i] + _span(parts[i]) * parts[i].itemsize for i in cluster)
    buffer, device, slot = memory.put(parts[cluster[0]], first, last - first)
    for index in cluster:
        part = parts[index]
        memory.keep.append(part)
        offset = (starts[index] - first) // part.itemsize
        dtype = DTYPE_NAMES[part.dtype]
        placed[index] = Part(buffer, dtype, tuple(part.shape), part.stride(), offset, device, None, slot)


def _memory_at(tensor: torch.Tensor, offset: int, nbytes: int) -> memoryview:
    """A view of ``nbytes`` of memory that begins ``offset`` bytes after the start of the tensor."""
    try:
        address = tensor.data_ptr()
    except RuntimeError as error:  # fake tensors, functorch wrappers
        raise SerializationError(
            f"a {type(tensor).__name__} has no memory to send, because it is fake or belongs to a torch.func transform "
            f"such as grad or vmap; inside a transform, call the function with backhaul.remote_op ({error})"
        ) from error
    if not address:
        raise SerializationError("the tensor's storage was freed, so it has no memory to send; send it before that")
    view: memoryview = _view_memory(address + offset, nbytes, _PYBUF_READ)
    return view
