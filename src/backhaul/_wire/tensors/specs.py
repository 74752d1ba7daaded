"""The records that describe the tensors of a message. Nothing here reads or writes memory.

A *logical* tensor is what the user sees. A *part* is a strided tensor in memory. A strided tensor is its own
only part. A sparse tensor has two or three parts (indices, values).
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import torch

from backhaul.errors import ProtocolError

MAX_RECORD_BYTES = 1024
"""The longest record of an ordinary tensor. Both ends cache the last few thousand records."""
MAX_SPREAD = 4
"""How many times the memory of its elements a received tensor may take to keep its strides."""
COMPRESSED: dict[str, torch.layout] = {
    "csr": torch.sparse_csr,
    "csc": torch.sparse_csc,
    "bsr": torch.sparse_bsr,
    "bsc": torch.sparse_bsc,
}


class Part(msgspec.Struct, array_like=True, frozen=True):
    """A strided tensor: where its bytes are and how they are laid out."""

    buffer: int  # -1: the part has no memory, or a slot
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None  # None: contiguous
    offset: int = 0  # in elements, into the buffer
    device: str = ""  # "": cpu; "meta"; or a device of the receiver, as in "cuda:0"
    spread: tuple[int, ...] | None = None  # strides with gaps, which the receiver gives the tensor again
    slot: tuple[int, int] | None = None  # replaces the buffer, see ``device_link``; the offset is into the slot
    form: str = ""  # in which the memory travels, see ``buffer_forms``; all parts on a buffer name the same


class TensorSpec(msgspec.Struct, array_like=True, frozen=True):
    """A logical tensor: its layout, its parts, and the few facts that are not in the parts."""

    parts: tuple[int, ...]
    requires_grad: bool = False
    layout: str = ""  # "": strided
    shape: tuple[int, ...] = ()
    detail: tuple[Any, ...] = ()  # sparse: (coalesced,); quantized: (scale, zero_point) or (axis,)


class Ordinary(msgspec.Struct, array_like=True, frozen=True):
    """A dense tensor alone in its buffer.

    A table holds it as encoded bytes. The same records come often, and both ends use the bytes as a cache key.
    """

    dtype: str
    shape: tuple[int, ...]
    requires_grad: bool
    expanded: bool  # the buffer holds one element, and all other elements are equal to it
    form: str = ""  # in which the memory travels, see ``buffer_forms``; the bytes of most records end before it


class TensorTable(msgspec.Struct, array_like=True, frozen=True):
    """All tensors of one message.

    If all tensors are ordinary, the table has one record for each buffer, or one for each slot; in the second case
    ``lent`` names the slots and the devices to arrive on. Otherwise it has specs and parts.
    """

    specs: tuple[TensorSpec, ...] = ()
    parts: tuple[Part, ...] = ()
    ordinary: tuple[Annotated[bytes, msgspec.Meta(max_length=MAX_RECORD_BYTES)], ...] = ()
    lent: tuple[tuple[int, int, str], ...] = ()


EMPTY_TABLE = TensorTable()


def encode_record(record: Ordinary) -> bytes:
    """The bytes of a record of an ordinary tensor."""
    fields = msgspec.structs.astuple(record)
    return msgspec.msgpack.encode(fields if record.form else fields[:-1])


decode_record = msgspec.msgpack.Decoder(Ordinary).decode
"""Decode a record of an ordinary tensor; raises what msgspec raises. See ``read_record``."""


def read_record(record: bytes) -> Ordinary:
    """Decode a record of an ordinary tensor. Raises ``ProtocolError``."""
    try:
        return decode_record(record)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"malformed record of a tensor: {error}") from error
