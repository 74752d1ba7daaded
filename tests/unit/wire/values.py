"""Values of all kinds, and the check that what arrives is what was sent."""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st


class Colour(enum.Enum):
    RED = "red"
    BLUE = (1, 2)


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Mode(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Node:
    value: Any
    next: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Spot:
    where: Any


class Name(str):
    __slots__ = ()


class Count(int):
    pass


class Weight(float):
    pass


def assert_same(made: Any, value: Any) -> None:
    """Check that types and values are the same, and that exactly those parts are shared that the original shares."""
    partner: dict[int, Any] = {}
    origin: dict[int, Any] = {}

    def check(made: Any, value: Any) -> None:
        assert type(made) is type(value)
        if isinstance(value, (list, dict, set, torch.Tensor, Node, bytearray)):
            assert partner.setdefault(id(value), made) is made
            assert origin.setdefault(id(made), value) is value
            if partner[id(value)] is not made:
                return
        if isinstance(value, torch.Tensor):
            assert (made.dtype, made.shape, made.requires_grad) == (value.dtype, value.shape, value.requires_grad)
            assert torch.equal(made.nan_to_num(nan=123.0), value.nan_to_num(nan=123.0))
        elif isinstance(value, float):
            assert made == value or (math.isnan(made) and math.isnan(value))
            assert math.copysign(1, made) == math.copysign(1, value) or math.isnan(value)
        elif isinstance(value, dict):
            assert list(made) == list(value)
            for mine, yours in zip(made.items(), value.items(), strict=True):
                check(mine[0], yours[0])
                check(mine[1], yours[1])
        elif isinstance(value, (list, tuple)):
            assert len(made) == len(value)
            for mine, yours in zip(made, value, strict=True):
                check(mine, yours)
        elif isinstance(value, (set, frozenset)):
            assert made == value
            assert {(type(one), one) for one in made} == {(type(one), one) for one in value}
        elif isinstance(value, Node):
            check(made.value, value.value)
            check(made.next, value.next)
        elif isinstance(value, Spot):
            check(made.where, value.where)
        else:
            assert made == value

    check(made, value)


text = st.text(st.characters(codec="utf-8") | st.characters(categories=["Cs"]), max_size=20)
integers = st.one_of(
    st.integers(),
    st.integers(min_value=-(1 << 70), max_value=1 << 70),
    st.sampled_from([(1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, -(1 << 63), -(1 << 63) - 1, 1 << 4000]),
)
hashable_leaves = st.one_of(
    st.none(),
    st.booleans(),
    integers,
    st.floats(allow_nan=False),
    text,
    st.binary(max_size=20),
    st.sampled_from([*Colour, *Level, Mode.READ, Mode.READ | Mode.WRITE]),
    st.builds(Name, text),
    st.builds(Count, st.integers(-5, 5)),
    st.builds(Weight, st.floats(allow_nan=False)),
)
hashables = st.recursive(
    hashable_leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(tuple),
        st.frozensets(inner, max_size=3),
        st.builds(Pair, inner, inner),
        st.builds(Spot, inner),
    ),
    max_leaves=4,
)
tensors = st.one_of(
    st.builds(torch.tensor, st.lists(st.floats(width=32), max_size=5)),
    st.builds(torch.tensor, st.lists(st.integers(-5, 5), max_size=5)),
    st.builds(torch.tensor, st.floats(), dtype=st.sampled_from([torch.float64, torch.bfloat16])),
    st.integers(0, 3).map(lambda n: torch.randn(n, 3, requires_grad=True)),
    st.integers(1, 3).map(lambda n: torch.randn(n, 3).t()),
)
leaves = st.one_of(hashables, st.floats(), tensors, st.binary(max_size=9).map(bytearray))


def nests(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.lists(inner, max_size=4).map(tuple),
            st.dictionaries(hashables, inner, max_size=4),
            st.sets(hashables, max_size=4),
            st.builds(Node, inner, inner),
            st.builds(Pair, inner, inner),
            st.builds(Spot, inner),
        ),
        max_leaves=12,
    )


@st.composite
def values_with_shared_parts(draw: st.DrawFn) -> Any:
    shared = draw(st.lists(nests(leaves), min_size=1, max_size=3))
    return draw(nests(leaves | st.sampled_from(shared)))
