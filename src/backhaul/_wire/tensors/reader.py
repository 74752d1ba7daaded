"""Specs and buffers -> tensors. The tensors live on the memory of the buffers; nothing is copied.

``read_tensors`` undoes what ``writer`` did. This module knows no autograd: it only sets ``requires_grad``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch

from backhaul._wire.device_link import Arrival, Form, Link, is_device
from backhaul._wire.memory import Buffer
from backhaul._wire.messages import Payload
from backhaul._wire.tensors.buffer_forms import restore
from backhaul._wire.tensors.dtypes import BUFFERED, DTYPES, NO_WARNING, silence_warnings
from backhaul._wire.tensors.specs import COMPRESSED, Part, TensorSpec, TensorTable, decode_record
from backhaul._wire.tensors.subclasses import TensorList
from backhaul._wire.tensors.validate import check_part, needed_bytes
from backhaul.errors import ProtocolError


def tensors_of(payload: Payload, buffers: Sequence[Buffer], link: Link | None = None) -> list[torch.Tensor]:
    """Build the tensors of a payload, in the order of ``Encoded.tensors``.

    The result is a ``TensorList`` if wrappers follow the tensors.
    """
    if payload.loose > 0:
        buffers = buffers[: len(buffers) - payload.loose]
    tensors = read_tensors(payload.tensors, buffers, link)
    return tensors if payload.wrapped <= 0 else TensorList(tensors, payload.wrapped)


def read_tensors(table: TensorTable, buffers: Sequence[Buffer], link: Link | None = None) -> list[torch.Tensor]:
    """Build the tensors of a message on the memory of ``buffers`` and of the slots of ``link``."""
    try:
        if not table.ordinary:
            return _read_table(table, buffers, link) if table.specs else []
        if table.lent:
            return _read_lent(table, link)
        tensors = []
        for record, buffer in zip(table.ordinary, buffers, strict=True):
            dtype, size, shape, stride, requires_grad, form = _decode_ordinary(record)
            if form:
                buffer = restore(buffer, form, dtype, size)  # noqa: PLW2901 (in its usual form from here on)
            if len(buffer) != size:
                raise ProtocolError(f"a tensor needs {size} bytes, but its buffer has {len(buffer)}")
            tensor = torch.frombuffer(buffer, dtype=dtype)
            if shape is not None:
                tensor = tensor.view(shape) if stride is None else tensor.as_strided(shape, stride)
            tensors.append(tensor.requires_grad_() if requires_grad else tensor)
        return tensors
    except ProtocolError:
        raise
    except Exception as error:
        raise ProtocolError(f"torch cannot build a tensor as described: {type(error).__name__}: {error}") from error


def _read_lent(table: TensorTable, link: Link | None) -> list[torch.Tensor]:
    if link is None:
        raise ProtocolError("a message has tensors in slots, but there is no link to its sender")
    tensors = []
    for record, (segment, index, device) in zip(table.ordinary, table.lent, strict=True):
        dtype, size, shape, stride, requires_grad, smaller = _decode_ordinary(record)
        if smaller:
            raise ProtocolError(f"a tensor in a slot is in the form {smaller!r}; slots hold tensors as they are")
        if not is_device(device):
            raise ProtocolError(f"a tensor in a slot is to arrive on {device!r}, which is not a device")
        if shape is None:
            shape = (size // dtype.itemsize,)
        form = Form(dtype, shape, _dense(shape) if stride is None else stride)
        tensor = link.borrow_whole((segment, index), size, link.device(device), form)
        tensors.append(tensor.requires_grad_() if requires_grad else tensor)
    return tensors


@functools.lru_cache(4096)
def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(torch.empty(shape, device="meta").stride())


@functools.lru_cache(4096)
def _decode_ordinary(
    record: bytes,
) -> tuple[torch.dtype, int, tuple[int, ...] | None, tuple[int, ...] | None, bool, str]:
    """Decode a record: dtype, size in bytes, shape unless flat, stride unless dense, whether to require grad, form."""
    read = decode_record(record)
    dtype, shape, grad = DTYPES.get(read.dtype), read.shape, read.requires_grad
    elements = math.prod(shape)
    if dtype not in BUFFERED or min(shape, default=1) < 1 or elements >= 1 << 59:
        raise ProtocolError(f"{read} has a dtype or a shape that an ordinary tensor cannot have")
    if grad and not dtype.is_floating_point:
        raise ProtocolError(f"{read} cannot require grad: its dtype is not a floating-point type")
    if read.expanded:
        return dtype, dtype.itemsize, shape, (0,) * len(shape), grad, read.form
    return dtype, elements * dtype.itemsize, None if len(shape) == 1 else shape, None, grad, read.form


def _read_table(table: TensorTable, buffers: Sequence[Buffer], link: Link | None) -> list[torch.Tensor]:
    if any(part.form for part in table.parts):
        buffers = _restore(table.parts, buffers)
    uses = [0] * len(buffers)
    arrival = None if link is None else Arrival(link)
    for part in table.parts:
        reach = check_part(part, buffers)
        if part.buffer >= 0:
            uses[part.buffer] += 1
        if part.device and part.device != "meta":
            if arrival is None:
                raise ProtocolError(f"{part} is on a device, but there is no link to its sender")
            if reach:
                arrival.announce(part.slot or part.buffer, reach, part.device)
    bases: dict[int, torch.Tensor] = {}
    parts = [_read_part(part, buffers, uses, bases, arrival) for part in table.parts]
    return [_read_spec(spec, parts) for spec in table.specs]


def _restore(parts: Sequence[Part], buffers: Sequence[Buffer]) -> list[Buffer]:
    """The buffers in their usual form."""
    found = list(buffers)
    of_buffers: dict[int, list[Part]] = {}
    for part in parts:
        of_buffers.setdefault(part.buffer, []).append(part)
    for index, own in of_buffers.items():
        form, dtype = own[0].form, DTYPES.get(own[0].dtype)
        if any(part.form != form for part in own):
            raise ProtocolError(f"{own[0]} and others on its buffer name different forms")
        if form:
            nbytes = max(map(needed_bytes, own))
            alone = 0 <= index < len(found) and nbytes > 0 and all(part.dtype == own[0].dtype for part in own)
            if not alone or dtype is None:
                raise ProtocolError(f"{own[0]} is in the form {form!r}, but not in a buffer with its dtype alone")
            found[index] = restore(found[index], form, dtype, nbytes)
    return found


def _read_part(
    part: Part,
    buffers: Sequence[Buffer],
    uses: Sequence[int],
    bases: dict[int, torch.Tensor],
    arrival: Arrival | None,
) -> torch.Tensor:
    if arrival is not None and part.device and part.device != "meta":
        packed = _read_device(part, buffers, arrival)
    else:
        packed = _read_packed(part, buffers, uses, bases)
    if part.spread is None:
        return packed
    return torch.empty_strided(part.shape, part.spread, dtype=packed.dtype, device=packed.device).copy_(packed)


def _read_device(part: Part, buffers: Sequence[Buffer], arrival: Arrival) -> torch.Tensor:
    dtype = DTYPES[part.dtype]
    if dtype not in NO_WARNING:
        silence_warnings()
    if part.buffer < 0 and part.slot is None:
        return torch.empty_strided(part.shape, part.stride or (), dtype=dtype, device=arrival.device(part.device))
    base = arrival.fetch(part.slot or part.buffer, buffers)
    return _view_of(base, part, dtype)


def _view_of(base: torch.Tensor, part: Part, dtype: torch.dtype) -> torch.Tensor:
    """A tensor as ``part`` describes it, on the storage of ``base``."""
    stride = _dense(part.shape) if part.stride is None else part.stride
    made = torch.empty(0, dtype=dtype, device=base.device)
    return made.set_(base.untyped_storage(), part.offset, part.shape, stride)


def _read_packed(
    part: Part, buffers: Sequence[Buffer], uses: Sequence[int], bases: dict[int, torch.Tensor]
) -> torch.Tensor:
    dtype = DTYPES[part.dtype]
    if dtype not in NO_WARNING:
        silence_warnings()
    if part.buffer < 0:
        return torch.empty_strided(part.shape, part.stride or (), dtype=dtype, device=part.device or "cpu")
    buffer = buffers[part.buffer]
    if uses[part.buffer] == 1 and part.stride is None:
        try:
            flat = torch.frombuffer(buffer, dtype=dtype)
            return flat if part.shape == (len(flat),) else flat.view(part.shape)
        except (TypeError, NotImplementedError):  # frombuffer does not support this dtype
            pass
    base = bases.get(part.buffer)
    if base is None:
        base = bases[part.buffer] = torch.frombuffer(buffer, dtype=torch.uint8)
    return _view_of(base, part, dtype)


def _read_spec(spec: TensorSpec, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    if any(not 0 <= index < len(parts) for index in spec.parts):
        raise ProtocolError(f"a tensor refers to parts {spec.parts}, but the message has {len(parts)} parts")
    own = [parts[index] for index in spec.parts]
    if spec.layout:
        tensor = _BUILD[spec.layout](spec, *own)
        if not tensor.is_nested and tuple(tensor.shape) != spec.shape:
            raise ProtocolError(f"a tensor has the shape {tuple(tensor.shape)}, but its spec says {spec.shape}")
    else:
        (tensor,) = own
    return tensor.requires_grad_() if spec.requires_grad else tensor


def _coo(spec: TensorSpec, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    (coalesced,) = spec.detail
    silence_warnings()
    return torch.sparse_coo_tensor(
        indices, values, spec.shape, is_coalesced=bool(coalesced), check_invariants=_may_check(indices)
    )


def _may_check(tensor: torch.Tensor) -> bool:
    """Whether torch may read a tensor to check its invariants.

    Reading a tensor on a device would wait for all work under way there. A payload of an untrusted peer is checked
    before it goes to a device, see ``strict``.
    """
    return tensor.device.type == "cpu"


def _compressed(spec: TensorSpec, compressed: torch.Tensor, plain: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    silence_warnings()
    build: Callable[..., torch.Tensor] = torch.sparse_compressed_tensor
    layout = COMPRESSED[spec.layout]
    return build(compressed, plain, values, spec.shape, layout=layout, check_invariants=_may_check(compressed))


def _nested(spec: TensorSpec, *parts: torch.Tensor) -> torch.Tensor:
    silence_warnings()
    return torch.nested.as_nested_tensor(list(parts))


def _quantized(spec: TensorSpec, ints: torch.Tensor) -> torch.Tensor:
    silence_warnings()
    scale, zero_point = spec.detail
    return torch._make_per_tensor_quantized_tensor(ints, scale, zero_point)


def _quantized_channel(
    spec: TensorSpec, ints: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor
) -> torch.Tensor:
    silence_warnings()
    (axis,) = spec.detail
    if not (isinstance(axis, int) and 0 <= axis < ints.dim() and len(scales) == len(zero_points) == ints.shape[axis]):
        raise ProtocolError(f"the scales of axis {axis} do not match a tensor of shape {tuple(ints.shape)}")
    return torch._make_per_channel_quantized_tensor(ints, scales, zero_points, axis)


_BUILD: dict[str, Callable[..., torch.Tensor]] = {
    "coo": _coo,
    "nested": _nested,
    "quantized": _quantized,
    "quantized_channel": _quantized_channel,
    **dict.fromkeys(COMPRESSED, _compressed),
}
