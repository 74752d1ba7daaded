"""Counts the values of a message and their nesting depth before the message is decoded. Pure.

A message is msgpack: each value begins with a header that says how long the value is, or how many values it holds. The
count reads headers and skips everything else. It creates no object for a value, and it stops at the limit.
"""

from __future__ import annotations

import struct

import msgspec

from backhaul._wire.memory import Buffer

LEVELS = 8
"""The nesting depth, in a message, at which its values and the descriptions of its tensors begin."""

_BUFFERS_PER_TENSOR = 3  # a compressed sparse tensor has three
_MIN_BUFFERS = 1024  # gradients of several messages that go together have fewer
_MAX_COPIED_BYTES = 1 << 22  # up to this size a copy costs less than slow access to each byte

# Bytes that cannot begin an array or a map.
_NO_HEADERS = bytes(byte for byte in range(256) if not (0x80 <= byte <= 0x9F or 0xDC <= byte <= 0xDF))

# For each first byte: the format of the number after it, how many more bytes the header has, and how many values one
# unit of the number means (0: the number is a number of bytes).
_B, _H, _I = struct.Struct(">B"), struct.Struct(">H"), struct.Struct(">I")
_LONG = {
    **{0xC4: (_B, 0, 0), 0xC5: (_H, 0, 0), 0xC6: (_I, 0, 0)},  # bytes
    **{0xC7: (_B, 1, 0), 0xC8: (_H, 1, 0), 0xC9: (_I, 1, 0)},  # extensions, which have a type
    **{0xD9: (_B, 0, 0), 0xDA: (_H, 0, 0), 0xDB: (_I, 0, 0)},  # text
    **{0xDC: (_H, 0, 1), 0xDD: (_I, 0, 1), 0xDE: (_H, 0, 2), 0xDF: (_I, 0, 2)},  # arrays, maps
}


def _headers() -> list[tuple[int, int]]:
    """For each first byte: the size of the value, or of its header, and how many values it holds. If the size is 0,
    ``_read_long_header`` reads the value.
    """
    found = [(1, 0)] * 256  # numbers in one byte, nil, false, true
    found[0x80:0xC0] = [(1, 2 * n) for n in range(16)] + [(1, n) for n in range(16)] + [(1 + n, 0) for n in range(32)]
    fixed = {0xCA: 5, 0xCB: 9, 0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9, 0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9}
    fixed |= {0xD4: 3, 0xD5: 4, 0xD6: 6, 0xD7: 10, 0xD8: 18}  # extensions
    for head, size in {**fixed, **dict.fromkeys((*_LONG, 0xC1), 0)}.items():
        found[head] = (size, 0)
    return found


_HEADERS = _headers()


class Bounds(msgspec.Struct, array_like=True, frozen=True):
    """The limits of a worker for one message. They are part of the worker's record, so that peers do not send what it
    would refuse. 0 or less: no limit.
    """

    values: int = 0
    depth: int = 0
    tensors: int = 0


def excess(body: Buffer, values: int, depth: int) -> str:
    """The option that a message exceeds, ``"limits.values"`` or ``"limits.depth"``; empty if it exceeds neither.

    This function does not report bytes that are not msgpack. Decoding reports them.

    Args:
        body: The message.
        values: How many values the message may have. An array or a map counts as one value plus those that it holds.
        depth: How deep arrays and maps may be nested.

    Example:
        >>> message = msgspec.msgpack.encode([1, [2, [3]], {"a": b"bytes"}])
        >>> excess(message, 9, 3), excess(message, 8, 3), excess(message, 9, 2)
        ('', 'limits.values', 'limits.depth')
    """
    size = len(body)
    # A value takes at least one byte, so most messages need no count.
    if size <= values and (size <= depth or len(bytes(body).translate(None, _NO_HEADERS)) <= depth):
        return ""
    return count(body, values, depth)[0]


def count(body: Buffer, values: int, depth: int) -> tuple[str, int]:
    """As ``excess``, and the number of values. If the message exceeds a limit, it may have more values than that."""
    data = bytes(body) if len(body) <= _MAX_COPIED_BYTES else memoryview(body).cast("B")
    at, end, found = 0, len(data), 1
    pending = 1  # values still to come at this level
    outer: list[int] = []  # values still to come at the enclosing levels
    while at < end:
        head = data[at]
        size, items = _HEADERS[head]
        if not size:
            size, items = _read_long_header(data, at)
        at += size
        pending -= 1
        if items:
            found += items
            if found > values:
                return "limits.values", found
            if len(outer) >= depth:
                return "limits.depth", found
            outer.append(pending)
            pending = items
        else:
            while not pending:
                if not outer:
                    return "", found
                pending = outer.pop()
    return "", found


def _read_long_header(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """Size and items of a value whose header is longer than one byte. Bytes that are not msgpack end the message."""
    stored, more, each = _LONG.get(data[at], (_B, 0, 0))
    if data[at] not in _LONG or at + 1 + stored.size > len(data):
        return len(data), 0
    number: int = stored.unpack_from(data, at + 1)[0]
    return 1 + stored.size + more + (0 if each else number), each * number


def most_buffers(tensors: int) -> int:
    """How many buffers a frame may have if a message may have this many tensors."""
    return max(_BUFFERS_PER_TENSOR * tensors, _MIN_BUFFERS)
