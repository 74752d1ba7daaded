"""Both twins make the same bytes of the same values, and the same values of the same bytes."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from backhaul._wire import pickling
from backhaul._wire.frames import Frame
from tests.unit.wire.values import Count, Name, assert_same, leaves, values_with_shared_parts
from tools.fuzz.twins import CORE, FUNCTION, NAMES, PYTHON, by_core, describe, wire_of

from .twins import carry, needs_core

pytestmark = needs_core


@dataclasses.dataclass
class Record:
    name: str
    items: Any = dataclasses.field(default_factory=list)

    def method(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class Frozen:
    first: Any
    second: Any = None


class Reference:
    """Stands for a type of a higher layer, such as a reference."""

    def __init__(self, number: int, worker: object = None) -> None:
        self.number = number
        self.worker = worker

    def __repr__(self) -> str:
        return f"Reference({self.number}, {self.worker})"

    def method(self) -> int:
        return self.number


def make_reference(number: int) -> Reference:
    raise AssertionError("the builder is called instead")


@pytest.fixture(autouse=True, scope="module")
def references() -> Iterator[None]:
    def reduce(value: Reference, parcels: list[Any]) -> Any:
        parcels.append(value.number)
        return make_reference, (value.number,)

    pickling.reducers[Reference] = reduce
    pickling.builders[__name__, "make_reference"] = lambda worker, number: Reference(number, worker)
    yield
    del pickling.reducers[Reference], pickling.builders[__name__, "make_reference"]


def function(value: Any) -> Any:
    return value


# Values.

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 66), 1 << 66),
    st.sampled_from(
        [
            sign * (1 << bits) + off
            for sign in (1, -1)
            for bits in (5, 7, 8, 15, 16, 31, 32, 63, 64)
            for off in (-1, 0, 1)
        ]
    ),
    st.floats(),
    st.text(max_size=300),
    st.text(st.characters(codec="ascii"), max_size=300),
    st.binary(max_size=300),
)
dtypes = st.sampled_from(
    [
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
        torch.int8,
        torch.complex64,
    ]
)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(dtypes)
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    tensor = (torch.arange(torch.Size(shape).numel()).reshape(shape) % 3).to(dtype)
    for _ in range(draw(st.integers(0, 2))):
        with contextlib.suppress(RuntimeError):  # not every tensor has every view
            tensor = draw(st.sampled_from(VIEWS))(tensor)
    if dtype.is_floating_point and draw(st.booleans()):
        tensor = tensor.detach().requires_grad_()
    return tensor


VIEWS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda tensor: tensor.mT if tensor.dim() > 1 else tensor,
    lambda tensor: tensor[::2] if tensor.dim() else tensor,
    lambda tensor: tensor[1:] if tensor.dim() else tensor,
    lambda tensor: tensor.unsqueeze(0),
    lambda tensor: tensor[:1].expand(3, *tensor.shape[1:]) if tensor.dim() else tensor.expand(2, 2),
    lambda tensor: tensor.conj() if tensor.is_complex() else tensor,
    lambda tensor: tensor.conj().imag if tensor.is_complex() else tensor,
    lambda tensor: tensor.to_sparse() if tensor.dim() and not tensor.is_sparse and not tensor.is_conj() else tensor,
]
_one = torch.full((3,), 5.0)
others = st.one_of(
    st.sampled_from([function, Record, operator.add, len, torch.Tensor.sum, torch.relu, Record.method, lambda: 1]),
    st.sampled_from([_one, _one[1:], torch.nn.Parameter(_one.clone())]),
    st.sampled_from(
        [torch.float32, torch.Size([2, 3]), torch.device("cpu"), torch.device("cuda", 1), 2 - 1j, ..., range(3)]
    ),
    st.builds(Reference, st.integers(0, 5)),
    st.builds(Reference, st.integers(0, 5)).map(lambda reference: reference.method),
    st.builds(Record, st.text(max_size=3)).map(lambda record: record.method),
    st.sampled_from([Name("n"), Count(3), torch.eye(2).to_sparse(), torch.empty(2, device="meta")]),
)
keys = st.one_of(st.text(max_size=3), st.integers(-3, 3), st.none(), st.tuples(st.integers(0, 3), st.booleans()))
nests = st.recursive(
    st.one_of(scalars, tensors(), others),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.sets(keys, max_size=4),
        st.frozensets(keys, max_size=4),
        st.builds(Record, st.text(max_size=3), inner),
        st.builds(Frozen, inner, inner),
    ),
    max_leaves=10,
)


def compare(values: list[Any], *, main_shared: bool = False) -> None:
    """Check that both twins send and read values alike."""
    outcomes: list[Any] = []
    for twin in (PYTHON, CORE):
        try:
            encoded = twin.encode(values, main_shared=main_shared)
        except Exception as error:
            outcomes.append(type(error))
            continue
        frame = twin.request_frame(7, FUNCTION, encoded, True, {"one": b"1", "two": b""}, 2.5)
        positions = [place for place, tensor in enumerate(encoded.tensors) if tensor.requires_grad]
        assert list(encoded.recorded) == positions
        made = [*encoded.tensors], [*encoded.parcels], encoded.lease, encoded.copies, list(encoded.unrecorded)
        outcomes.append((frame, wire_of(frame), made))
    if outcomes[0] is outcomes[1]:
        return
    (frame, wire, made), (core_frame, core_wire, core_made) = outcomes
    assert core_wire == wire
    assert (core_frame.kind, core_frame.number, bytes(core_frame.body)) == (frame.kind, frame.number, bytes(frame.body))
    assert [bytes(buffer) for buffer in core_frame.buffers] == [bytes(buffer) for buffer in frame.buffers]
    assert core_frame.nbytes == frame.nbytes == len(wire)
    if by_core(CORE.encode(values, main_shared=main_shared)):  # pickling makes an alias of a subclass
        assert [id(tensor) for tensor in core_made[0]] == [id(tensor) for tensor in made[0]]
    assert describe(core_made[0]) == describe(made[0])
    assert core_made[1:] == made[1:]
    read = [twin.values_of(wire, "worker") for twin in (PYTHON, CORE)]
    assert describe(read[0]) == describe(read[1])


@given(st.lists(nests, max_size=5))
@settings(max_examples=400)
def test_values(values: list[Any]) -> None:
    compare(values)


@given(st.lists(st.one_of(leaves, values_with_shared_parts()), max_size=4))
def test_values_with_shared_parts(values: list[Any]) -> None:
    compare(values)
    assert_same(carry(values, CORE, CORE), values)
    assert_same(carry(values, CORE, PYTHON), values)


@given(st.lists(st.one_of(scalars, tensors()), max_size=6), st.data())
@settings(max_examples=300)
@example([True, 1, 1.0, None, -0.0, float("nan")], None)
def test_plain_values(values: list[Any], data: st.DataObject | None) -> None:
    if data is not None and values:
        values += data.draw(st.lists(st.sampled_from(values), max_size=3))
    compare(values)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 63, 64, 65, 66, 511, 512, 513, 1000])
@pytest.mark.parametrize("make", [lambda n: n, lambda n: torch.tensor(float(n)), lambda n: (n,)])
def test_any_number_of_values(count: int, make: Callable[[int], Any]) -> None:
    compare([make(number) for number in range(count)])
    compare([[make(number) for number in range(count)]])


@pytest.mark.parametrize("depth", [1, 31, 32, 33, 34, 100])
def test_any_depth(depth: int) -> None:
    value: Any = 1
    for _ in range(depth):
        value = (value,)
    compare([value])
    value = 1
    for _ in range(depth):
        value = Frozen(value)
    compare([value])


@pytest.mark.parametrize("size", [0, 1, 31, 32, 255, 256, 65535, 65536])
def test_any_length(size: int) -> None:
    compare([b"x" * size, "x" * size])
    compare([["x" * size], {"x" * size: b"y" * size}])


@pytest.mark.parametrize("count", [1, 255, 256, 2047, 2048, 2049, 100_000])
def test_tensors_of_any_size(count: int) -> None:
    compare([torch.arange(float(count))])
    compare([{"one": torch.arange(float(count)), "two": [torch.ones(3), torch.ones(count, dtype=torch.uint8)]}])


def test_values_of_a_shared_main(monkeypatch: pytest.MonkeyPatch) -> None:
    import __main__

    source = """
import dataclasses

def own_function(): pass

@dataclasses.dataclass
class OwnRecord:
    name: str
    def method(self): return self.name
"""
    monkeypatch.setattr(__main__, "own_function", None, raising=False)
    monkeypatch.setattr(__main__, "OwnRecord", None, raising=False)
    exec(source, vars(__main__))
    own_function, record = __main__.own_function, __main__.OwnRecord
    values: list[Any] = [own_function, record("name"), record, record("other").method]
    compare(values, main_shared=True)
    assert by_core(CORE.encode(values, main_shared=True))
    for value in values:
        assert not by_core(CORE.encode([value], main_shared=False))


def test_the_core_handles_what_programs_send() -> None:
    tensor = torch.ones(3, requires_grad=True)
    samples: list[Any] = [
        (),
        (1, 2.0, None, True, "text", b"bytes"),
        (tensor, tensor, torch.zeros(2, 3), 5),
        (torch.zeros(1).expand(4, 4), torch.tensor(2.0)),
        ((tensor, [1, {"key": torch.zeros(2)}]), {"a": (), "b": []}),
        (Reference(3), Reference(4).method, function, Record("name"), Frozen(tensor)),
        ({1, 2}, frozenset((3,)), torch.Size([1]), torch.float32, torch.device("cpu"), 1j),
        (function, function, torch.float32, torch.float32),
        tuple(range(100)),
    ]
    for values in samples:
        assert by_core(CORE.encode(values)), values
        compare(list(values))


@pytest.mark.parametrize(
    "value",
    [
        1 << 64,
        "grüße",
        torch.ones(2, 3).t(),
        torch.ones(0),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch._neg_view(torch.ones(2)),
        torch.eye(2).to_sparse(),
        torch.ones(2, device="meta"),
        torch.ones(2, dtype=torch.int8),
        lambda: 1,
        Name("text"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_python_handles_the_rest(value: Any) -> None:
    assert not by_core(CORE.encode([value]))
    compare([value])
    compare([[value, 1], torch.ones(2)])


def test_python_handles_tensors_that_the_core_must_not_take_for_ordinary() -> None:
    with torch.inference_mode():
        inferred = torch.ones(3)
    labelled = torch.ones(3)
    labelled.label = "name"
    base = torch.arange(8.0)
    for values in ([inferred], [labelled], [base, base[2:4]], [base[:5], base[3:]], [[base, (base[1:],)]]):
        assert not by_core(CORE.encode(values))
        compare(values)
    assert by_core(CORE.encode([base[:4], base[4:]]))  # next to each other
    compare([base[:4], base[4:]])


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch calls it when it loads forward mode
def test_a_tensor_with_a_tangent_is_refused() -> None:
    from backhaul.errors import SerializationError

    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(torch.ones(2), torch.ones(2))
        for values in ([dual], [[dual]], [1, dual[:1]]):
            with pytest.raises(SerializationError) as failure:
                CORE.encode(values)
            assert failure.value.path.startswith("values[")
        assert by_core(CORE.encode([torch.ones(2)]))


def test_an_object_that_comes_twice_is_left_to_pickle() -> None:
    shared, record, reference, part = [1], Record("name"), Reference(1), {1}
    for value in (shared, record, reference, part):
        assert not by_core(CORE.encode([value, value]))
        assert not by_core(CORE.encode([[value], {"key": (value,)}]))
        compare([[value], {"key": (value,)}])
        first, second = carry([value, [value]], CORE, CORE)
        assert first is second[0]
    ring: list[Any] = []
    ring.append((ring,))
    assert not by_core(CORE.encode([ring]))
    (made,) = carry([ring], CORE, CORE)
    assert made[0][0] is made


# Frames.


@given(
    st.floats() | st.integers(0, 1 << 40),
    st.dictionaries(st.text(max_size=40), st.binary(max_size=300), max_size=20),
    st.booleans(),
    st.text(max_size=40),
    st.integers(0, (1 << 64) - 1),
)
def test_fields_of_a_request(left: float, notes: dict[str, bytes], keywords: bool, name: str, number: int) -> None:
    outcomes: list[Any] = []
    for twin in (PYTHON, CORE):
        encoded = twin.encode([1, torch.ones(2)])
        try:
            outcomes.append(wire_of(twin.request_frame(number, name, encoded, keywords, notes, left)))
        except UnicodeEncodeError:  # lone surrogates
            outcomes.append(None)
    assert outcomes[0] == outcomes[1]
    if outcomes[0] is None:
        return
    for twin in (PYTHON, CORE):
        (frame,) = twin.cut(outcomes[0])
        request = twin.read_request(frame)
        assert (request.function, request.keywords, request.notes) == (name, keywords, notes)
        assert struct.pack("d", request.left) == struct.pack("d", left)
        assert type(request.left) is float
        assert frame.number == number


@given(nests, st.dictionaries(st.text(max_size=5), st.binary(max_size=40), max_size=3))
def test_replies(value: Any, notes: dict[str, bytes]) -> None:
    wires = []
    for twin in (PYTHON, CORE):
        wires.append(wire_of(twin.reply_frame(3, twin.encode([value]), notes)))
    assert wires[0] == wires[1]
    made = []
    for twin in (PYTHON, CORE):
        (frame,) = twin.cut(wires[0])
        reply = twin.read_reply(frame)
        found = reply.tensors(None)
        assert reply.requires_grad == any(tensor.requires_grad for tensor in found)
        assert reply.notes == notes
        made.append(describe(reply.value(found, "worker")))
    assert made[0] == made[1]


frames = st.builds(
    Frame,
    st.integers(0, 255),
    st.integers(0, (1 << 64) - 1),
    st.binary(max_size=50),
    st.lists(st.binary(max_size=50), max_size=4),
)


@given(st.lists(frames, max_size=5), st.integers(0, 60), st.data())
def test_frames_are_cut_alike(sent: list[Frame], rest: int, data: st.DataObject) -> None:
    wire = b"".join(map(wire_of, sent))
    wire += wire_of(Frame(3, 1, b"body" * 5, [b"buffer"]))[:rest]
    broken = bytearray(wire)
    for _ in range(data.draw(st.integers(0, 2))):
        if wire:
            broken[data.draw(st.integers(0, len(wire) - 1))] = data.draw(st.integers(0, 255))
    start = data.draw(st.integers(0, len(wire)))
    for memory in (wire, bytes(broken)):
        for limit, most in ((1 << 20, 1 << 20), (100, 1 << 20), (1 << 20, 1)):
            outcomes = []
            for twin in (PYTHON, CORE):
                found: list[Frame] = []
                end = twin.cut_frames(found, bytearray(memory) + bytes(8), start, len(memory), limit, most)
                outcomes.append((end, [(f.kind, f.number, f.body, f.buffers) for f in found]))
            assert outcomes[0] == outcomes[1]


def test_the_pieces_of_a_frame() -> None:
    small, large = torch.ones(16), torch.zeros(5000)
    (piece,) = CORE.request([small]).parts()
    assert type(piece) is bytes
    head, memory = CORE.request([small, large]).parts()[0], CORE.request([small, large]).parts()[2]
    assert len(head) < 200
    large.fill_(1)
    assert bytes(memory) == bytes(torch.ones(5000).numpy().tobytes())  # the tensor's own memory
    frame = CORE.request([small, large])
    assert [len(buffer) for buffer in frame.buffers] == [64, 20_000]
    assert [bytes(part) for part in frame.parts([0, 5])] == [
        bytes(part) for part in PYTHON.request([small, large]).parts([0, 5])
    ]


def test_names_of_values_that_cannot_be_sent() -> None:
    import threading

    from backhaul.errors import SerializationError

    for twin in (PYTHON, CORE):
        with pytest.raises(SerializationError) as failure:
            twin.encode([1, {"key": [threading.Lock()]}])
        assert failure.value.path == "values[1]['key'][0]"
    assert NAMES[1] == "values[1]"
