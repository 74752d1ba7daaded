"""Nested values arrive as pickled values do: pickle is the oracle."""

from __future__ import annotations

import copyreg
import dataclasses
import operator
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backhaul._wire import codec, nested
from backhaul._wire.codec import Encoded
from backhaul._wire.messages import NESTED, Payload, pack, unpack
from backhaul.errors import ProtocolError
from tools.fuzz.twins import describe

from .values import Level, Mode, Pair, Spot, assert_same, leaves, values_with_shared_parts


@dataclasses.dataclass
class Point:
    x: Any
    y: Any = 0

    def length(self) -> Any:
        return self.x

    @classmethod
    def origin(cls) -> Point:
        return cls(0)


@dataclasses.dataclass
class Slotted:
    __slots__ = ("x",)
    x: int


@dataclasses.dataclass
class Reduced:
    x: Any

    def __reduce__(self) -> Any:
        return Reduced, ("reduced",)


@dataclasses.dataclass
class Stated:
    x: Any

    def __getstate__(self) -> Any:
        return {"x": "stated"}


@dataclasses.dataclass
class Registered:
    x: Any


@dataclasses.dataclass(frozen=True)
class Cold:
    x: Any


class NoData(Point):
    pass


def shout(text: str) -> str:
    return text.upper()


def nested_of(values: Sequence[Any], *, main_shared: bool = False) -> Encoded | None:
    return codec._encode_nested(values, main_shared, None, False)


def read(encoded: Encoded) -> list[Any]:
    payload = unpack(pack(encoded.payload), Payload)
    return codec.decode(payload, [bytearray(buffer) for buffer in encoded.buffers])


def pickled(values: Sequence[Any]) -> list[Any]:
    return read(codec._encode_pickled(values, [str(place) for place in range(len(values))], False, None))


@given(st.lists(st.one_of(leaves, values_with_shared_parts(), st.builds(Point, leaves, leaves)), max_size=4))
@settings(max_examples=300)
def test_nested_values_arrive_as_pickled_values_do(values: list[Any]) -> None:
    encoded = nested_of(values)
    if encoded is not None:
        assert encoded.payload.loose == NESTED
        made = read(encoded)
        assert describe(made) == describe(pickled(values))


with_more, with_less = Point(1), Point(1)
vars(with_more)["more"] = 5
del with_less.y

SAMPLES = {
    "function": shout,
    "builtin function": len,
    "method of a C type": operator.add,
    "class": Point,
    "class of C": dict,
    "class method": Point.origin,
    "bound method": Point(3).length,
    "dataclass": Point(1, [2]),
    "frozen dataclass": Cold({"key": 1}),
    "dataclass with an attribute more": with_more,
    "dataclass without an attribute": with_less,
    "set": {1, "two", (3,)},
    "frozenset": frozenset({1, None}),
    "complex": complex(-0.0, float("inf")),
    "size": torch.Size([1, 2]),
    "dtype": torch.bfloat16,
    "device": torch.device("cuda", 3),
    "device without an index": torch.device("cpu"),
    "nest": {"a": [(), {}, [], [[1.5, None]]], ("b", 2): {3: torch.ones(2)}},
}


@pytest.mark.parametrize("name", SAMPLES)
def test_what_is_sent_nested(name: str) -> None:
    value = SAMPLES[name]
    encoded = nested_of([value, [value]] if name in ("function", "dtype", "size", "complex") else [value])
    assert encoded is not None
    (made, *_), (expected,) = read(encoded), pickled([value])
    assert type(made) is type(expected)
    if isinstance(value, Point):
        assert vars(made) == vars(expected)
    elif isinstance(value, types.MethodType):
        assert made() == expected() == value()
    elif name == "nest":
        assert_same(made, value)
    else:
        assert made == expected


@pytest.mark.parametrize(
    "value",
    [
        *(Slotted(1), Reduced(1), Stated(1), NoData(1), Spot(1), Pair(1, 2)),
        *(Level.LOW, Mode.READ, lambda: 1, shout.__get__(1), range(3), ..., object(), bytearray(b"x")),
        *(torch.nn.Linear(1, 1), torch.nn.Parameter(torch.ones(1)), Path("path"), ValueError("x"), 1 << 64, "grüße"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_left_to_pickle(value: Any) -> None:
    assert nested_of([value]) is None
    assert nested_of([[(value,)]]) is None


def test_a_class_with_a_reducer_is_left_to_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nested_of([Registered(1)]) is not None
    monkeypatch.setitem(copyreg.dispatch_table, Registered, lambda value: (Registered, ("registered",)))
    assert nested_of([Registered(1)]) is None


def test_a_class_whose_name_names_another_is_left_to_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Registered
    assert nested_of([first(1)]) is not None
    monkeypatch.setitem(globals(), "Registered", dataclasses.make_dataclass("Registered", ["x"]))
    assert nested_of([first(1)]) is None


def test_classes_of_a_main_that_is_not_shared_are_left_to_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    import __main__

    own: Any = dataclasses.make_dataclass("Own", ["x"])
    own.__module__ = "__main__"
    monkeypatch.setattr(__main__, "Own", own, raising=False)
    for value in (own, own(1)):
        assert nested_of([value]) is None
        assert nested_of([value], main_shared=True) is not None


def test_modules_that_go_by_value_are_left_to_pickle() -> None:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        for value in (Point(1), shout, Point):
            assert nested_of([value]) is None
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert nested_of([Point(1), shout, Point]) is not None


def test_what_comes_twice_is_one_object() -> None:
    for value in ([], {}, {1}, Point(1), Point(1).length):
        assert nested_of([value]) is not None
        assert nested_of([value, (value,)]) is None
    ring: list[Any] = []
    ring.append(ring)
    assert nested_of([ring]) is None
    point = Point(1)
    point.x = [point]
    assert nested_of([point]) is None


def test_temporary_parts_are_not_mistaken_for_each_other() -> None:
    """Each method makes an object that only the encoder has. Its id must not be that of the next one."""
    encoded = nested_of([[Point(number).length for number in range(30)]])
    assert encoded is not None
    (made,) = read(encoded)
    assert [method() for method in made] == list(range(30))


@pytest.mark.parametrize(("count", "fits"), [(511, True), (512, False)])
def test_the_number_of_values_is_limited(count: int, fits: bool) -> None:
    assert (nested_of([[0] * count]) is not None) == fits
    assert (nested_of([[0] * (count - 10), (0,) * 9]) is not None) == fits


@pytest.mark.parametrize(("depth", "fits"), [(32, True), (33, False)])
def test_the_depth_is_limited(depth: int, fits: bool) -> None:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    assert (nested_of([value]) is not None) == fits


@pytest.mark.parametrize(
    "flat", [[], ["text"], [True], [0], [0, 0], [0, -1], [0, 0, 0], [99, 1], [3, 1], [13], [14, 1], [15], [16], [10, 5]]
)
def test_malformed_values_are_refused(flat: list[Any]) -> None:
    with pytest.raises((ProtocolError, ValueError, TypeError, AttributeError, IndexError)):
        nested.restore(flat, [], None)
