"""The whole path of a value over the wire, within one process: encode, write, read in pieces, decode."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from backhaul._wire.codec import Encoded, decode, encode
from backhaul._wire.frame_reader import FrameReader
from backhaul._wire.frames import Frame
from backhaul._wire.messages import Kind, Reply, pack, unpack

LIMIT = 1 << 30


def feed(reader: FrameReader, wire: bytes, sizes: Iterable[int] = (1 << 20,)) -> list[Frame]:
    """Feed ``wire`` to the reader in pieces of at most these sizes, which repeat."""
    frames: list[Frame] = []
    at = 0
    for size in itertools.cycle(sizes):
        if at == len(wire):
            break
        room = reader.space
        assert len(room) > 0, "the reader asks for bytes but has no room for them"
        count = min(size, len(room), len(wire) - at)
        room[:count] = wire[at : at + count]
        at += count
        frames += reader.fed(count)
    return frames


def wire_of(*frames: Frame) -> bytes:
    return b"".join(bytes(part) for frame in frames for part in frame.parts())


def depart(value: Any, *, name: str = "result", main_shared: bool = False) -> Encoded:
    return encode([value], names=[name], main_shared=main_shared)


def frame_of(encoded: Encoded) -> Frame:
    return Frame(Kind.REPLY, 1, pack(Reply(encoded.payload)), encoded.buffers, encoded.keep)


def arrive(wire: bytes) -> list[Any]:
    (frame,) = feed(FrameReader(LIMIT), wire)
    return decode(unpack(frame.body, Reply).payload, frame.buffers)


def carry_all(values: Sequence[Any], *, main_shared: bool = False) -> list[Any]:
    """Send several values in one message; return what arrives."""
    names = [f"values[{index}]" for index in range(len(values))]
    return arrive(wire_of(frame_of(encode(values, names=names, main_shared=main_shared))))


def carry(value: Any, *, main_shared: bool = False) -> Any:
    """Send one value; return what arrives."""
    (made,) = carry_all([value], main_shared=main_shared)
    return made
