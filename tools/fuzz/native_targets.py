"""Fuzz targets for the native core: it must make of every input what its twin in Python makes of it."""

from __future__ import annotations

import io
from typing import Any

import torch

from backhaul._native import core
from backhaul._wire.compression import compress
from backhaul._wire.frames import Frame
from backhaul._wire.messages import Kind, Reply, Request, unpack
from backhaul.errors import ProtocolError
from tools.fuzz.frame_targets import sample_frames
from tools.fuzz.target import LIMIT_BYTES, FindingError, Target, sample_values
from tools.fuzz.twins import CORE, PYTHON, Twin, received, wire_of


def _sample_calls() -> list[Frame]:
    tensor = torch.ones(2, 3, requires_grad=True)
    nested: list[list[Any]] = [
        [({"key": [tensor, (1, 2)]}, {3, 4}), [None, [[[]]]], torch.float32],
        [torch.Size([1, 2]), torch.device("cpu"), 1j, frozenset((1,)), max, (), [], {}],
        [tensor, 5, tensor, torch.zeros(1).expand(3, 3), torch.arange(400)],
        [[[[[[[[[[1]]]]]]]]]],
    ]
    notes = {"autograd": b"note", "rref": bytes(40)}
    samples = [*sample_values(), *nested]
    smaller = compress(PYTHON.encode([torch.linspace(-2, 2, 600)]), "int8")
    assert smaller is not None
    return [
        PYTHON.reply_frame(7, smaller, {}),
        *(PYTHON.request(values, notes=notes) for values in samples),
        *map(PYTHON.reply, samples),
    ]


def _has_pickle(frame: Frame) -> bool:
    """Whether values are pickled. A broken pickle is not read, because it may do anything."""
    try:
        message: Any = unpack(frame.body, Reply if frame.kind == Kind.REPLY else Request)
    except ProtocolError:
        return False
    return message.payload.plain is None


class CallTarget(Target):
    """Requests and replies, by both twins.

    An input has the kind (1 byte: odd for replies), the number of buffers (1 byte), their lengths (2 bytes each), the
    length of the message (2 bytes), the message, and the buffers.
    """

    name = "calls"

    def seeds(self) -> list[bytes]:
        found = []
        for frame in _sample_calls():
            buffers = [bytes(buffer) for buffer in frame.buffers]
            head = bytes([frame.kind == Kind.REPLY, len(buffers)])
            sizes = b"".join(len(each).to_bytes(2, "little") for each in (*buffers, frame.body))
            found.append(head + sizes + bytes(frame.body) + b"".join(buffers))
        return found

    def take(self, data: bytes) -> object:
        file = io.BytesIO(data)
        kind = Kind.REPLY if file.read(1)[:1] > b"\0" else Kind.REQUEST
        count = int.from_bytes(file.read(1), "little") & 15
        sizes = [int.from_bytes(file.read(2), "little") for _ in range(count)]
        body = file.read(int.from_bytes(file.read(2), "little"))
        frame = Frame(kind, 7, body, [file.read(size) for size in sizes])
        if _has_pickle(frame):
            return None
        expected = PYTHON.outcome(received(frame))
        if core is not None and (found := CORE.outcome(received(frame))) != expected:
            raise FindingError(f"Python makes {expected} of it, and the core makes {found}")
        return None if isinstance(expected, type) else expected


class CutTarget(Target):
    """Frames that are cut out of memory, by both twins. The last byte of an input says where the memory begins."""

    name = "cuts"

    def seeds(self) -> list[bytes]:
        wires = list(map(wire_of, sample_frames()))
        return [wire + b"\0" for wire in [*wires, b"".join(wires[:4]), b"".join(wires[3:8])]]

    def take(self, data: bytes) -> object:
        start = data[-1] if data else 0
        expected = self._cut(PYTHON, data, start)
        if core is not None and (found := self._cut(CORE, data, start)) != expected:
            raise FindingError(f"Python makes {expected} of it, and the core makes {found}")
        return expected[1] or None

    @staticmethod
    def _cut(twin: Twin, data: bytes, start: int) -> Any:
        frames: list[Frame] = []
        memory = bytearray(data) + bytes(8)
        end = twin.cut_frames(frames, memory, min(start, len(data)), len(data), LIMIT_BYTES, 1 << 10)
        return end, [(frame.kind, frame.number, frame.body, frame.buffers) for frame in frames]
