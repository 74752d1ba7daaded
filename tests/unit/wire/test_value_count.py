"""Values are counted before they are decoded. The count is exact and allocates no more than copies of the bytes."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul._wire.messages import TREE, Payload, Request, pack
from backhaul._wire.value_count import Bounds, count, excess, most_buffers

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=300)
    | st.binary(max_size=300)
    | st.builds(msgspec.msgpack.Ext, st.integers(0, 127), st.binary(max_size=40))
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=3), inner, max_size=20),
    max_leaves=60,
)


def size_of(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(size_of, value.values()))
    return 1 + sum(map(size_of, value)) if isinstance(value, list) else 1


def depth_of(value: Any) -> int:
    """The nesting depth of arrays and maps that are not empty."""
    inner = list(value.values()) if isinstance(value, dict) else value
    if not isinstance(inner, list) or not inner:
        return 0
    return 1 + max(map(depth_of, inner))


@given(values)
def test_the_count_is_exact(value: Any) -> None:
    body, size, depth = msgspec.msgpack.encode(value), size_of(value), depth_of(value)
    for data in (body, bytearray(body), memoryview(body)):
        assert count(data, size, depth) == ("", size)
        assert excess(data, size, depth) == ""
        assert excess(data, size - 1, 1000) == ("limits.values" if depth else "")
        if depth:
            assert excess(data, size, depth - 1) == "limits.depth"


@pytest.mark.parametrize("size", [1 << 8, 1 << 16, (1 << 16) + 5])
@pytest.mark.parametrize("make", [lambda n: "x" * n, bytes, lambda n: msgspec.msgpack.Ext(5, bytes(n))])
def test_long_values_count_once(make: Any, size: int) -> None:
    body = msgspec.msgpack.encode([make(size - 1), make(size), [1]])
    assert count(body, 5, 2) == ("", 5)


@pytest.mark.parametrize("size", [15, 16, (1 << 16) - 1, 1 << 16])
def test_long_arrays_and_maps(size: int) -> None:
    assert count(msgspec.msgpack.encode([0] * size), 1 << 20, 1) == ("", 1 + size)
    assert count(msgspec.msgpack.encode(dict.fromkeys(range(size))), 1 << 20, 1) == ("", 1 + 2 * size)


def decoded(body: bytes) -> Any:
    try:
        return msgspec.msgpack.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError, OverflowError):
        return None


@given(st.binary(max_size=200) | values.map(msgspec.msgpack.encode).map(lambda body: body[:-1]))
def test_whatever_can_be_decoded_has_been_counted(body: bytes) -> None:
    option, found = count(body, 1000, 100)
    value = decoded(body)
    if value is not None and not option:
        assert found >= size_of(value)


def test_a_message_larger_than_what_is_copied() -> None:
    body = msgspec.msgpack.encode([bytes(5 << 20), [[]] * 100])
    assert count(bytearray(body), 1000, 8) == ("", 104 - 1)


def test_a_long_list_is_refused_by_its_header() -> None:
    """1.6 MB of empty lists: the count stops at the limit and allocates nothing for any list."""
    body = pack(Request("f", Payload(plain=[[1, *([[1]] * 800_000)]], loose=TREE)))
    assert len(body) > 1_600_000
    tracemalloc.start()
    try:
        assert excess(memoryview(bytearray(body)), 1 << 16, 64) == "limits.values"
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * len(body)  # only copies of the bytes


def test_bounds() -> None:
    assert most_buffers(16384) == 3 * 16384
    assert most_buffers(1) >= 512
    record = msgspec.msgpack.encode(Bounds(1, 2, 3))
    assert msgspec.msgpack.decode(record, type=Bounds) == Bounds(1, 2, 3)
