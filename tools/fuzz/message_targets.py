"""Fuzz targets that read messages and the values in them."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import msgspec
import torch

from backhaul._autograd.ids import ContextId, MessageId
from backhaul._autograd.messages import (
    Abort,
    AutogradNote,
    Gradients,
    Know,
    PassSpec,
    PassTally,
    Release,
    Report,
)
from backhaul._rpc.cluster.membership_table import Standing, WorkerRecord
from backhaul._wire import messages, plain, value_count
from backhaul._wire.codec import encode, load
from backhaul._wire.compression import compress
from backhaul._wire.messages import Fault, Hello, Payload, Refuse, Reply, Request, pack, unpack
from backhaul._wire.strict import check_payload
from backhaul._wire.tensors.buffer_forms import readable_forms
from backhaul._wire.tensors.reader import tensors_of
from backhaul._wire.tensors.writer import TensorWriter
from backhaul.errors import LimitError, ProtocolError
from tools.fuzz.target import LIMIT_BYTES, MAX_VALUES, FindingError, Target, check_value_count, sample_values

_SPEC = PassSpec(ContextId(1 << 48), 1, 2, profiles=(3,))
_NOTE = AutogradNote(ContextId(1 << 48), MessageId(7), (0, 2), (1, 2, 3))
_PAYLOAD = Payload(plain=[1, "two", 3.0])
_LEFT = messages.Departure("incarnation", 1, "name", "proof")
_MESSAGES: tuple[msgspec.Struct, ...] = (
    Hello("c", "d", b"record", (_LEFT,), True),
    Refuse("no"),
    Request("operator:add", _PAYLOAD, True, {"autograd": b"note"}),
    Reply(_PAYLOAD, {"rref": b"note"}),
    Fault("worker", "ValueError", "text", "trace", _PAYLOAD),
    messages.CallTally(1, 2, 3),
    messages.Count(1),
    _NOTE,
    Gradients(_SPEC, [MessageId(7), MessageId(8)], [1, 2], _PAYLOAD, _NOTE, PassTally((1, 2), {3: 4})),
    Report(_SPEC, PassTally((1,), {2: 3}), 4, Fault("w", "t", "m", "tb"), 5, "gone"),
    Abort(_SPEC),
    Release(1 << 48),
    Know(1 << 48),
    WorkerRecord(1, "name", "incarnation", "host", ("tcp:127.0.0.1:1",), "main", 1 << 20),
    messages.Join(b"record"),
    messages.Welcome(b"record", (b"one", b"two"), (_LEFT,)),
    messages.Cancel((1, 2, 3)),
    Standing(("one", "two"), ("three",), (_LEFT,)),
)


def _values_in(value: Any) -> int:
    """The number of values in a decoded message."""
    found, left = 0, [value]
    while left:
        each = left.pop()
        found += 1
        if isinstance(each, dict):
            left += [*each.keys(), *each.values()]
        elif isinstance(each, (list, tuple)):
            left += each
    return found


class CountTarget(Target):
    """The count of values. It must not be less than the number of decoded values, and not more than the limit."""

    name = "counting"
    expected = (LimitError,)

    def seeds(self) -> list[bytes]:
        samples: list[Any] = [
            *([[]], [[1]] * 400, [[[[]]] * 20] * 20, {"a": [1] * 40, "b": {"c": b"x" * 300}}, ["x" * 70_000, 1.5]),
            *(
                [list(range(4090))],
                [[0] * 15] * 200,
                [{}] * 100,
                [None, True, -5, 1 << 40, msgspec.msgpack.Ext(3, b"")],
            ),
        ]
        return [msgspec.msgpack.encode(sample) for sample in samples]

    def take(self, data: bytes) -> object:
        check_value_count(data)
        _, found = value_count.count(data, MAX_VALUES, 256)
        try:
            value = msgspec.msgpack.decode(data)
        except (msgspec.DecodeError, ValueError, OverflowError, TypeError, RecursionError):
            return None
        if not _values_in(value) <= found <= MAX_VALUES:
            raise FindingError(f"{_values_in(value)} values decoded, {found} counted, {MAX_VALUES} allowed")
        return found


class MessageTarget(Target):
    """The body of every kind of message. The first byte of an input selects the kind."""

    name = "messages"
    expected = (ProtocolError, LimitError)

    def seeds(self) -> list[bytes]:
        return [bytes([index]) + pack(message) for index, message in enumerate(_MESSAGES)]

    def take(self, data: bytes) -> object:
        check_value_count(data[1:])
        return unpack(data[1:], type(_MESSAGES[data[0] % len(_MESSAGES)])) if data else None


class TensorTarget(Target):
    """A payload with its buffers: the tensors, and the values around them. Pickles are not read.

    An input has the number of buffers (1 byte), their lengths (2 bytes each), the length of the payload (2 bytes), the
    payload, and the buffers.
    """

    name = "tensors"
    expected = (ProtocolError, LimitError)

    def seeds(self) -> list[bytes]:
        found = []
        messages = [encode(values, names=["value"] * len(values)) for values in sample_values()]
        numbers = torch.linspace(-2, 2, 600)
        for values in ([numbers], [numbers[:400].view(20, 20).t(), torch.eye(300).to_sparse()]):
            smaller = (compress(encode(values, names=["value"] * 2), form) for form in readable_forms())
            messages += [each for each in smaller if each is not None]
        for encoded in messages:
            buffers = [bytes(buffer) for buffer in encoded.buffers]
            body = pack(encoded.payload)
            head = bytes([len(buffers)]) + b"".join(len(b).to_bytes(2, "little") for b in buffers)
            found.append(head + len(body).to_bytes(2, "little") + body + b"".join(buffers))
        return found

    def take(self, data: bytes) -> object:
        file = io.BytesIO(data)
        sizes = [int.from_bytes(file.read(2), "little") for _ in range(int.from_bytes(file.read(1), "little") & 15)]
        body = file.read(int.from_bytes(file.read(2), "little"))
        check_value_count(body)
        payload = unpack(body, Payload)
        buffers = [bytearray(file.read(size)) for size in sizes]
        if payload.plain is None:
            return None
        with contextlib.suppress(ProtocolError):
            check_payload(payload, buffers, LIMIT_BYTES)  # it must not raise any other error
        tensors = tensors_of(payload, buffers)
        load(payload, buffers, tensors)
        for tensor in tensors:
            if tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_nested:
                self._check(tensor, sum(map(len, buffers)))
        return len(tensors)

    @staticmethod
    def _check(tensor: torch.Tensor, given: int) -> None:
        if tensor.untyped_storage().nbytes() > 4 * given + 64:
            raise FindingError(
                f"{given} bytes became a tensor with {tensor.untyped_storage().nbytes()} bytes of storage"
            )
        if tensor.numel() and tensor.numel() < 1 << 16 and not tensor.is_quantized:
            reach = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            if (tensor.storage_offset() + reach) * tensor.itemsize > tensor.untyped_storage().nbytes():
                raise FindingError(
                    f"a tensor of shape {tuple(tensor.shape)} and stride {tensor.stride()} reaches beyond its memory"
                )


class PlainTarget(Target):
    """The plain encoding, which peers use that do not trust each other."""

    name = "plain"
    expected = (ProtocolError, LimitError)
    _tensors = (torch.ones(2), torch.zeros(1))
    _decode = msgspec.msgpack.Decoder(list[Any]).decode

    def seeds(self) -> list[bytes]:
        values: list[Any] = [
            *(1, None, 2.5, "text", b"x", 1 << 70, "\ud800", 1j, torch.Size([1, 2]), torch.float32),
            *([1, [2, (3, {4})]], {"a": [1], 2: frozenset([3])}, torch.device("cpu"), [torch.ones(1)]),
            *([[]] * 700, {(): ()}, set(range(900)), {number: [] for number in range(300)}),
            *(PassTally((1, 2), {3: 4}), [_SPEC, PassTally(tuple(range(500)), dict.fromkeys(range(500), 1))]),
        ]
        flattener = plain.Flattener(TensorWriter())
        return [msgspec.msgpack.encode([flattener.flatten(value, "value")]) for value in values]

    def take(self, data: bytes) -> object:
        check_value_count(data)
        try:
            flat = self._decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        return plain.restore(flat, self._tensors, values=MAX_VALUES)
