"""Messages with compressed tensors: puts the memory of an encoded message's tensors into a smaller form.

The table of the message names the form of each buffer. So the receiver needs no options, and nothing is kept from one
message to the next. ``buffer_forms`` converts the memory, ``tensors.reader`` undoes it. Knows no peer and no option.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from backhaul._wire.codec import Encoded
from backhaul._wire.memory import Buffer, block_type
from backhaul._wire.messages import Payload, unpack
from backhaul._wire.tensors.buffer_forms import LOSSY, shrink
from backhaul._wire.tensors.dtypes import DTYPES
from backhaul._wire.tensors.specs import MAX_RECORD_BYTES, Part, TensorTable, encode_record, read_record

_LEAST_BYTES = 1024  # a smaller buffer travels as it is
_EXACT_LAYOUTS = frozenset(("quantized", "quantized_channel"))


def compress(encoded: Encoded, form: str) -> Encoded | None:
    """The same values, with tensors in a form. None: no buffer of the message can be in that form.

    A lossy form takes neither parameters of modules nor tensors in a pickle, which may be parts of a module's state.
    """
    payload = encoded.payload
    if not isinstance(payload, Payload):  # the native core has encoded it
        payload = unpack(bytes(payload), Payload)
    if form in LOSSY and payload.pickle:
        return None
    table, shrinker = payload.tensors, _Shrinker(encoded.buffers, form)
    exact = {index for index, tensor in enumerate(encoded.tensors) if isinstance(tensor, torch.nn.Parameter)}
    exact = exact if form in LOSSY else set()
    if table.lent:
        return None
    change = _compress_ordinary if table.ordinary else _compress_parts
    table = change(table, shrinker, exact)
    if not shrinker.made:
        return None
    return Encoded(
        msgspec.structs.replace(payload, tensors=table),
        shrinker.buffers,
        [encoded.keep, shrinker.made],
        encoded.tensors,
        encoded.parcels,
        encoded.lease,
        encoded.unrecorded,
        encoded.copies,
    )


class _Shrinker:
    """The buffers of one message on their way into a form.

    Attributes:
        buffers: The buffers, in that form where ``shrink`` has returned True.
        made: The owners of the new memory.
    """

    def __init__(self, buffers: Sequence[Buffer], form: str) -> None:
        self.buffers = list(buffers)
        self.form = form
        self.made: list[torch.Tensor] = []

    def shrink(self, index: int, dtype: str) -> bool:
        """Put a buffer into the form, if that is possible and saves bytes."""
        buffer = self.buffers[index]
        if len(buffer) < _LEAST_BYTES:
            return False
        made = shrink(buffer, self.form, DTYPES[dtype])
        if made is None:
            return False
        self.buffers[index] = block_type(len(made)).from_address(made.data_ptr())
        self.made.append(made)
        return True


def _compress_ordinary(table: TensorTable, shrinker: _Shrinker, exact: set[int]) -> TensorTable:
    records = list(table.ordinary)
    for index, record in enumerate(records):
        read = read_record(record)
        named = encode_record(msgspec.structs.replace(read, form=shrinker.form))
        fits = not read.expanded and index not in exact and len(named) <= MAX_RECORD_BYTES
        if fits and shrinker.shrink(index, read.dtype):
            records[index] = named
    return msgspec.structs.replace(table, ordinary=tuple(records))


def _compress_parts(table: TensorTable, shrinker: _Shrinker, exact: set[int]) -> TensorTable:
    kept = {
        part
        for index, spec in enumerate(table.specs)
        for part in spec.parts
        if shrinker.form in LOSSY and (index in exact or spec.layout in _EXACT_LAYOUTS)
    }
    parts: list[Part] = list(table.parts)
    of_buffers: dict[int, list[int]] = {}
    for index, part in enumerate(parts):
        if part.buffer >= 0:
            of_buffers.setdefault(part.buffer, []).append(index)
    for buffer, indices in of_buffers.items():
        dtypes = {parts[index].dtype for index in indices}
        if len(dtypes) == 1 and kept.isdisjoint(indices) and shrinker.shrink(buffer, dtypes.pop()):
            for index in indices:
                parts[index] = msgspec.structs.replace(parts[index], form=shrinker.form)
    return msgspec.structs.replace(table, parts=tuple(parts))
