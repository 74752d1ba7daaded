"""The two twins of ``_wire.call_frames`` and ``_wire.frame_reader``: Python and the native core, to be compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from backhaul._native import core
from backhaul._wire import call_frames
from backhaul._wire.codec import Encoded
from backhaul._wire.frame_reader import cut_frames_in_python
from backhaul._wire.frames import Frame
from backhaul._wire.messages import Kind

FUNCTION = "operator:add"
NAMES = [f"values[{number}]" for number in range(2000)]

_MAX_DESCRIBED = 1 << 20  # elements of a tensor


class Twin:
    """The functions of one twin."""

    def __init__(self, source: Any, suffix: str) -> None:
        self.encode_values = getattr(source, f"encode_values{suffix}")
        self.request_frame = getattr(source, f"request_frame{suffix}")
        self.reply_frame = getattr(source, f"reply_frame{suffix}")
        self.read_request = getattr(source, f"read_request{suffix}")
        self.read_reply = getattr(source, f"read_reply{suffix}")
        self.cut_frames = cut_frames_in_python if suffix else source.cut_frames

    def encode(self, values: Sequence[Any], *, main_shared: bool = False) -> Encoded:
        """Encode the values of a message."""
        encoded: Encoded = self.encode_values(tuple(values), NAMES[: len(values)], main_shared, False, None, False)
        return encoded

    def request(self, values: Sequence[Any], *, notes: dict[str, bytes] | None = None) -> Frame:
        """The frame of a request with these values."""
        frame: Frame = self.request_frame(7, FUNCTION, self.encode(values), False, notes or {}, 2.5)
        return frame

    def reply(self, value: Any) -> Frame:
        """The frame of a reply."""
        frame: Frame = self.reply_frame(1 << 63, self.encode([value]), {"note": b"bytes"})
        return frame

    def cut(self, wire: bytes) -> list[Frame]:
        """The frames in bytes that have been received."""
        frames: list[Frame] = []
        self.cut_frames(frames, bytearray(wire) + bytes(8), 0, len(wire), 1 << 30, 1 << 20)
        return frames

    def values_of(self, wire: bytes, worker: object = None) -> list[Any]:
        """The values of a request that has been received."""
        (frame,) = self.cut(wire)
        request = self.read_request(frame)
        values: list[Any] = request.values(request.tensors(None), worker)
        return values

    def outcome(self, frame: Frame) -> Any:
        """What becomes of a message: a description of what is in it, or the type of the error."""
        try:
            if frame.kind == Kind.REPLY:
                reply = self.read_reply(frame)
                tensors = reply.tensors(None)
                return reply.notes, reply.requires_grad, describe(reply.value(tensors, None))
            request = self.read_request(frame)
            tensors = request.tensors(None)
            fields = request.function, request.keywords, request.notes, repr(request.left), request.requires_grad
            return fields, describe(tensors), describe(request.values(tensors, None))
        except Exception as error:
            return type(error)


PYTHON = Twin(call_frames, "_in_python")
CORE = PYTHON if core is None else Twin(core, "")
"""The native core; Python if there is no core."""


def by_core(encoded: Encoded) -> bool:
    """Whether the core has encoded the values itself."""
    return not isinstance(encoded, Encoded)


def wire_of(frame: Frame) -> bytes:
    """The bytes of a frame."""
    return b"".join(bytes(part) for part in frame.parts())


def received(frame: Frame) -> Frame:
    """A frame as it arrives, on memory of its own."""
    return Frame(frame.kind, frame.number, bytearray(frame.body), [bytearray(buffer) for buffer in frame.buffers])


def describe(value: Any) -> Any:
    """What makes up a value, to be compared: types, contents, and which parts are one object."""
    return tuple(_parts(value, {}))


def _parts(value: Any, known: dict[int, int]) -> Iterator[Any]:
    yield type(value)
    if isinstance(value, (list, dict, set, bytearray, torch.Tensor)) or dataclasses.is_dataclass(value):
        number = known.setdefault(id(value), len(known))
        yield "object", number
        if number < len(known) - 1:
            return
    if isinstance(value, torch.Tensor):
        yield from _parts_of_tensor(value)
    elif isinstance(value, float):
        yield value.hex()
    elif isinstance(value, dict):
        yield tuple((tuple(_parts(key, known)), tuple(_parts(item, known))) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        yield tuple(tuple(_parts(item, known)) for item in value)
    elif isinstance(value, (set, frozenset)):
        yield sorted(repr(describe(item)) for item in value)
    elif dataclasses.is_dataclass(value):
        yield tuple(_parts(getattr(value, "__dict__", None), known))
    else:
        found = getattr(value, "__qualname__", None) or repr(value)
        yield None if " at 0x" in found else found


def _parts_of_tensor(tensor: torch.Tensor) -> Iterator[Any]:
    yield from (tensor.dtype, tensor.shape, tensor.requires_grad, tensor.device, tensor.layout)
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized or tensor.is_nested:
        yield repr(tensor)
        return
    yield tensor.stride()
    tensor = tensor.detach()
    if tensor.numel() > _MAX_DESCRIBED:  # expanded
        tensor = tensor.as_strided((1,), (1,))
    dense = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    yield bytes(dense.reshape(-1).view(torch.uint8).tolist())
