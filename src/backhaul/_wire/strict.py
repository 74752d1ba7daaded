"""Checks on payloads of untrusted peers, beyond the types of their fields: nothing is pickled, and no tensor can make a
kernel read or write outside its memory. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from backhaul._wire.device_link import HostLink
from backhaul._wire.memory import Buffer
from backhaul._wire.messages import TREE, Payload
from backhaul._wire.plain import MAX_DIMENSIONS, SCALARS
from backhaul._wire.tensors.dtypes import dtype_named
from backhaul._wire.tensors.reader import tensors_of
from backhaul._wire.tensors.specs import Ordinary, Part, TensorTable, read_record
from backhaul._wire.tensors.validate import needed_bytes
from backhaul.errors import ProtocolError

_grounded = HostLink()
_LAYOUTS = frozenset(("", "coo", "csr", "csc", "bsr", "bsc"))


def tensor_count(payload: Payload) -> int:
    """The number of tensors that a payload claims to have."""
    return max(len(payload.tensors.ordinary), len(payload.tensors.specs), len(payload.tensors.parts) // 3)


def check_payload(payload: Payload, buffers: Sequence[Buffer], limit: int) -> None:
    """Raise ``ProtocolError`` unless a payload is in a plain form, its tensors take at most ``limit`` bytes of memory,
    and each tensor is valid.
    """
    if payload.pickle or payload.wrapped or payload.plain is None or payload.loose not in (0, TREE):
        raise ProtocolError("this worker does not accept pickles (trusted=False); send plain data and tensors only")
    if payload.loose == 0 and any(type(value) not in SCALARS for value in payload.plain):
        raise ProtocolError("malformed payload: nested values without tags")
    table = payload.tensors
    if table.specs or table.parts or table.ordinary:
        _check_table(table, limit)
        for tensor in tensors_of(payload, buffers, _grounded):
            _check_bools(tensor)


def _check_table(table: TensorTable, limit: int) -> None:
    if any(spec.layout not in _LAYOUTS for spec in table.specs):
        raise ProtocolError("this worker does not accept tensors that are quantized or nested (trusted=False)")
    # An expanded tensor, or one with gaps, needs far more memory than its bytes in the message.
    parts: list[Part | Ordinary] = [*table.parts, *map(read_record, table.ordinary)]
    if any(len(each.shape) > MAX_DIMENSIONS for each in (*parts, *table.specs)):
        raise ProtocolError(f"this worker does not accept tensors of more than {MAX_DIMENSIONS} dimensions")
    size = sum(math.prod(part.shape) * dtype_named(part.dtype).itemsize for part in parts)
    # A compressed buffer may also have gaps between the elements of its parts.
    size = max(size, restored_bytes(table))
    if size > limit:
        raise ProtocolError(f"the tensors of a message need {size} bytes; the limit is {limit} (limits.frame_bytes)")


def restored_bytes(table: TensorTable) -> int:
    """How many bytes the compressed buffers of a message have in their usual form. Raises ``ProtocolError``."""
    records = (record for record in map(read_record, table.ordinary) if record.form)
    ordinary = sum(math.prod(record.shape) * dtype_named(record.dtype).itemsize for record in records)
    return ordinary + sum(needed_bytes(part) for part in table.parts if part.form)


def _check_bools(tensor: torch.Tensor) -> None:
    """Refuse bools other than 0 and 1. Kernels rely on these values, and some compute addresses from them."""
    if tensor.dtype is not torch.bool or tensor.device.type != "cpu":
        return
    if tensor.layout is not torch.strided:
        tensor = tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
    tensor = tensor.detach()
    memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    if len(memory) and memory.max() > 1 and tensor.view(torch.uint8).max() > 1:  # other tensors may use this memory too
        raise ProtocolError("a tensor of bools has values other than 0 and 1")
