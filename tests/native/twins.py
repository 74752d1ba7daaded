"""The two twins of the functions of ``_wire.call_frames``, and a description of values by which they are compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from backhaul._native import core
from backhaul._wire import call_frames
from backhaul._wire.codec import Encoded
from backhaul._wire.frame_reader import cut_frames_in_python
from backhaul._wire.frames import Frame

needs_core = pytest.mark.skipif(core is None, reason="the native core is not compiled, or BACKHAUL_NATIVE is 0")

FUNCTION = "operator:add"
NAMES = [f"values[{number}]" for number in range(2000)]


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
        encoded: Encoded = self.encode_values(tuple(values), NAMES[: len(values)], main_shared, False, None)
        return encoded

    def request(
        self, values: Sequence[Any], *, main_shared: bool = False, notes: dict[str, bytes] | None = None
    ) -> Frame:
        encoded = self.encode(values, main_shared=main_shared)
        frame: Frame = self.request_frame(7, FUNCTION, encoded, False, notes or {}, 2.5)
        return frame

    def reply(self, value: Any) -> Frame:
        frame: Frame = self.reply_frame(1 << 63, self.encode([value]), {"note": b"bytes"})
        return frame

    def cut(self, wire: bytes) -> list[Frame]:
        """The frames in bytes that have been received."""
        frames: list[Frame] = []
        assert self.cut_frames(frames, bytearray(wire) + bytes(8), 0, len(wire), 1 << 30, 1 << 20) == len(wire)
        return frames

    def values_of(self, wire: bytes, worker: object = None) -> list[Any]:
        """The values of a request that has been received."""
        (frame,) = self.cut(wire)
        request = self.read_request(frame)
        values: list[Any] = request.values(request.tensors(None), worker)
        return values


PYTHON = Twin(call_frames, "_in_python")
CORE = Twin(core, "") if core is not None else PYTHON


def by_core(encoded: Encoded) -> bool:
    """Whether the core has encoded the values itself."""
    return not isinstance(encoded, Encoded)


def wire_of(frame: Frame) -> bytes:
    return b"".join(bytes(part) for part in frame.parts())


def carry(values: Sequence[Any], sender: Twin, receiver: Twin) -> list[Any]:
    """Send values in a request from one twin to the other."""
    return receiver.values_of(wire_of(sender.request(values)))


def describe(value: Any) -> Any:
    """What makes up a value, to be compared: types, contents, and which parts are one object."""
    known: dict[int, int] = {}

    def parts(value: Any) -> Iterator[Any]:
        yield type(value)
        if isinstance(value, (list, dict, set, bytearray, torch.Tensor)) or dataclasses.is_dataclass(value):
            number = known.setdefault(id(value), len(known))
            yield "object", number
            if number < len(known) - 1:
                return
        if isinstance(value, torch.Tensor):
            yield from (value.dtype, value.shape, value.requires_grad, value.device, value.layout)
            if value.layout is torch.strided and value.device.type == "cpu" and not value.is_quantized:
                yield value.stride()
                dense = torch.empty(value.shape, dtype=value.dtype).copy_(value.detach())
                yield bytes(dense.reshape(-1).view(torch.uint8).tolist())
            else:
                yield repr(value)
        elif isinstance(value, float):
            yield value.hex()
        elif isinstance(value, dict):
            yield tuple((tuple(parts(key)), tuple(parts(item))) for key, item in value.items())
        elif isinstance(value, (list, tuple)):
            yield tuple(tuple(parts(item)) for item in value)
        elif isinstance(value, (set, frozenset)):
            yield sorted(repr(tuple(parts(item))) for item in value)
        elif dataclasses.is_dataclass(value):
            yield tuple(parts(getattr(value, "__dict__", None)))
        else:
            found = getattr(value, "__qualname__", None) or repr(value)
            yield None if " at 0x" in found else found

    return tuple(parts(value))
