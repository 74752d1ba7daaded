"""Nested plain data: the round trip, and errors for everything else."""

from __future__ import annotations

import itertools
import pickle
import sys
import warnings
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backhaul._autograd.messages import PassSpec, PassTally
from backhaul._wire.codec import decode, encode
from backhaul._wire.messages import TREE, Payload, pack, unpack
from backhaul._wire.plain import MAX_DEPTH, MAX_DIMENSIONS, Tag, restore
from backhaul._wire.strict import check_payload
from backhaul._wire.tensors.specs import Part, TensorSpec, TensorTable
from backhaul._wire.value_count import count
from backhaul.errors import BackhaulError, LimitError, ProtocolError, SerializationError

LIMIT = 1 << 20

keys = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=()))
    | st.binary()
    | st.complex_numbers(allow_nan=False)
    | st.sampled_from([torch.float32, torch.int8, torch.device("cpu"), torch.device("cuda", 3), torch.Size([2, 0])])
)
hashables = st.recursive(keys, lambda inner: st.frozensets(inner, max_size=3) | st.tuples(inner, inner), max_leaves=5)
values = st.recursive(
    hashables,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.sets(hashables, max_size=3)
        | st.dictionaries(hashables, inner, max_size=4)
    ),
    max_leaves=20,
)


def trip(*sent: Any, depth: int | None = None) -> list[Any]:
    encoded = encode(sent, names=[f"v{n}" for n in range(len(sent))], plain=True)
    payload = unpack(pack(encoded.payload), Payload)
    buffers = [bytearray(buffer) for buffer in encoded.buffers]
    check_payload(payload, buffers, LIMIT)
    return decode(payload, buffers)


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(a, b) for a, b in zip(one.values(), other.values(), strict=True))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@given(values)
def test_round_trip(value: Any) -> None:
    (found,) = trip(value)
    assert same(found, value)
    assert same(trip(0, [value])[1], [value])


def test_tensors_come_as_they_went() -> None:
    base = torch.arange(12.0).view(3, 4)
    index = torch.tensor([[0, 2]])
    with warnings.catch_warnings(action="ignore"):  # torch warns that it is a beta feature
        csr = torch.eye(3).to_sparse_csr()
    sent = {
        "views": [base, base[1], base.t()],
        "sparse": torch.sparse_coo_tensor(index, torch.ones(2), (4,), check_invariants=True).coalesce(),
        "csr": csr,
        "empty": torch.empty(0, 3),
        "bool": torch.tensor([True, False]),
        "grad": torch.ones(2, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.zeros(1)),
    }
    (found,) = trip(sent)
    for name in ("sparse", "csr"):
        assert found[name].layout == sent[name].layout  # type: ignore[attr-defined]
        assert torch.equal(found[name].to_dense(), sent[name].to_dense())  # type: ignore[attr-defined]
    for name in ("empty", "bool", "grad", "parameter"):
        assert torch.equal(found[name], sent[name])  # type: ignore[arg-type]
        assert found[name].requires_grad == sent[name].requires_grad  # type: ignore[attr-defined]
    whole, row, turned = found["views"]
    assert torch.equal(turned, base.t())
    row.zero_()
    assert whole[1].sum() == 0  # the tensors still share memory
    (twice,) = trip([base, base])
    assert twice[0] is twice[1]


def test_records_of_layers_above_are_checked() -> None:
    spec, tally = PassSpec(1, 2, 3, profiles=(7,)), PassTally((1, 2), {3: 4})
    assert trip([spec, tally]) == [[spec, tally]]
    wrong = [int(Tag.RECORD), "PassSpec", msgspec.msgpack.encode(["one", 2, 3])]
    for flat in (wrong, [int(Tag.RECORD), "os.system", b"\x90"], [int(Tag.RECORD), "PassSpec", b"\xff"]):
        with pytest.raises(ProtocolError):
            restore([flat], ())


class Own:
    pass


class OwnTensor(torch.Tensor):
    pass


class OwnInt(int):
    pass


@pytest.mark.parametrize(
    "wrong",
    [
        Own(),
        OwnInt(3),
        len,
        lambda: 1,
        Own,
        range(3),
        bytearray(b"x"),
        torch.nn.Linear(1, 1),
        ValueError("x"),
        torch.ones(2).as_subclass(OwnTensor),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_plain_is_named(wrong: Any) -> None:
    with pytest.raises(SerializationError) as caught:
        trip(1, {"a": [0, wrong]})
    assert caught.value.path == "v1['a'][1]"


def test_depth() -> None:
    deep: Any = 1
    for _ in range(MAX_DEPTH):
        deep = [deep]
    assert same(trip(deep)[0], deep)
    with pytest.raises(SerializationError):
        trip([deep])
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(SerializationError, match="contains itself"):
        trip(circle)
    encoded = encode([[[[1]]]], names=["v"], plain=True)
    assert encoded.payload.plain is not None
    assert restore(encoded.payload.plain, (), 3) == [[[[1]]]]
    with pytest.raises(LimitError) as caught:
        restore(encoded.payload.plain, (), 2)
    assert caught.value.option == "limits.depth"


def test_dimensions() -> None:
    most = torch.ones([1] * MAX_DIMENSIONS)
    assert trip(most)[0].shape == most.shape
    for wrong in (most.unsqueeze(0), [most.unsqueeze(0)]):
        with pytest.raises(SerializationError, match="dimensions"):
            trip(wrong)


def test_many_tensors_are_described_in_few_values() -> None:
    many = [torch.ones(2) for _ in range(100)]
    assert size_of(many) <= 5 * len(many)
    base = torch.ones(200)
    shared = [base[index:] for index in range(100)]
    assert size_of([*many, *shared]) > 10 * len(many)  # the upper limit for a tensor
    assert size_of([*many, *shared]) < 30 * 2 * len(many)


def size_of(value: Any) -> int:
    return count(pack(encode([value], names=["v"], plain=True).payload), 1 << 20, 10)[1]


# What is made by others.

anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.tuples(st.sampled_from(list(map(int, Tag))), inner).map(list),
    max_leaves=20,
)


@given(st.lists(anything, max_size=4))
def test_anything_is_plain_data_or_a_protocol_error(flat: list[Any]) -> None:
    try:
        restore(flat, [torch.ones(1)], 8)
    except (ProtocolError, LimitError):
        pass


@given(st.binary(max_size=200))
def test_random_bytes_are_a_payload_or_a_protocol_error(body: bytes) -> None:
    try:
        payload = unpack(body, Payload)
        check_payload(payload, [], LIMIT)
        decode(payload, [])
    except BackhaulError:
        pass


@pytest.mark.parametrize(
    "payload",
    [
        Payload(pickle=pickle.dumps([1])),
        Payload(),
        Payload(plain=[1], pickle=b"x"),
        Payload(plain=[1], loose=1),
        Payload(plain=[1], loose=-2),
        Payload(plain=[[1, 2]]),
        Payload(plain=[{"a": 1}]),
        Payload(plain=[msgspec.msgpack.Ext(1, b"")]),
    ],
)
def test_other_payloads_are_refused(payload: Payload) -> None:
    with pytest.raises(ProtocolError):
        check_payload(payload, [], LIMIT)


def test_tensors_that_would_harm_are_refused() -> None:
    def check(part: Part, layout: str = "", buffer: bytes = b"\1\0\0\0", count: int = 1) -> None:
        table = TensorTable((TensorSpec((0,), layout=layout),), (part,) * count)
        check_payload(Payload(table, [[0, 0]], loose=TREE), [bytearray(buffer)], LIMIT)

    check(Part(0, "bool", (4,)))
    with pytest.raises(ProtocolError, match="bools"):
        check(Part(0, "bool", (4,)), buffer=b"\2\0\0\0")
    with pytest.raises(ProtocolError, match="quantized or nested"):
        check(Part(0, "int8", (4,)), layout="nested")
    with pytest.raises(ProtocolError, match="limit"):
        check(Part(0, "float32", (1 << 30,), (0,)))
    with pytest.raises(ProtocolError, match="limit"):
        check(Part(0, "float32", (1,)), count=LIMIT)
    with pytest.raises(ProtocolError, match="dtype"):
        check(Part(0, "qint99", (4,)))
    with pytest.raises(ProtocolError, match="dimensions"):
        check(Part(0, "float32", (1 << 60,) * 60_000))
    expanded = encode([torch.zeros(1).expand(LIMIT)], names=["x"], plain=True)
    with pytest.raises(ProtocolError, match="limit"):
        check_payload(expanded.payload, [bytearray(b) for b in expanded.buffers], LIMIT)


def test_the_values_of_records_are_counted() -> None:
    tally = [int(Tag.RECORD), "PassTally", msgspec.msgpack.encode(PassTally(tuple(range(30)), {}))]
    assert restore([tally, tally], (), 8, 100) == [PassTally(tuple(range(30)), {})] * 2
    for flat in ([tally] * 4, [[int(Tag.LIST), tally, tally, [int(Tag.LIST), tally, tally]]]):
        with pytest.raises(LimitError) as caught:
            restore(flat, (), 8, 100)  # all records together have more
        assert (caught.value.option, caught.value.value) == ("limits.values", 100)
    assert len(restore([tally] * 4, (), 8, None)) == 4
    deep = [int(Tag.RECORD), "PassTally", b"\x91" * 300]
    with pytest.raises(LimitError, match=r"limits\.depth"):
        restore([deep], ())


@pytest.mark.parametrize("tag", [Tag.DICT, Tag.SET, Tag.FROZENSET])
def test_keys_that_were_chosen_to_collide_are_refused(tag: Tag) -> None:
    def form(keys: list[int]) -> list[Any]:
        flat = [[int(Tag.INT), key.to_bytes(key.bit_length() // 8 + 1, "little", signed=True)] for key in keys]
        return [int(tag), *itertools.chain(*([key, 0] for key in flat))] if tag is Tag.DICT else [int(tag), *flat]

    collide = [number * sys.hash_info.modulus for number in range(1 << 10, 1 << 11)]
    assert len({hash(key) for key in collide}) == 1
    (few,) = restore([form(collide)], ())
    assert len(few) == len(collide)
    with pytest.raises(ProtocolError, match="same hash"):
        restore([form([*collide, (1 << 12) * sys.hash_info.modulus])], ())
    (many,) = restore([form([(1 << 64) + number for number in range(5000)])], ())
    assert len(many) == 5000


def test_layers_above_agree_with_the_form_of_payloads() -> None:
    assert TREE < 0  # no pickle has a negative number of loose buffers


def test_a_record_of_a_tensor_that_is_no_text_is_refused() -> None:
    """Text that is not UTF-8 used to raise a UnicodeDecodeError."""
    record = msgspec.msgpack.encode(("float32", (1,), False, False)).replace(b"float32", b"\xff" * 7)
    with pytest.raises(ProtocolError, match="record"):
        check_payload(Payload(TensorTable(ordinary=(record,)), [None], ((0, 0),)), [bytearray(4)], LIMIT)
