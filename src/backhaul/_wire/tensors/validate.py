"""Checks that a part of a received table fits the memory that it names. Pure: it makes no tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from backhaul._wire.device_link import is_device
from backhaul._wire.memory import Buffer
from backhaul._wire.tensors.dtypes import DTYPES, QUANTIZED
from backhaul._wire.tensors.specs import MAX_SPREAD, Part
from backhaul.errors import ProtocolError


def needed_bytes(part: Part) -> int:
    """How many bytes of its buffer or slot a part needs. Raises ``ProtocolError`` as ``check_part``, except for what
    concerns the buffer.
    """
    dtype = _check_fields(part)
    return _reach(part, math.prod(part.shape)) * dtype.itemsize


def check_part(part: Part, buffers: Sequence[Buffer]) -> int:
    """Return how many bytes of its buffer or slot a part needs.

    Raises:
        ProtocolError: The part reaches beyond its buffer, or its fields contradict each other.
    """
    dtype = _check_fields(part)
    elements = math.prod(part.shape)
    if part.spread is not None:
        _check_spread(part, elements)
    if part.buffer == -1 and part.slot is None:
        if elements and part.device != "meta":
            raise ProtocolError(f"{part} has elements but no memory")
        if part.stride is None or part.offset:
            raise ProtocolError(f"{part} has no memory, so it must have a stride and no offset")
        return 0
    if part.device == "meta" or not elements:
        raise ProtocolError(f"{part} names a buffer or a slot, but it has no elements or is on the meta device")
    return _check_memory(part, elements, dtype.itemsize, buffers)


def _check_fields(part: Part) -> torch.dtype:
    dtype = DTYPES.get(part.dtype)
    if dtype is None or dtype in QUANTIZED or not (part.device in ("", "meta") or is_device(part.device)):
        raise ProtocolError(f"{part} has a dtype or a device that this worker does not accept")
    if part.stride is not None and len(part.stride) != len(part.shape):
        raise ProtocolError(f"shape and stride of {part} do not match")
    numbers = (*part.shape, *(part.stride or ()), part.offset, *(part.slot or ()))
    if min(numbers) < 0 or max(numbers) >= 1 << 62:
        raise ProtocolError(f"{part} has a negative or too large size, stride or offset")
    return dtype


def _check_memory(part: Part, elements: int, itemsize: int, buffers: Sequence[Buffer]) -> int:
    if part.stride is None and part.offset:
        raise ProtocolError(f"{part} is contiguous, so its offset must be 0")
    reach = _reach(part, elements) * itemsize
    if part.slot is not None:
        if part.buffer != -1 or not part.device:
            raise ProtocolError(f"{part} is in a slot, so it must have a device and no buffer")
        return reach
    if not 0 <= part.buffer < len(buffers):
        raise ProtocolError(f"{part} names a buffer that the message does not have ({len(buffers)} buffers)")
    size = memoryview(buffers[part.buffer]).nbytes
    if reach > size or (part.stride is None and reach != size):
        raise ProtocolError(f"{part} needs {reach} bytes, but its buffer has {size}")
    return reach


def _reach(part: Part, elements: int) -> int:
    """How many elements of its memory a part spans."""
    if part.stride is None:
        return elements
    return part.offset + 1 + sum((n - 1) * s for n, s in zip(part.shape, part.stride, strict=True))


def _check_spread(part: Part, elements: int) -> None:
    spread = part.spread or ()
    reach = 1 + sum((n - 1) * s for n, s in zip(part.shape, spread, strict=False))
    if len(spread) != len(part.shape) or part.stride is not None or min(spread, default=0) < 0:
        raise ProtocolError(f"{part} has a stride, or strides in spread that do not match its shape")
    if part.buffer < 0 and part.slot is None:
        raise ProtocolError(f"{part} has a spread but no memory")
    if reach > MAX_SPREAD * elements:
        raise ProtocolError(
            f"{part} would take memory for {reach} elements to hold {elements}; at most {MAX_SPREAD} times are allowed"
        )
