"""Any value arrives with its types, and shares its parts as before. Errors name the part that cannot be sent.

Every test uses the whole path: encode, the bytes of a frame, a reader, decode. No test knows the format of a payload.
"""

from __future__ import annotations

import collections
import functools
import gc
import math
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from backhaul._wire.codec import decode, encode
from backhaul._wire.messages import Reply, pack, unpack
from backhaul.errors import ProtocolError, SerializationError

from .trip import arrive, carry, carry_all, depart, frame_of, wire_of
from .values import (
    Colour,
    Count,
    Level,
    Name,
    Node,
    Pair,
    Spot,
    Weight,
    assert_same,
    hashable_leaves,
    leaves,
    tensors,
    values_with_shared_parts,
)

# Anything.


@given(values_with_shared_parts())
def test_any_value_arrives_as_it_was(value: Any) -> None:
    assert_same(carry(value), value)


@given(st.lists(st.one_of(leaves, values_with_shared_parts()), max_size=5))
def test_any_values_arrive_together(values: list[Any]) -> None:
    assert_same(carry_all(values), values)


@given(st.lists(st.one_of(hashable_leaves, st.floats(), tensors), max_size=6), st.data())
@settings(max_examples=200)
@example([True, 1, 1.0, None, -0.0, float("nan")], None)
def test_flat_arguments_arrive_as_they_were(values: list[Any], data: st.DataObject | None) -> None:
    if data is not None and values:
        values += data.draw(st.lists(st.sampled_from(values), max_size=3))
    assert_same(carry_all(values), values)


SCALARS = [
    *(sign * (1 << bits) + off for sign in (1, -1) for bits in (31, 32, 53, 62, 63, 64, 65, 128) for off in (-1, 0, 1)),
    *(0.0, -0.0, float("inf"), -float("inf"), float("nan"), 5e-324, 0.1),
    *("", "text", "grüße", "\ud800", "\udcff", "\0", "🙂", "x" * 70_000),
    *(b"", b"\xff\0", None, True, False, Name("n"), Count(3), Weight(2.5), Level.LOW, Colour.RED, 1j, ..., range(3)),
]


@pytest.mark.parametrize("value", SCALARS, ids=lambda value: ascii(value)[:40])
def test_a_scalar_arrives_as_it_was(value: Any) -> None:
    assert_same(carry_all([value]), [value])
    assert_same(carry_all([torch.ones(1), value, 5]), [torch.ones(1), value, 5])
    assert_same(carry([{"key": value}]), [{"key": value}])


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 66, 67, 1000])
def test_any_number_of_values(count: int) -> None:
    values = [torch.tensor(n) if n % 3 == 0 else n for n in range(count)]
    assert_same(carry_all(values), values)


def test_values_may_refer_to_each_other_in_circles() -> None:
    ring: list[Any] = [1]
    ring.append({"back": ring})
    node = Node(ring)
    node.next = node
    made = carry([node, ring])
    assert made[0].next is made[0]
    assert made[0].value is made[1]
    assert made[1][1]["back"] is made[1]


def test_ordered_and_other_dicts_keep_their_types() -> None:
    value = [collections.OrderedDict(a=1), collections.defaultdict(list, b=[2]), collections.Counter("hello")]
    made = carry(value)
    assert [type(one) for one in made] == [collections.OrderedDict, collections.defaultdict, collections.Counter]
    assert made == value
    assert made[1]["new"] == []


@pytest.mark.parametrize("size", [4095, 4096, 100_000, 300_000, 3_000_000])
@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_long_byte_strings(kind: type, size: int) -> None:
    value = kind(bytes(range(256)) * (size // 256) + bytes(size % 256))
    assert_same(carry(value), value)
    assert_same(carry([value, value]), [value, value])


def test_long_text() -> None:
    value = "grüße \udcff" * 50_000
    assert carry(value) == value


@pytest.mark.parametrize(
    "value", [torch.float8_e5m2, torch.strided, torch.Size([1, 2]), torch.device("meta"), torch.nan]
)
def test_the_small_things_of_torch(value: Any) -> None:
    (made,) = carry([value])
    assert type(made) is type(value)
    assert made == value or made is value or math.isnan(made)


# Tensors.


def test_the_same_tensor_is_the_same_tensor() -> None:
    x = torch.randn(3)
    made = carry({"a": x, "b": [x, (x,)]})
    assert made["a"] is made["b"][0] is made["b"][1][0]
    first, second, third = carry_all([x, 5, x])
    assert first is third
    assert second == 5


def test_views_share_memory_across_values() -> None:
    x = torch.arange(10.0)
    whole, (part,) = carry_all([x, [x[3:6]]])
    whole[4] = -1
    assert part[1] == -1
    flat_whole, flat_part = carry_all([x, x[3:6]])
    flat_part[0] = -2
    assert flat_whole[3] == -2


def test_shared_memory_is_sent_once() -> None:
    x = torch.randn(100_000)
    once = len(wire_of(frame_of(depart([x]))))
    assert len(wire_of(frame_of(depart([x, x.view(100, 1000), x[50:]])))) < once + 1000


def test_large_tensors_are_not_copied() -> None:
    x = torch.zeros(100_000)
    for encoded in (encode([x], names=["x"]), encode([[x]], names=["x"])):
        (buffer,) = encoded.buffers
        x.fill_(1)
        assert bytes(buffer[:4]) == bytes(torch.ones(1).numpy())
        x.fill_(0)


def test_an_encoded_value_keeps_the_memory_of_its_buffers() -> None:
    encoded = depart({"x": torch.full((1000,), 3.0)[::2], "a": np.full(10_000, 7)})
    gc.collect()
    noise = [torch.full((500,), 9.0) for _ in range(20)]
    made = arrive(wire_of(frame_of(encoded)))[0]
    assert torch.equal(made["x"], torch.full((500,), 3.0))
    assert (made["a"] == 7).all()
    assert len(noise) == 20


def test_tensors_of_one_message_are_listed() -> None:
    x, y = torch.ones(2), torch.zeros(3)
    for encoded in (encode([x, 1, y, x], names="abcd"), encode([[x, y, x]], names="a")):
        assert [id(tensor) for tensor in encoded.tensors] == [id(x), id(y)]


def test_tensors_keep_python_attributes() -> None:
    x = torch.ones(2)
    x.label = "weights"
    x.friend = torch.zeros(1)
    x.me = x
    (made,) = carry_all([x])
    assert made.label == "weights"
    assert torch.equal(made.friend, torch.zeros(1))
    assert made.me is made


def test_sparse_quantized_and_meta_tensors_in_a_nest() -> None:
    value = {"coo": torch.eye(3).to_sparse(), "meta": torch.empty(2, device="meta")}
    made = carry(value)
    assert torch.equal(made["coo"].to_dense(), torch.eye(3))
    assert made["meta"].is_meta
    made = carry_all([value["coo"], value["meta"]])
    assert torch.equal(made[0].to_dense(), torch.eye(3))
    assert made[1].is_meta


class TestParameters:
    @pytest.mark.parametrize("flag", [True, False])
    def test_arrive_as_parameters(self, flag: bool) -> None:
        value = torch.nn.Parameter(torch.randn(2, 3), requires_grad=flag)
        made = carry(value)
        assert type(made) is torch.nn.Parameter
        assert made.requires_grad is flag
        assert made.is_leaf
        assert torch.equal(made, value)

    def test_of_integers(self) -> None:
        value = torch.nn.Parameter(torch.tensor([1, 2]), requires_grad=False)
        assert type(carry(value)) is torch.nn.Parameter
        assert torch.equal(carry(value), value)

    def test_keep_attributes(self) -> None:
        value = torch.nn.Parameter(torch.randn(2))
        value.role = {"kind": "bias"}
        assert carry(value).role == {"kind": "bias"}

    def test_may_refer_to_themselves(self) -> None:
        value = torch.nn.Parameter(torch.randn(2))
        value.me, value.owner = value, Node(value)
        made = carry(value)
        assert made.me is made
        assert made.owner.value is made

    def test_are_shared(self) -> None:
        value = torch.nn.Parameter(torch.randn(2))
        first, second, view = carry([value, value, value.data])
        assert first is second
        view.fill_(4)
        assert torch.equal(first, torch.full((2,), 4.0))

    def test_a_buffer_is_a_buffer(self) -> None:
        made = carry(torch.nn.Buffer(torch.ones(2), persistent=False))
        assert isinstance(made, torch.nn.Buffer)
        assert made.persistent is False


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 3)
        self.second = torch.nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("seen", torch.zeros(1))
        self.scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) * self.scale


class TestModules:
    def test_compute_the_same(self) -> None:
        module = Tied().eval()
        made = carry(module)
        x = torch.randn(4, 3)
        assert torch.equal(made(x), module(x))
        assert type(made) is Tied
        assert not made.training

    def test_keep_tied_weights_tied(self) -> None:
        made = carry(Tied())
        assert made.first.weight is made.second.weight
        assert len(list(made.parameters())) == 3

    def test_can_be_trained(self) -> None:
        made = carry(Tied())
        before = made.first.weight.detach().clone()
        made(torch.randn(4, 3)).sum().backward()
        torch.optim.SGD(made.parameters(), lr=0.1).step()
        assert not torch.equal(made.first.weight, before)

    def test_state_dicts(self) -> None:
        state = Tied().state_dict()
        made = carry(state)
        assert list(made) == list(state)
        assert all(torch.equal(made[key], state[key]) for key in state)


class Marked(torch.Tensor):
    """A subclass that overrides nothing."""


class Particular(torch.Tensor):
    """A subclass that defines its own pickling."""

    def __reduce_ex__(self, protocol: int) -> Any:
        return _particular, (self.as_subclass(torch.Tensor),)


def _particular(plain: torch.Tensor) -> Particular:
    made = plain.as_subclass(Particular)
    made.through = "its own way"
    return made


class Scaled(torch.Tensor):
    """A wrapper: two inner tensors, no memory of its own."""

    inner: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, scale: torch.Tensor, unit: str = "m") -> Scaled:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, strides=inner.stride())
        made.inner, made.scale, made.unit = inner, scale, unit
        return made

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        return ["inner", "scale"], self.unit

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, torch.Tensor], unit: str, shape: Any, stride: Any) -> Scaled:
        assert tuple(shape) == tuple(parts["inner"].shape)
        assert tuple(stride) == parts["inner"].stride()
        return Scaled(parts["inner"], parts["scale"], unit)

    @classmethod
    def __torch_dispatch__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].inner, args[0].scale, args[0].unit)
        plain = [one.inner * one.scale if isinstance(one, cls) else one for one in args]
        return function(*plain, **(kwargs or {}))


class TestSubclasses:
    def test_keep_type_and_attributes(self) -> None:
        value = torch.randn(3).as_subclass(Marked)
        value.label = "x"
        made = carry(value)
        assert type(made) is Marked
        assert made.label == "x"
        assert torch.equal(made.as_subclass(torch.Tensor), value.as_subclass(torch.Tensor))

    @pytest.mark.parametrize("flag", [True, False])
    def test_keep_requires_grad(self, flag: bool) -> None:
        assert carry(torch.randn(3).as_subclass(Marked).requires_grad_(flag)).requires_grad is flag

    def test_may_refer_to_themselves(self) -> None:
        value = torch.randn(3).as_subclass(Marked)
        value.me = value
        made = carry(value)
        assert made.me is made

    def test_are_shared(self) -> None:
        value = torch.randn(3).as_subclass(Marked)
        first, second, plain = carry([value, value, value.as_subclass(torch.Tensor)])
        assert first is second
        plain.zero_()
        assert float(first.sum()) == 0

    def test_may_have_their_own_idea(self) -> None:
        made = carry(torch.ones(2).as_subclass(Particular))
        assert type(made) is Particular
        assert made.through == "its own way"

    def test_as_parameters(self) -> None:
        made = carry(torch.nn.Parameter(torch.ones(2).as_subclass(Marked)))
        assert type(made) is Marked
        assert isinstance(made, torch.nn.Parameter)
        assert made.requires_grad

    def test_uninitialized_parameters(self) -> None:
        made = carry(torch.nn.LazyLinear(3))
        assert isinstance(made.weight, torch.nn.UninitializedParameter)
        assert made(torch.ones(1, 2)).shape == (1, 3)


class TestWrappers:
    def make(self) -> Scaled:
        return Scaled(torch.arange(6.0).view(2, 3).t(), torch.tensor(2.0), "km")

    def test_keep_their_parts(self) -> None:
        value = self.make()
        made = carry(value)
        assert type(made) is Scaled
        assert made.unit == "km"
        assert torch.equal(made.inner, value.inner)
        assert torch.equal(made.scale, value.scale)
        assert torch.equal(made + 0, value + 0)

    def test_are_shared(self) -> None:
        value = self.make()
        first, second, inner = carry([value, value, value.inner])
        assert first is second
        assert first.inner is inner

    def test_nest(self) -> None:
        value = Scaled(self.make(), torch.tensor(3.0))
        made = carry(value)
        assert type(made.inner) is Scaled
        assert made.inner.unit == "km"

    def test_keep_requires_grad(self) -> None:
        assert carry(self.make().requires_grad_()).requires_grad
        assert not carry(self.make()).requires_grad

    def test_as_parameters(self) -> None:
        made = carry(torch.nn.Parameter(self.make()))
        assert type(made) is Scaled
        assert isinstance(made, torch.nn.Parameter)
        assert made.requires_grad

    def test_keep_attributes(self) -> None:
        value = self.make()
        value.label = "x"
        assert carry(value).label == "x"

    def test_jagged_tensors(self) -> None:
        value = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged)
        made = carry(value)
        assert [one.tolist() for one in made.unbind()] == [[1, 1], [0, 0, 0]]


# Arrays.


def _array(order: str, count: int) -> np.ndarray[Any, Any]:
    return np.asarray(np.arange(count * 2, dtype=np.int32).reshape(2, count), order=order)  # type: ignore[call-overload]


class TestArrays:
    @pytest.mark.parametrize("count", [0, 3, 511, 512, 513, 100_000])
    @pytest.mark.parametrize("order", ["C", "F"])
    @pytest.mark.parametrize("writable", [True, False])
    def test_arrive_as_they_were(self, order: str, count: int, writable: bool) -> None:
        value = _array(order, count)
        value.flags.writeable = writable
        made = carry(value)
        assert made.dtype == value.dtype
        assert made.shape == value.shape
        assert (made == value).all()
        assert made.flags.writeable is writable
        assert made.flags.f_contiguous == value.flags.f_contiguous

    def test_can_be_written_and_are_not_the_original(self) -> None:
        value = np.zeros(10_000)
        made = carry(value)
        made += 1
        assert made.sum() == 10_000
        assert value.sum() == 0

    def test_large_ones_go_beside_the_message(self) -> None:
        value = np.zeros(1_000_000, dtype=np.uint8)
        encoded = depart({"array": value})
        assert len(pack(Reply(encoded.payload))) < 10_000
        value[:] = 5
        assert (arrive(wire_of(frame_of(encoded)))[0]["array"] == 5).all()  # encode did not copy it

    def test_with_tensors_beside_them(self) -> None:
        value = [torch.ones(5000), np.full(5000, 2.0), torch.full((5000,), 3.0), np.full(5000, 4.0), torch.zeros(0)]
        made = carry(value)
        assert [float(one[0]) for one in made[:4]] == [1, 2, 3, 4]
        assert [len(one) for one in made] == [5000, 5000, 5000, 5000, 0]

    def test_the_same_array_is_the_same_array(self) -> None:
        value = np.zeros(10_000)
        first, second = carry([value, value])
        assert first is second

    @pytest.mark.parametrize(
        "value",
        [
            np.arange(10_000)[::3],
            np.arange(10_000)[::-1],
            np.float32(1.5),
            np.int64(-3),
            np.bool_(True),
            np.array(5),
            np.array(["a", "bc"]),
            np.array([1, "x", None], dtype=object),
            np.array([(1, 2.0)], dtype=[("a", np.int8), ("b", np.float64)]),
            np.array(["2020-01-01"], dtype="datetime64[D]"),
            np.arange(3000, dtype=">i4"),
        ],
        ids=lambda value: f"{type(value).__name__} {value.dtype}",
    )
    def test_of_all_sorts(self, value: Any) -> None:
        (made,) = carry_all([value])
        assert type(made) is type(value)
        assert made.dtype == value.dtype
        assert np.array_equal(made, value)


# Code.


@pytest.mark.filterwarnings("ignore:.*torch.jit")
class TestScripts:
    def test_modules(self) -> None:
        module = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU()))
        made = carry([module, module])
        x = torch.randn(5, 3)
        assert isinstance(made[0], torch.jit.ScriptModule)
        assert torch.equal(made[0](x), module(x))
        assert made[0] is made[1]

    def test_functions(self) -> None:
        function = torch.jit.script(_twice)
        made = carry({"f": function})["f"]
        assert torch.equal(made(torch.ones(2)), torch.full((2,), 2.0))


def _twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.mark.parametrize("op", [torch.ops.aten.add.Tensor, torch.ops.aten.relu.default, torch.ops.aten.add])
def test_operators_arrive_as_themselves(op: Any) -> None:
    assert carry([op])[0] is op


@pytest.mark.parametrize(
    "function",
    [torch.add, torch.Tensor.add, torch.nn.functional.relu, math.sin, len, dict.fromkeys, torch.nn.Linear, Pair, carry],
)
def test_what_can_be_imported_arrives_as_itself(function: Any) -> None:
    assert carry([function])[0] == function


def test_lambdas_closures_and_partials() -> None:
    offset = torch.tensor([10.0])
    bias = 3

    def shifted(x: torch.Tensor, *, factor: int = 2) -> torch.Tensor:
        return x * factor + offset + bias

    made, same, partial = carry([shifted, shifted, functools.partial(shifted, factor=0)])
    assert made is same
    assert torch.equal(made(torch.ones(1)), torch.tensor([15.0]))
    assert torch.equal(partial(torch.ones(1)), torch.tensor([13.0]))
    assert carry(lambda x: x + bias)(1) == 4


def test_local_classes_and_recursive_functions() -> None:
    class Local:
        def __init__(self, depth: int) -> None:
            self.inner = Local(depth - 1) if depth else None

    def factorial(n: int) -> int:
        return n * factorial(n - 1) if n else 1

    made = carry(Local(2))
    assert type(made).__name__ == "Local"
    assert made.inner.inner.inner is None
    assert carry(factorial)(5) == 120


def test_bound_methods() -> None:
    method = carry(Node(5).__eq__)
    assert method(Node(5))
    assert carry([1, 2].index)(2) == 1


class TestMain:
    """``__main__`` is another module at the other end or, with ``main_shared``, the same program."""

    SOURCE = """
import torch

unit = 10

class Thing:
    limit = 3
    def __init__(self, x):
        self.x = x
    def scaled(self):
        return self.x * scale(unit)

def scale(x):
    return x + 1
"""

    @pytest.fixture
    def main(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], types.ModuleType]:
        """Replace ``__main__``, as if this were another program."""

        def become(source: str) -> types.ModuleType:
            module = types.ModuleType("__main__")
            exec(source, module.__dict__)
            monkeypatch.setitem(sys.modules, "__main__", module)
            return module

        return become

    def test_functions_go_by_value(self, main: Callable[[str], types.ModuleType]) -> None:
        wire = wire_of(frame_of(depart(main(self.SOURCE).scale)))
        main("")
        assert arrive(wire)[0](5) == 6

    def test_instances_go_with_their_class(self, main: Callable[[str], types.ModuleType]) -> None:
        wire = wire_of(frame_of(depart([main(self.SOURCE).Thing(torch.tensor(2))])))
        main("")
        gc.collect()
        ((made,),) = arrive(wire)
        assert made.scaled() == 22
        assert type(made).limit == 3

    def test_shared_functions_and_classes_go_by_name(self, main: Callable[[str], types.ModuleType]) -> None:
        first = main(self.SOURCE)
        wire = wire_of(frame_of(depart([first.scale, first.Thing, first.Thing(1)], main_shared=True)))
        second = main(self.SOURCE)
        ((function, kind, thing),) = arrive(wire)
        assert function is second.scale
        assert kind is second.Thing
        assert type(thing) is second.Thing

    def test_shared_lambdas_go_by_value_all_the_same(self, main: Callable[[str], types.ModuleType]) -> None:
        function = main("made = [lambda x: x + base for _ in '1'][0]\nbase = 5").made
        wire = wire_of(frame_of(depart(function, main_shared=True)))
        main("")
        assert arrive(wire)[0](1) == 6

    def test_shared_names_that_mean_something_else_go_by_value(self, main: Callable[[str], types.ModuleType]) -> None:
        module = main("def f():\n    return 'old'\nold = f\ndef f():\n    return 'new'")
        old, new = carry([module.old, module.f], main_shared=True)
        assert (old(), new()) == ("old", "new")


# What cannot be sent.


def _generator() -> Iterator[int]:
    yield 1


@pytest.fixture(params=["lock", "generator", "file", "binary file"])
def stuck(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """An object that cannot be sent."""
    if request.param == "file":
        with (tmp_path / "out").open("w") as file:
            yield file
    elif request.param == "binary file":
        with Path(__file__).open("rb") as file:
            yield file
    else:
        yield threading.Lock() if request.param == "lock" else _generator()


def _closure(stuck: Any) -> Callable[[], Any]:
    other = 1
    return lambda: (other, stuck)


def _module(stuck: Any) -> torch.nn.Module:
    module = torch.nn.Sequential(torch.nn.Linear(1, 1))
    module.stuck = stuck
    return module


def _ring(stuck: Any) -> Any:
    ring: list[Any] = []
    ring += [ring, {"also": ring}, stuck]
    return ring


def _family(stuck: Any) -> Node:
    parent, child = Node([]), Node(None)
    parent.value.append(child)
    child.value, child.next = parent, stuck
    return parent


PLACES: dict[str, Callable[[Any], Any]] = {
    "": lambda stuck: stuck,
    "[0]": lambda stuck: [stuck],
    "[2]": lambda stuck: (1, 2, stuck),
    "['lock']": lambda stuck: {"a": 1, "lock": stuck},
    "[(1, 'b')]": lambda stuck: {(1, "b"): stuck},
    "[1]['deep'][0]": lambda stuck: [1, {"deep": (stuck,)}],
    ".value": Node,
    ".next.next.value": lambda stuck: Node(1, Node(2, Node(stuck))),
    ".right": lambda stuck: types.SimpleNamespace(left=1, right=stuck),
    "[0].x['k'][3]": lambda stuck: [types.SimpleNamespace(x={"k": [0, 1, 2, stuck]})],
    ".<stuck>": _closure,
    ".__self__.value": lambda stuck: Node(stuck).__eq__,
    "[0].stuck": lambda stuck: [_module(stuck)],
    "[3]": lambda stuck: [torch.ones(2), np.ones(2), Node(1), stuck, torch.ones(1)],
}


@pytest.mark.parametrize("place", PLACES)
def test_the_culprit_is_named(place: str, stuck: Any) -> None:
    with pytest.raises(SerializationError) as caught:
        depart(PLACES[place](stuck), name="result")
    assert caught.value.path == f"result{place}"
    assert f"result{place}" in str(caught.value)
    assert type(stuck).__name__ in str(caught.value)
    assert caught.value.__cause__ is not None


def test_a_file_that_is_read_does_not_turn_into_its_text() -> None:
    with Path(__file__).open() as file, pytest.raises(SerializationError) as caught:
        depart({"file": file})
    assert caught.value.path == "result['file']"


def test_the_culprit_is_named_among_several_values(stuck: Any) -> None:
    with pytest.raises(SerializationError) as caught:
        encode([1, torch.ones(2), [stuck]], names=["args[0]", "args[1]", "kwargs['z']"])
    assert caught.value.path == "kwargs['z'][0]"


def test_the_culprit_is_named_in_slots() -> None:
    with pytest.raises(SerializationError) as caught:
        depart([Spot(threading.Lock())])
    assert caught.value.path == "result[0].where"


@pytest.mark.parametrize(("make", "path"), [(_ring, "result[2]"), (_family, "result.value[0].next")])
def test_the_culprit_is_named_in_circles(make: Callable[[Any], Any], path: str) -> None:
    with pytest.raises(SerializationError) as caught:
        depart(make(threading.Lock()))
    assert caught.value.path == path


def test_text_in_keys_does_not_count_as_depth() -> None:
    key = "a.sentence.[of].sorts." * 20
    with pytest.raises(SerializationError) as caught:
        depart({key: {"x": [threading.Lock()]}})
    assert caught.value.path == f"result[{key!r}]['x'][0]"


class Awkward:
    def __reduce__(self) -> Any:
        raise ZeroDivisionError("while being pickled")


def test_what_fails_on_its_own_account_is_named_with_its_reason() -> None:
    with pytest.raises(SerializationError) as caught:
        depart({"it": Awkward()})
    assert caught.value.path == "result['it']"
    assert "ZeroDivisionError" in str(caught.value)
    assert "while being pickled" in str(caught.value)


def test_too_deep_a_nest_is_refused() -> None:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    try:
        with pytest.raises(SerializationError):
            depart(value)
    finally:
        while value:  # a recursive destructor would overflow the stack
            value = value[0]


def _without_memory(action: Callable[[torch.Tensor], Any]) -> Any:
    """Run ``action`` on a tensor of functorch, which has no memory of its own."""
    caught: list[Any] = []

    def inside(x: torch.Tensor) -> torch.Tensor:
        caught.append(action(x))
        return x

    torch.func.vmap(inside)(torch.ones(2, 2))
    return caught[0]


def _mkldnn(action: Callable[[torch.Tensor], Any]) -> Any:
    return action(torch.ones(2).to_mkldnn())


@pytest.mark.parametrize("on", [_without_memory, _mkldnn])
@pytest.mark.parametrize(
    ("values", "path"),
    [
        (lambda x: [x], "a"),
        (lambda x: [torch.ones(2), x], "b"),
        (lambda x: [1, [x]], "b[0]"),
        (lambda x: [[torch.ones(2), {"x": x}]], "a[1]['x']"),
    ],
    ids=["alone", "second", "nested", "nested with others"],
)
def test_a_tensor_that_cannot_be_sent_is_named(
    on: Callable[[Any], Any], values: Callable[[Any], Any], path: str
) -> None:
    def attempt(x: torch.Tensor) -> Any:
        message = values(x)
        with pytest.raises(SerializationError) as caught:
            encode(message, names="ab"[: len(message)])
        return caught.value.path

    assert on(attempt) == path


# Nothing is left behind.


@pytest.fixture
def without_gc() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def _message(x: torch.Tensor) -> dict[str, Any]:
    parameter = torch.nn.Parameter(torch.ones(2))
    return {"x": x, "views": [x[1:], x.t()], "f": lambda: x, "p": parameter, "m": torch.nn.Linear(1, 1), "n": Node(x)}


class TestNothingIsLeftBehind:
    def test_by_encoding(self, without_gc: None) -> None:
        x = torch.ones(3, 3)
        gone = weakref.ref(x)
        encoded = depart(_message(x))
        del x
        assert gone() is not None
        del encoded
        assert gone() is None

    def test_by_encoding_flat_values(self, without_gc: None) -> None:
        x = torch.ones(3, 3)
        gone = weakref.ref(x)
        encoded = encode([x, 1], names="ab")
        del x
        assert gone() is not None
        del encoded
        assert gone() is None

    @pytest.mark.parametrize("deep", [False, True])
    def test_by_failing(self, without_gc: None, deep: bool) -> None:
        x = torch.ones(3, 3)
        gone = weakref.ref(x)
        try:
            depart([x, [threading.Lock()]] if deep else [x, threading.Lock()])
        except SerializationError:
            pass
        del x
        assert gone() is None

    def test_by_decoding(self, without_gc: None) -> None:
        wire = wire_of(frame_of(depart({"x": torch.ones(3), "n": [Node(torch.ones(2))], "a": np.ones(9999)})))
        (made,) = arrive(wire)
        gone = [weakref.ref(made["x"]), weakref.ref(made["n"][0].value), weakref.ref(made["a"])]
        del made
        assert [ref() for ref in gone] == [None, None, None]


# What a peer may not say.


def test_every_cut_of_a_message_is_refused() -> None:
    body = pack(Reply(depart([torch.ones(2), {"a": 1}]).payload))
    for end in range(len(body)):
        with pytest.raises(ProtocolError):
            unpack(body[:end], Reply)


@pytest.mark.parametrize("values", [[torch.ones(2), 1], [[torch.ones(2)], 1]], ids=["flat", "nested"])
@pytest.mark.parametrize("buffers", [[], [bytearray(4)], [bytearray(9)]], ids=["none", "short", "long"])
def test_tensors_without_their_memory_are_refused(values: list[Any], buffers: list[bytearray]) -> None:
    with pytest.raises(ProtocolError):
        decode(encode(values, names="ab").payload, buffers)


def test_decoding_runs_in_the_place_of_the_reader_only() -> None:
    """Two readers of the same bytes make separate values."""
    wire = wire_of(frame_of(depart([torch.zeros(3), [1]])))
    ((first, numbers),), ((second, others),) = arrive(wire), arrive(wire)
    first += 1
    numbers.append(2)
    assert torch.equal(second, torch.zeros(3))
    assert others == [1]


def test_fake_tensors_are_refused_at_once() -> None:
    with FakeTensorMode():
        value = torch.ones(3)
    with pytest.raises(
        SerializationError, match=r"x\[0\] \(a FakeTensor\) cannot be sent: fake tensors have no data"
    ) as caught:
        encode([[value]], names=["x"])
    assert caught.value.path == "x[0]"
