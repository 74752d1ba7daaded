"""Tensors <-> plain specs plus raw buffers. Nothing is pickled, and memory that several tensors of one
message share is sent once and shared again at the other end.

A *logical* tensor is what the user sees; a *part* is a strided tensor in memory. A strided tensor is its own
only part, a sparse one has two or three (indices, values). ``TensorWriter`` collects the logical tensors of one
message; ``read_tensors`` makes them again. Knows no message and no autograd: a spec says whether its tensor
required grad, and that is all.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import re
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec
import torch

from backhaul._wire.device_link import Arrival, Form, Lease, Link, Shipment, flat_bytes, is_device
from backhaul._wire.memory import Buffer, block_type
from backhaul.errors import ProtocolError, SerializationError

_PYBUF_READ = 0x100
_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_memory.restype = ctypes.py_object
_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)

_DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_UNCOPIED = {dtype for name, dtype in _DTYPES.items() if re.fullmatch(r"u?int[1-7]|bits.*|float4.*", name)} & {
    dtype for dtype in _DTYPES.values() if dtype.itemsize == 1
}
"""Types of one byte that torch stores but does not copy with a change of layout."""
_QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
_MAX_RECORD = 1024  # bytes; both ends keep the last few thousand
_MAX_SPREAD = 4  # how much more memory than its elements need a tensor may take at the other end to keep its strides
_BUFFERED = {
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
}
"""Types that a tensor over given memory can have without further ado."""
_UNREMARKED = _BUFFERED | {torch.int8, torch.int16, torch.complex64, torch.complex128}
"""Types that torch never warns about. It calls some of the others experimental, and each version adds more."""
_COMPRESSED: dict[str, torch.layout] = {
    "csr": torch.sparse_csr,
    "csc": torch.sparse_csc,
    "bsr": torch.sparse_bsr,
    "bsc": torch.sparse_bsc,
}


class Part(msgspec.Struct, array_like=True, frozen=True):
    """A strided tensor: where its bytes are and how they are laid out. ``buffer`` -1: it has none, or a ``slot``."""

    buffer: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None  # None: contiguous
    offset: int = 0  # in elements, into the buffer
    device: str = ""  # "": cpu; "meta"; or a device of the receiver's, as in "cuda:0"
    spread: tuple[int, ...] | None = None  # the strides to give it again, which leave memory between its elements
    slot: tuple[int, int] | None = None  # in the place of a buffer, see ``devices``; the offset is into the slot


class TensorSpec(msgspec.Struct, array_like=True, frozen=True):
    """A logical tensor: its layout, its parts, and the little that is not in them."""

    parts: tuple[int, ...]
    requires_grad: bool = False
    layout: str = ""  # "": strided
    shape: tuple[int, ...] = ()
    detail: tuple[Any, ...] = ()  # sparse: (coalesced,); quantized: (scale, zero_point) or (axis,)


class Ordinary(msgspec.Struct, array_like=True, frozen=True):
    """A dense tensor alone in its buffer. Stands in a table as bytes, which both ends know again: they come often."""

    dtype: str
    shape: tuple[int, ...]
    requires_grad: bool
    expanded: bool  # the buffer holds one element, and all others are the same


class TensorTable(msgspec.Struct, array_like=True, frozen=True):
    """All tensors of one message: as specs and parts, or, if they are all ordinary, as one record for each buffer; or
    for each slot, and then with these and the devices to arrive on.
    """

    specs: tuple[TensorSpec, ...] = ()
    parts: tuple[Part, ...] = ()
    ordinary: tuple[Annotated[bytes, msgspec.Meta(max_length=_MAX_RECORD)], ...] = ()
    lent: tuple[tuple[int, int, str], ...] = ()


EMPTY_TABLE = TensorTable()


_dispatch_keys: Callable[[torch.Tensor], Any] = torch._C._dispatch_keys


_ORDINARY: int = _dispatch_keys(torch.empty(1)).raw_repr()
"""What torch dispatches on for a tensor in this process's memory that is nothing special: not sparse, quantized,
nested, conjugated, negated, fake or wrapped.
"""
_read_record = msgspec.msgpack.Decoder(Ordinary).decode


def read_record(record: bytes) -> Ordinary:
    """What a record of an ordinary tensor says. Raises ``ProtocolError``."""
    try:
        return _read_record(record)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"not a record of a tensor: {error}") from error


def dtype_named(name: str) -> torch.dtype:
    """The dtype of that name. Raises ``ProtocolError``."""
    try:
        return _DTYPES[name]
    except KeyError:
        raise ProtocolError(f"no dtype {name!r}") from None


@functools.lru_cache(4096)
def _describe(
    dtype: torch.dtype, shape: torch.Size, requires_grad: bool, dense: bool
) -> tuple[TensorTable, type[ctypes.Array[Any]]] | None:
    """The table of a message with just one ordinary tensor, and what its memory is; None if it is not ordinary."""
    elements = math.prod(shape)
    record = msgspec.msgpack.encode(Ordinary(_DTYPE_NAMES[dtype], tuple(shape), requires_grad, not dense))
    if dtype not in _BUFFERED or not elements or len(record) > _MAX_RECORD:
        return None
    return TensorTable(ordinary=(record,)), block_type((elements if dense else 1) * dtype.itemsize)


def write_ordinary(tensor: torch.Tensor) -> tuple[TensorTable, ctypes.Array[Any]] | None:
    """What stands for ``tensor`` in a message with no other, the usual case, at a fraction of the cost of a
    ``TensorWriter``; None if the tensor is not ordinary.
    """
    if _dispatch_keys(tensor).raw_repr() != _ORDINARY:
        return None
    dense = tensor.is_contiguous()
    if not dense and any(tensor.stride()):
        return None
    found, address = _describe(tensor.dtype, tensor.shape, tensor.requires_grad, dense), tensor.data_ptr()
    return (found[0], found[1].from_address(address)) if found is not None and address else None


@functools.cache
def _ordinary_on(device: torch.device) -> int:
    """As ``_ORDINARY``, for a device."""
    keys: int = _dispatch_keys(torch.empty(1, device=device)).raw_repr()
    return keys


def write_lent(tensor: torch.Tensor, link: Link) -> tuple[TensorTable, Lease] | None:
    """The same for a tensor that ``link`` takes, if there is a slot for it."""
    device = tensor.device
    if _dispatch_keys(tensor).raw_repr() != _ordinary_on(device):
        return None
    dense = tensor.is_contiguous()
    if not dense and any(tensor.stride()):
        return None
    found, home = _describe(tensor.dtype, tensor.shape, tensor.requires_grad, dense), link.name(device)
    if found is None or not home:
        return None
    slot = link.lend_whole(tensor, ctypes.sizeof(found[1]))
    if slot is None:
        return None
    lease = Lease(link)
    lease.slots.append(slot)
    return TensorTable(ordinary=found[0].ordinary, lent=((*slot, home),)), lease


def write_all_ordinary(tensors: Sequence[torch.Tensor]) -> tuple[TensorTable, list[Buffer]] | None:
    """The same for several tensors; None as well if some of them share memory."""
    records: list[bytes] = []
    buffers: list[Buffer] = []
    spans: list[tuple[int, int]] = []
    for tensor in tensors:
        written = write_ordinary(tensor)
        if written is None:
            return None
        table, buffer = written
        records += table.ordinary
        buffers.append(buffer)
        spans.append((tensor.data_ptr(), len(buffer)))
    spans.sort()
    if any(start + size > behind for (start, size), (behind, _) in itertools.pairwise(spans)):
        return None
    return TensorTable(ordinary=tuple(records)), buffers


class TensorWriter:
    """Collects the tensors of one message, then lays out their memory.

    Args:
        link: What takes tensors that are not in this process's memory; None: those cannot travel.

    Attributes:
        tensors: In the order in which they were added.
        lease: The slots they have taken, if any.
    """

    __slots__ = ("_link", "_parts", "_specs", "lease", "tensors")

    def __init__(self, link: Link | None = None) -> None:
        self.tensors: list[torch.Tensor] = []
        self.lease: Lease | None = None
        self._link = link
        self._specs: list[TensorSpec] = []
        self._parts: list[torch.Tensor] = []

    def add(self, tensor: torch.Tensor) -> int:
        """Take in a logical tensor; return its index. Raises ``SerializationError`` if it cannot travel."""
        if tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested):
            spec = TensorSpec((self._part(tensor.detach()),), tensor.requires_grad)
        else:
            spec = self._composite(tensor)
        self._specs.append(spec)
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def _part(self, tensor: torch.Tensor) -> int:
        device = tensor.device.type
        if self._link is not None and self._link.takes(tensor.device):
            self._link.name(tensor.device)  # there is one, or this raises
        elif device not in ("cpu", "meta"):
            raise SerializationError(
                f"a tensor on {tensor.device} cannot travel: only tensors on the CPU, on meta and on CUDA devices can; "
                "move it with .cpu() first"
            )
        if tensor.is_conj():
            tensor = tensor.resolve_conj()
        if tensor.is_neg():
            tensor = tensor.resolve_neg()
        if tensor._is_zerotensor():
            tensor = tensor.clone()  # it has no memory
        self._parts.append(tensor)
        return len(self._parts) - 1

    def _composite(self, tensor: torch.Tensor) -> TensorSpec:
        value, grad = tensor.detach(), tensor.requires_grad
        if value.is_nested:
            return TensorSpec(tuple(map(self._part, value.unbind())), grad, "nested")
        shape = tuple(tensor.shape)
        if value.is_quantized:
            if value.dtype not in (torch.qint8, torch.quint8, torch.qint32):
                raise SerializationError(f"a tensor of {value.dtype} cannot travel")
            if self._link is not None and self._link.takes(value.device):
                raise SerializationError(f"a quantized tensor cannot travel from or to a device such as {value.device}")
            parts: tuple[torch.Tensor, ...] = (value.int_repr(),)
            if value.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
                detail: tuple[Any, ...] = (value.q_scale(), value.q_zero_point())
                return TensorSpec(tuple(map(self._part, parts)), grad, "quantized", shape, detail)
            parts += (value.q_per_channel_scales(), value.q_per_channel_zero_points())
            detail = (value.q_per_channel_axis(),)
            return TensorSpec(tuple(map(self._part, parts)), grad, "quantized_channel", shape, detail)
        if value.layout is torch.sparse_coo:
            parts = (value._indices(), value._values())
            return TensorSpec(tuple(map(self._part, parts)), grad, "coo", shape, (value.is_coalesced(),))
        for name, layout in _COMPRESSED.items():
            if value.layout is layout:
                rows = name in ("csr", "bsr")
                parts = (
                    value.crow_indices() if rows else value.ccol_indices(),
                    value.col_indices() if rows else value.row_indices(),
                    value.values(),
                )
                return TensorSpec(tuple(map(self._part, parts)), grad, name, shape)
        raise SerializationError(f"a tensor of layout {value.layout} cannot travel")

    def finish(self) -> tuple[TensorTable, list[Buffer], list[torch.Tensor]]:
        """Return the table, the buffers to send, and the tensors that own the buffers' memory."""
        if not self._parts:
            return EMPTY_TABLE, [], []
        cargo = _Cargo(self._link)
        placed: list[Part | None] = [None] * len(self._parts)
        try:
            for cluster in _share_memory(self._parts):
                if len(cluster) == 1:
                    index = cluster[0]
                    placed[index] = _place_alone(self._parts[index], cargo)
                else:
                    _place_together(self._parts, cluster, placed, cargo)
            self.lease = cargo.finish()
        except BaseException:
            cargo.drop()
            raise
        return TensorTable(tuple(self._specs), tuple(p for p in placed if p is not None)), cargo.buffers, cargo.keep


class _Cargo:
    """Where the memory of one message goes: into buffers, and what a link takes into its slots, if it has any."""

    __slots__ = ("_link", "_shipment", "buffers", "keep")

    def __init__(self, link: Link | None) -> None:
        self.buffers: list[Buffer] = []
        self.keep: list[torch.Tensor] = []
        self._link = link
        self._shipment: Shipment | None = None

    def home(self, tensor: torch.Tensor) -> str | None:
        """The device on which it is to arrive, if the link takes it."""
        link, device = self._link, tensor.device
        return link.name(device) if link is not None and link.takes(device) else None

    def put(self, tensor: torch.Tensor, start: int, nbytes: int) -> tuple[int, str, tuple[int, int] | None]:
        """Send a stretch of the memory behind ``tensor``: which buffer it is, on which device, in which slot."""
        home = self.home(tensor)
        if home is None:
            self.buffers.append(_memory_at(tensor, start - _start(tensor), nbytes))
            return len(self.buffers) - 1, "", None
        if self._shipment is None:
            assert self._link is not None
            self._shipment = Shipment(self._link)
        buffer, slot = self._shipment.put(flat_bytes(tensor, start, nbytes), home, self.buffers)
        return buffer, home, slot

    def finish(self) -> Lease | None:
        """Have all memory where it is to be; returns the slots."""
        if self._shipment is None:
            return None
        self._shipment.finish(self.buffers, self.keep)
        return self._shipment.lease if self._shipment.lease.slots else None

    def drop(self) -> None:
        """Nothing is sent."""
        if self._shipment is not None:
            self._shipment.lease.end()


def _share_memory(parts: Sequence[torch.Tensor]) -> list[list[int]]:
    """Sort the parts into clusters whose memory overlaps."""
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
    """Whether parts of one storage lie between each other without sharing an element, as columns of a matrix do."""
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


def _place_alone(tensor: torch.Tensor, cargo: _Cargo) -> Part:
    dtype, shape = _DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)
    if tensor.device.type == "meta":
        return Part(-1, dtype, shape, tensor.stride(), 0, "meta")
    if tensor.numel() == 0:
        return Part(-1, dtype, shape, tensor.stride(), 0, cargo.home(tensor) or "")
    stride = spread = None
    elements = tensor.numel()
    if not tensor.is_contiguous():
        if tensor.dtype not in _UNREMARKED:
            _hush()
        if (span := _span(tensor)) > elements:  # holes: send the elements, not what lies between them
            if span <= _MAX_SPREAD * elements and tensor.dtype not in _UNCOPIED and _disjoint(tensor):
                spread = tensor.stride()
            tensor = _compact(tensor)
        if spread is not None:
            tensor = tensor.contiguous()
        else:
            elements = _span(tensor)  # fewer, if it is expanded
            stride = tensor.stride()
    buffer, device, slot = cargo.put(tensor, _start(tensor), elements * tensor.itemsize)
    cargo.keep.append(tensor)
    return Part(buffer, dtype, shape, stride, 0, device, spread, slot)


def _disjoint(tensor: torch.Tensor) -> bool:
    """Whether no two elements share memory, as far as strides tell."""
    reach = 1
    for stride, count in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if count > 1:
            if stride < reach:
                return False
            reach += (count - 1) * stride
    return True


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype in _UNCOPIED:
        return tensor.view(torch.uint8).clone(memory_format=torch.preserve_format).view(tensor.dtype)
    return tensor.clone(memory_format=torch.preserve_format)


def _place_together(
    parts: Sequence[torch.Tensor],
    cluster: list[int],
    placed: list[Part | None],
    cargo: _Cargo,
) -> None:
    """Send the stretch of memory that a cluster covers once; every part becomes a view of it."""
    align = max(parts[i].itemsize for i in cluster)
    starts = {i: _start(parts[i]) for i in cluster}
    first = min(starts.values()) // align * align
    last = max(starts[i] + _span(parts[i]) * parts[i].itemsize for i in cluster)
    buffer, device, slot = cargo.put(parts[cluster[0]], first, last - first)
    for index in cluster:
        part = parts[index]
        cargo.keep.append(part)
        offset = (starts[index] - first) // part.itemsize
        dtype = _DTYPE_NAMES[part.dtype]
        placed[index] = Part(buffer, dtype, tuple(part.shape), part.stride(), offset, device, None, slot)


def _memory_at(tensor: torch.Tensor, ahead: int, nbytes: int) -> memoryview:
    """Memory that begins ``ahead`` bytes behind where the tensor does."""
    try:
        address = tensor.data_ptr()
    except RuntimeError as error:  # fake tensors, functorch wrappers
        raise SerializationError(
            f"a {type(tensor).__name__} has no memory to send: it is fake, or belongs to a transform of torch.func "
            f"such as grad or vmap, inside which backhaul.remote_op works ({error})"
        ) from error
    if not address:
        raise SerializationError("a tensor whose storage was freed has no memory to send")
    view: memoryview = _memory(address + ahead, nbytes, _PYBUF_READ)
    return view


def read_tensors(table: TensorTable, buffers: Sequence[Buffer], link: Link | None = None) -> list[torch.Tensor]:
    """Make the tensors of a message again, on the very memory of ``buffers`` and of the link's slots."""
    try:
        if not table.ordinary:
            return _read_table(table, buffers, link) if table.specs else []
        if table.lent:
            return _read_lent(table, link)
        tensors = []
        for record, buffer in zip(table.ordinary, buffers, strict=True):
            dtype, size, shape, stride, requires_grad = _recall(record)
            if len(buffer) != size:
                raise ProtocolError(f"a tensor of {size} bytes cannot be made of {len(buffer)}")
            tensor = torch.frombuffer(buffer, dtype=dtype)
            if shape is not None:
                tensor = tensor.view(shape) if stride is None else tensor.as_strided(shape, stride)
            tensors.append(tensor.requires_grad_() if requires_grad else tensor)
        return tensors
    except ProtocolError:
        raise
    except Exception as error:
        raise ProtocolError(f"a tensor does not fit its description: {type(error).__name__}: {error}") from error


def _read_lent(table: TensorTable, link: Link | None) -> list[torch.Tensor]:
    if link is None:
        raise ProtocolError("tensors in slots, but there is no link to their sender")
    tensors = []
    for record, (segment, index, device) in zip(table.ordinary, table.lent, strict=True):
        dtype, size, shape, stride, requires_grad = _recall(record)
        if not is_device(device):
            raise ProtocolError(f"a tensor in a slot on {device!r}")
        if shape is None:
            shape = (size // dtype.itemsize,)
        form = Form(dtype, shape, _dense(shape) if stride is None else stride)
        tensor = link.borrow_whole((segment, index), size, link.device(device), form)
        tensors.append(tensor.requires_grad_() if requires_grad else tensor)
    return tensors


@functools.lru_cache(4096)
def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor without holes."""
    return tuple(torch.empty(shape, device="meta").stride())


@functools.lru_cache(4096)
def _recall(record: bytes) -> tuple[torch.dtype, int, tuple[int, ...] | None, tuple[int, ...] | None, bool]:
    """What a record says: dtype, size in bytes, shape unless flat, stride unless dense, whether to require grad."""
    read = _read_record(record)
    dtype, shape, grad = _DTYPES.get(read.dtype), read.shape, read.requires_grad
    elements = math.prod(shape)
    if dtype not in _BUFFERED or min(shape, default=1) < 1 or elements >= 1 << 59:
        raise ProtocolError(f"no tensor can be made of {read}")
    if grad and not dtype.is_floating_point:
        raise ProtocolError(f"{read} cannot require grad")
    if read.expanded:
        return dtype, dtype.itemsize, shape, (0,) * len(shape), grad
    return dtype, elements * dtype.itemsize, None if len(shape) == 1 else shape, None, grad


def _read_table(table: TensorTable, buffers: Sequence[Buffer], link: Link | None) -> list[torch.Tensor]:
    uses = [0] * len(buffers)
    arrival = None if link is None else Arrival(link)
    for part in table.parts:
        reach = _check_part(part, buffers)
        if part.buffer >= 0:
            uses[part.buffer] += 1
        if part.device and part.device != "meta":
            if arrival is None:
                raise ProtocolError(f"{part}, but there is no link to its sender")
            if reach:
                arrival.announce(part.slot or part.buffer, reach, part.device)
    bases: dict[int, torch.Tensor] = {}
    parts = [_read_part(part, buffers, uses, bases, arrival) for part in table.parts]
    return [_read_spec(spec, parts) for spec in table.specs]


def _check_part(part: Part, buffers: Sequence[Buffer]) -> int:
    """Refuse a part that is not wholly inside its buffer, or has no business being there. Returns how many bytes of its
    buffer or slot it needs.
    """
    dtype = _DTYPES.get(part.dtype)
    if dtype is None or dtype in _QUANTIZED or not (part.device in ("", "meta") or is_device(part.device)):
        raise ProtocolError(f"no tensor can be made of {part}")
    if part.stride is not None and len(part.stride) != len(part.shape):
        raise ProtocolError(f"shape and stride of {part} do not match")
    numbers = (*part.shape, *(part.stride or ()), part.offset, *(part.slot or ()))
    if min(numbers) < 0 or max(numbers) >= 1 << 62:
        raise ProtocolError(f"impossible sizes in {part}")
    elements = math.prod(part.shape)
    if part.spread is not None:
        _check_spread(part, elements)
    if part.buffer == -1 and part.slot is None:
        if elements and part.device != "meta":
            raise ProtocolError(f"{part} has elements but no memory")
        if part.stride is None or part.offset:
            raise ProtocolError(f"{part} has no memory to be laid out in")
        return 0
    if part.device == "meta" or not elements:
        raise ProtocolError(f"{part} needs no memory")
    return _check_memory(part, elements, dtype.itemsize, buffers)


def _check_memory(part: Part, elements: int, itemsize: int, buffers: Sequence[Buffer]) -> int:
    if part.stride is None and part.offset:
        raise ProtocolError(f"{part} starts inside of memory that is all its own")
    reach = elements
    if part.stride is not None:
        reach = part.offset + 1 + sum((n - 1) * s for n, s in zip(part.shape, part.stride, strict=True))
    reach *= itemsize
    if part.slot is not None:
        if part.buffer != -1 or not part.device:
            raise ProtocolError(f"{part} is in a slot, and is not")
        return reach
    if not 0 <= part.buffer < len(buffers):
        raise ProtocolError(f"{part} has no buffer among {len(buffers)}")
    size = memoryview(buffers[part.buffer]).nbytes
    if reach > size or (part.stride is None and reach != size):
        raise ProtocolError(f"{part} does not fit its {size} bytes")
    return reach


def _check_spread(part: Part, elements: int) -> None:
    spread = part.spread or ()
    reach = 1 + sum((n - 1) * s for n, s in zip(part.shape, spread, strict=False))
    if len(spread) != len(part.shape) or part.stride is not None or min(spread, default=0) < 0:
        raise ProtocolError(f"{part} cannot be spread")
    if part.buffer < 0 and part.slot is None:
        raise ProtocolError(f"{part} has nothing to spread")
    if reach > _MAX_SPREAD * elements:
        raise ProtocolError(f"{part} would take {reach} elements of memory for {elements}")


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
    dtype = _DTYPES[part.dtype]
    if dtype not in _UNREMARKED:
        _hush()
    if part.buffer < 0 and part.slot is None:
        return torch.empty_strided(part.shape, part.stride or (), dtype=dtype, device=arrival.device(part.device))
    base = arrival.fetch(part.slot or part.buffer, buffers)
    return _on(base, part, dtype)


def _on(base: torch.Tensor, part: Part, dtype: torch.dtype) -> torch.Tensor:
    """A part in the memory of ``base``, which is all of its storage."""
    stride = _dense(part.shape) if part.stride is None else part.stride
    made = torch.empty(0, dtype=dtype, device=base.device)
    return made.set_(base.untyped_storage(), part.offset, part.shape, stride)


def _read_packed(
    part: Part, buffers: Sequence[Buffer], uses: Sequence[int], bases: dict[int, torch.Tensor]
) -> torch.Tensor:
    dtype = _DTYPES[part.dtype]
    if dtype not in _UNREMARKED:
        _hush()
    if part.buffer < 0:
        return torch.empty_strided(part.shape, part.stride or (), dtype=dtype, device=part.device or "cpu")
    buffer = buffers[part.buffer]
    if uses[part.buffer] == 1 and part.stride is None:
        try:
            flat = torch.frombuffer(buffer, dtype=dtype)
            return flat if part.shape == (len(flat),) else flat.view(part.shape)
        except (TypeError, NotImplementedError):  # a dtype frombuffer does not know
            pass
    base = bases.get(part.buffer)
    if base is None:
        base = bases[part.buffer] = torch.frombuffer(buffer, dtype=torch.uint8)
    return _on(base, part, dtype)


def _read_spec(spec: TensorSpec, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    if any(not 0 <= index < len(parts) for index in spec.parts):
        raise ProtocolError(f"a tensor wants parts {spec.parts} of {len(parts)}")
    own = [parts[index] for index in spec.parts]
    if spec.layout:
        tensor = _REBUILD[spec.layout](spec, *own)
        if not tensor.is_nested and tuple(tensor.shape) != spec.shape:
            raise ProtocolError(f"a tensor of {tuple(tensor.shape)} was said to be of {spec.shape}")
    else:
        (tensor,) = own
    return tensor.requires_grad_() if spec.requires_grad else tensor


def _coo(spec: TensorSpec, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    (coalesced,) = spec.detail
    _hush()
    return torch.sparse_coo_tensor(
        indices, values, spec.shape, is_coalesced=bool(coalesced), check_invariants=_can_look(indices)
    )


def _can_look(tensor: torch.Tensor) -> bool:
    """Whether one may read a tensor. On a device that would wait for all that is under way there; what comes from one
    that is not trusted is looked at before it goes there, see ``strict``.
    """
    return tensor.device.type == "cpu"


def _compressed(spec: TensorSpec, compressed: torch.Tensor, plain: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    _hush()
    build: Callable[..., torch.Tensor] = torch.sparse_compressed_tensor
    layout = _COMPRESSED[spec.layout]
    return build(compressed, plain, values, spec.shape, layout=layout, check_invariants=_can_look(compressed))


def _nested(spec: TensorSpec, *parts: torch.Tensor) -> torch.Tensor:
    _hush()
    return torch.nested.as_nested_tensor(list(parts))


def _quantized(spec: TensorSpec, ints: torch.Tensor) -> torch.Tensor:
    _hush()
    scale, zero_point = spec.detail
    return torch._make_per_tensor_quantized_tensor(ints, scale, zero_point)


def _quantized_channel(
    spec: TensorSpec, ints: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor
) -> torch.Tensor:
    _hush()
    (axis,) = spec.detail
    if not (isinstance(axis, int) and 0 <= axis < ints.dim() and len(scales) == len(zero_points) == ints.shape[axis]):
        raise ProtocolError(f"scales of axis {axis} do not fit a tensor of {tuple(ints.shape)}")
    return torch._make_per_channel_quantized_tensor(ints, scales, zero_points, axis)


def _hush() -> None:
    """See ``_hush_once``."""
    with _hushing:
        _hush_once()


_hushing = threading.Lock()


@functools.cache
def _hush_once() -> None:
    """Get torch's remarks on unusual tensors over with: it makes each once, and it is the sender who
    should hear them. Once only, because the filters of warnings belong to all threads.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (1,), check_invariants=False)
        torch.ones(1, 1).to_sparse_csr()
        torch.nested.as_nested_tensor([torch.ones(1)])
        for dtype in _DTYPES.values():
            if dtype not in _QUANTIZED:
                torch.empty(1, dtype=dtype)
        torch._make_per_tensor_quantized_tensor(torch.ones(1, dtype=torch.int8), 1.0, 0)


_REBUILD: dict[str, Callable[..., torch.Tensor]] = {
    "coo": _coo,
    "nested": _nested,
    "quantized": _quantized,
    "quantized_channel": _quantized_channel,
    **dict.fromkeys(_COMPRESSED, _compressed),
}
