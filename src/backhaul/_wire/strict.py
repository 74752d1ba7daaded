"""What a payload of a peer that is not trusted must be, beyond what its types say: nothing pickled, and tensors that
cannot harm whoever computes with them. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from backhaul._wire.device_link import Grounded
from backhaul._wire.memory import Buffer
from backhaul._wire.messages import TREE, Payload
from backhaul._wire.plain import MAX_DIMENSIONS, SCALARS
from backhaul._wire.tensors.dtypes import dtype_named
from backhaul._wire.tensors.reader import tensors_of
from backhaul._wire.tensors.specs import Ordinary, Part, TensorTable, read_record
from backhaul.errors import ProtocolError

_grounded = Grounded()
_LAYOUTS = frozenset(("", "coo", "csr", "csc", "bsr", "bsc"))


def tensor_count(payload: Payload) -> int:
    """How many tensors a payload says it has."""
    return max(len(payload.tensors.ordinary), len(payload.tensors.specs), len(payload.tensors.parts) // 3)


def check_payload(payload: Payload, buffers: Sequence[Buffer], limit: int) -> None:
    """Raise ``ProtocolError`` unless a payload is in a plain form, its tensors take no more than ``limit`` bytes when
    they are laid out, and each of them is sound.
    """
    if payload.pickle or payload.wrapped or payload.plain is None or payload.loose not in (0, TREE):
        raise ProtocolError("a pickle, which this worker does not take (trusted=False)")
    if payload.loose == 0 and any(type(value) not in SCALARS for value in payload.plain):
        raise ProtocolError("nested values that are not tagged")
    table = payload.tensors
    if table.specs or table.parts or table.ordinary:
        _check_table(table, limit)
        for tensor in tensors_of(payload, buffers, _grounded):
            _check_bools(tensor)


def _check_table(table: TensorTable, limit: int) -> None:
    if any(spec.layout not in _LAYOUTS for spec in table.specs):
        raise ProtocolError("a tensor that is quantized or nested")
    # A tensor that is expanded, or laid out with holes, is far larger than what was sent of it.
    parts: list[Part | Ordinary] = [*table.parts, *map(read_record, table.ordinary)]
    if any(len(each.shape) > MAX_DIMENSIONS for each in (*parts, *table.specs)):
        raise ProtocolError(f"a tensor of more than {MAX_DIMENSIONS} dimensions")
    size = sum(math.prod(part.shape) * dtype_named(part.dtype).itemsize for part in parts)
    if size > limit:
        raise ProtocolError(f"tensors that would take {size} bytes, more than the limit of {limit} (max_frame_bytes)")


def _check_bools(tensor: torch.Tensor) -> None:
    """Kernels count on a bool to be 0 or 1, some of them for where they write."""
    if tensor.dtype is not torch.bool or tensor.device.type != "cpu":
        return
    if tensor.layout is not torch.strided:
        tensor = tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
    tensor = tensor.detach()
    memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    if len(memory) and memory.max() > 1 and tensor.view(torch.uint8).max() > 1:  # the memory may be others' too
        raise ProtocolError("a tensor of bools with other values than 0 and 1")
