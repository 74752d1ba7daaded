"""Tensors -> specs and buffers. Nothing is pickled. Memory that several tensors of one message share is sent once.

``write_ordinary`` and its variants are the fast path for dense tensors. ``TensorWriter`` takes everything else. This
module knows no message and no autograd: a spec only says whether its tensor requires grad.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from backhaul._wire.device_link import Lease, Link
from backhaul._wire.memory import Buffer, block_type
from backhaul._wire.tensors.dtypes import BUFFERED, DTYPE_NAMES
from backhaul._wire.tensors.memory_layout import OutgoingMemory, find_shared_memory, place_alone, place_together
from backhaul._wire.tensors.specs import (
    COMPRESSED,
    EMPTY_TABLE,
    MAX_RECORD_BYTES,
    Ordinary,
    Part,
    TensorSpec,
    TensorTable,
    encode_record,
)
from backhaul.errors import SerializationError

_dispatch_keys: Callable[[torch.Tensor], Any] = torch._C._dispatch_keys


_ORDINARY: int = _dispatch_keys(torch.empty(1)).raw_repr()
"""The dispatch keys of a plain CPU tensor: not sparse, quantized, nested, conjugated, negated, fake or wrapped."""


@functools.lru_cache(4096)
def _describe(
    dtype: torch.dtype, shape: torch.Size, requires_grad: bool, dense: bool
) -> tuple[TensorTable, type[ctypes.Array[Any]]] | None:
    """The table of a message with one ordinary tensor, and the ctypes array type of its memory.

    None if the tensor is not ordinary.
    """
    elements = math.prod(shape)
    record = encode_record(Ordinary(DTYPE_NAMES[dtype], tuple(shape), requires_grad, not dense))
    if dtype not in BUFFERED or not elements or len(record) > MAX_RECORD_BYTES:
        return None
    return TensorTable(ordinary=(record,)), block_type((elements if dense else 1) * dtype.itemsize)


def write_ordinary(tensor: torch.Tensor) -> tuple[TensorTable, ctypes.Array[Any]] | None:
    """The table and the buffer of a message whose only tensor is ``tensor``; None if the tensor is not ordinary.

    This is the usual case. It costs a fraction of what a ``TensorWriter`` costs.
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
    """The dispatch keys of a plain tensor on ``device``, as ``_ORDINARY`` for the CPU."""
    keys: int = _dispatch_keys(torch.empty(1, device=device)).raw_repr()
    return keys


def write_lent(tensor: torch.Tensor, link: Link) -> tuple[TensorTable, Lease] | None:
    """As ``write_ordinary``, for a tensor that ``link`` takes. None also if the link has no free slot for it."""
    device = tensor.device
    if _dispatch_keys(tensor).raw_repr() != _ordinary_on(device):
        return None
    dense = tensor.is_contiguous()
    if not dense and any(tensor.stride()):
        return None
    found, target = _describe(tensor.dtype, tensor.shape, tensor.requires_grad, dense), link.name(device)
    if found is None or not target:
        return None
    slot = link.lend_whole(tensor, ctypes.sizeof(found[1]))
    if slot is None:
        return None
    lease = Lease(link)
    lease.slots.append(slot)
    return TensorTable(ordinary=found[0].ordinary, lent=((*slot, target),)), lease


def write_all_ordinary(
    tensors: Sequence[torch.Tensor], *, apart: bool = False
) -> tuple[TensorTable, list[Buffer]] | None:
    """As ``write_ordinary``, for several tensors. None also if two of them share memory, unless they may arrive
    ``apart``.
    """
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
    if not apart and any(start + size > behind for (start, size), (behind, _) in itertools.pairwise(spans)):
        return None
    return TensorTable(ordinary=tuple(records)), buffers


class TensorWriter:
    """Collects the logical tensors of one message, then lays out their memory.

    Args:
        link: Takes tensors of devices. None: tensors of devices cannot be sent.

    Attributes:
        tensors: The tensors, in the order in which they were added.
        lease: The slots that the tensors take, if any.
    """

    __slots__ = ("_link", "_parts", "_specs", "lease", "tensors")

    def __init__(self, link: Link | None = None) -> None:
        self.tensors: list[torch.Tensor] = []
        self.lease: Lease | None = None
        self._link = link
        self._specs: list[TensorSpec] = []
        self._parts: list[torch.Tensor] = []

    def add(self, tensor: torch.Tensor) -> int:
        """Add a logical tensor and return its index. Raises ``SerializationError`` if it cannot be sent."""
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
            self._link.name(tensor.device)  # raises if the receiver has no device for it
        elif device not in ("cpu", "meta"):
            raise SerializationError(
                f"a tensor on {tensor.device} cannot be sent; only CPU, meta and CUDA tensors can be sent; "
                "move it with .cpu() first"
            )
        if tensor.is_conj():
            tensor = tensor.resolve_conj()
        if tensor.is_neg():
            tensor = tensor.resolve_neg()
        if tensor._is_zerotensor():
            tensor = tensor.clone()  # a zero tensor has no memory
        self._parts.append(tensor)
        return len(self._parts) - 1

    def _composite(self, tensor: torch.Tensor) -> TensorSpec:
        value, grad = tensor.detach(), tensor.requires_grad
        if value.is_nested:
            return TensorSpec(tuple(map(self._part, value.unbind())), grad, "nested")
        shape = tuple(tensor.shape)
        if value.is_quantized:
            if value.dtype not in (torch.qint8, torch.quint8, torch.qint32):
                raise SerializationError(f"a tensor of {value.dtype} cannot be sent; send its int_repr() instead")
            if self._link is not None and self._link.takes(value.device):
                raise SerializationError(
                    f"a quantized tensor cannot be sent from or to a device such as {value.device}; dequantize it first"
                )
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
        for name, layout in COMPRESSED.items():
            if value.layout is layout:
                rows = name in ("csr", "bsr")
                parts = (
                    value.crow_indices() if rows else value.ccol_indices(),
                    value.col_indices() if rows else value.row_indices(),
                    value.values(),
                )
                return TensorSpec(tuple(map(self._part, parts)), grad, name, shape)
        raise SerializationError(f"a tensor of layout {value.layout} cannot be sent; convert it with to_dense() first")

    def finish(self) -> tuple[TensorTable, list[Buffer], list[torch.Tensor]]:
        """Return the table, the buffers to send, and the tensors that own the buffers' memory."""
        if not self._parts:
            return EMPTY_TABLE, [], []
        memory = OutgoingMemory(self._link)
        placed: list[Part | None] = [None] * len(self._parts)
        try:
            for cluster in find_shared_memory(self._parts):
                if len(cluster) == 1:
                    index = cluster[0]
                    placed[index] = place_alone(self._parts[index], memory)
                else:
                    place_together(self._parts, cluster, placed, memory)
            self.lease = memory.finish()
        except BaseException:
            memory.drop()
            raise
        return TensorTable(tuple(self._specs), tuple(p for p in placed if p is not None)), memory.buffers, memory.keep
