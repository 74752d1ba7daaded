"""What travels as an argument or a result, over every transport: everything, by value, as it was; and what cannot is
named at the caller before anything is sent.
"""

from __future__ import annotations

import datetime
import decimal
import functools
import io
import pathlib
import socket
import sys
import threading
import types
import uuid
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import backhaul as bh
from backhaul._wire.messages import Kind

from . import remote_functions as remote
from .values import assert_same


def round_trip(value: Any) -> Any:
    return bh.rpc_sync("bob", remote.identity, args=(value,))


# Python objects.

OBJECTS: dict[str, Any] = {
    "none": None,
    "booleans": [True, False],
    "integers": [0, -1, 2**31, -(2**63), 2**64 - 1, 2**64, -(2**70), 10**100],
    "floats": [0.0, -0.0, 1.5, float("inf"), float("nan"), sys.float_info.max],
    "complex": 1.5 - 2j,
    "strings": ["", "ascii", "größer \U0001f600", "\x00", "x" * 100_000],
    "a lone surrogate": "\ud800",
    "bytes": [b"", b"abc", bytes(100_000)],
    "bytearrays": [bytearray(), bytearray(b"abc"), bytearray(100_000)],
    "containers": ([1, (2,), [3]], {"a": {"b": []}}, {1, 2}, frozenset({3}), ()),
    "keys of all kinds": {1: "a", None: "b", (1, 2): "c", 1.5: "d", b"e": "f"},
    "collections": [OrderedDict(b=1, a=2), defaultdict(list, a=[1]), deque([1], maxlen=3), Counter("aab")],
    "singletons": [Ellipsis, NotImplemented, slice(1, None, 2), range(5)],
    "standard library": [
        datetime.datetime(2024, 2, 29, tzinfo=datetime.UTC),
        decimal.Decimal("1.10"),
        pathlib.PurePosixPath("/a/b"),
        uuid.UUID(int=5),
    ],
    "dataclass": remote.Point(1, remote.Point("x")),
    "namedtuple": remote.Pair(1, [2]),
    "enum": remote.Color.RED,
    "object": remote.Counter(3),
    "exception": [type(error) for error in (ValueError("a"), remote.PlainError("b", 1))],
    "functions and types": [len, remote.whoami, torch.add, torch.Tensor.add, remote.Counter, int],
    "of torch": [torch.float16, torch.Size([1, 2]), torch.device("cpu"), torch.sparse_coo, torch.channels_last],
    "worker info": bh.WorkerInfo("x", 3),
    "numpy scalars": [np.float32(1.5), np.int64(3), np.bool_(True)],
    "numpy arrays": [np.arange(6).reshape(2, 3), np.zeros(0), np.array("text"), np.array([{"a": 1}], object)],
    "large numpy arrays": [np.arange(100_000.0), np.arange(100_000).reshape(2, -1).T, np.arange(99_999)[::3]],
    "read-only numpy array": np.frombuffer(bytes(100_000), dtype=np.uint8),
    "module": remote.Network(),
}


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("case", OBJECTS)
def test_any_object(case: str) -> None:
    value = OBJECTS[case]
    assert_same(round_trip(value), value)
    assert_same(round_trip([value, {"key": value}]), [value, {"key": value}])


@pytest.mark.usefixtures("workers")
def test_arguments_arrive_as_they_were_given() -> None:
    def call(*args: Any, **kwargs: Any) -> Any:
        return bh.rpc_sync("bob", remote.combine, args=args, kwargs=kwargs)

    for args, kwargs in (
        ((1,), {}),
        ((1, 2), {}),
        ((1, 2, 3, 4), {"scale": 5}),
        ((), {"first": 1, "other": torch.ones(2)}),
        ((torch.ones(1), [2]), {"function": 1, "args": 2, "kwargs": 3, "to": 4, "timeout": 5}),
    ):
        assert_same(call(*args, **kwargs), remote.combine(*args, **kwargs))
    assert bh.rpc_sync("bob", remote.combine, [1, 2]) == remote.combine(1, 2)  # any sequence
    assert bh.rpc_sync("bob", remote.whoami, (), {}) == "bob"


@pytest.mark.usefixtures("workers")
def test_functions_travel_inside_arguments() -> None:
    shift = 7
    found = round_trip([lambda x: x + shift, remote.Counter(1).add])
    assert found[0](1) == 8
    assert found[1](2) == 3
    assert bh.rpc_sync("bob", map_over, args=(lambda x: x * shift, [1, 2])) == [7, 14]


def map_over(function: Callable[[Any], Any], values: list[Any]) -> list[Any]:
    return [function(value) for value in values]


@pytest.mark.usefixtures("workers")
def test_objects_of_a_local_class_travel_by_value() -> None:
    class Local:
        def __init__(self, value: int) -> None:
            self.value = value

        def doubled(self) -> int:
            return 2 * self.value

    assert bh.rpc_sync("bob", Local(4).doubled) == 8
    assert bh.rpc_sync("bob", Local, args=(3,)).doubled() == 6


@pytest.mark.usefixtures("workers")
def test_identity_and_cycles_within_one_message_are_kept() -> None:
    ring: list[Any] = [1]
    ring.append(ring)
    shared = remote.Point([1])
    found, first, second = round_trip((ring, shared, [shared]))
    assert found[0] == 1
    assert found[1] is found
    assert first is second[0]
    assert first.x == [1]


@pytest.mark.usefixtures("workers")
def test_the_caller_may_change_its_arguments_once_the_call_is_made(gate_name: str) -> None:
    """The other worker reads them only after they were changed."""
    listed, small, large = [1], torch.ones(4), torch.ones(1 << 18)
    future = bh.rpc_async("bob", wait_and_look, args=(gate_name, listed, small, large))
    listed.append(2)
    small.zero_()
    large.zero_()
    remote.open_gate(gate_name)
    assert future.wait() == ([1], 4.0, float(1 << 18))


def wait_and_look(
    gate: str, listed: list[int], small: torch.Tensor, large: torch.Tensor
) -> tuple[list[int], float, float]:
    remote.wait_at(gate)
    return listed, small.sum().item(), large.sum().item()


# Tensors.

_QUANTIZED = {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4}
DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)} - _QUANTIZED, key=str)


@pytest.mark.usefixtures("workers")
def test_tensors_of_every_dtype() -> None:
    for dtype in DTYPES:
        modulus = 2 if dtype is torch.bool else 251
        flat = (torch.arange(24 * dtype.itemsize) % modulus).to(torch.uint8).view(dtype)
        for tensor in (flat, flat.reshape(4, 6), flat[0], flat[:0], flat.reshape(4, 6).t(), flat[5:11]):
            assert_same(round_trip(tensor), tensor)
            assert_same(round_trip({"inside": (tensor,)}), {"inside": (tensor,)})


def _layouts() -> dict[str, torch.Tensor]:
    base = torch.arange(120.0).reshape(2, 3, 4, 5)
    matrix = torch.tensor([[0.0, 1, 0, 2], [3, 0, 0, 0], [0, 0, 0, 0], [0, 4, 5, 0]])
    return {
        "zero-dimensional": torch.tensor(1.5),
        "empty": torch.empty(0, 3),
        "transposed": base.transpose(1, 3),
        "strided view": base[:, ::2, 1:3],
        "expanded": torch.arange(3.0).expand(4, 3),
        "overlapping": torch.arange(10.0).as_strided((4, 4), (2, 1)),
        "channels last": base.to(memory_format=torch.channels_last),
        "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "negative": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        "requires grad": torch.ones(3, requires_grad=True),
        "inner node of a graph": torch.ones(3, requires_grad=True) * 2,
        "frozen parameter": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "meta": torch.empty(2, 3, device="meta").t(),
        "sparse coo": matrix.to_sparse(),
        "sparse coo, not coalesced": torch.sparse_coo_tensor([[0, 0]], torch.ones(2), (4,)),
        "sparse coo, hybrid": torch.sparse_coo_tensor([[0, 2]], torch.ones(2, 3), (4, 3)),
        "sparse coo, requires grad": matrix.to_sparse().requires_grad_(),
        "sparse csr": matrix.to_sparse_csr(),
        "sparse csr, batched": torch.stack([matrix, matrix]).to_sparse_csr(),
        "sparse csc": matrix.to_sparse_csc(),
        "sparse bsr": matrix.to_sparse_bsr((2, 2)),
        "sparse bsc": matrix.to_sparse_bsc((2, 2)),
        "quantized": torch.quantize_per_tensor(matrix, 0.5, 1, torch.quint8),
        "quantized, signed": torch.quantize_per_tensor(matrix, 0.25, 0, torch.qint8),
        "quantized, wide": torch.quantize_per_tensor(matrix, 0.25, 0, torch.qint32),
        "quantized by channel": torch.quantize_per_channel(
            matrix, torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0, 1, 2, 3]), 1, torch.qint8
        ),
        "nested": torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(1, 3)]),
        "nested, jagged": torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(1, 3)], layout=torch.jagged),
    }


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # sparse, nested and quantized tensors are beta, prototype or deprecated
    LAYOUTS = _layouts()


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("case", LAYOUTS)
def test_tensors_of_every_layout(case: str) -> None:
    tensor = LAYOUTS[case]
    for found in (round_trip(tensor), round_trip([tensor, 1])[0]):
        assert_same(found, tensor)


@pytest.mark.usefixtures("workers")
def test_a_parameter_comes_back_as_part_of_the_graph() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    found = round_trip(parameter)
    assert type(found) is torch.Tensor
    assert found.requires_grad
    assert not found.is_leaf
    assert found.tolist() == [1.0, 1.0]


@pytest.mark.usefixtures("workers")
def test_decoding_leaves_the_warnings_of_the_process_alone() -> None:
    """Many threads decode what torch warns about; what the user wants to be warned of stays as it was."""
    before = list(warnings.filters)
    kinds = [tensor for case, tensor in LAYOUTS.items() if case.startswith(("sparse", "quantized"))]
    for _ in range(10):
        bh.wait_all([bh.rpc_async("bob", remote.identity, args=(kinds,)) for _ in range(20)])
        assert warnings.filters == before


@pytest.mark.usefixtures("workers")
def test_the_order_of_memory_is_kept() -> None:
    image = torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert round_trip(image).is_contiguous(memory_format=torch.channels_last)
    assert round_trip(torch.ones(1).expand(1000)).untyped_storage().nbytes() == 4
    wide = torch.zeros(1 << 20)[:: 1 << 10]
    assert round_trip(wide).untyped_storage().nbytes() < wide.untyped_storage().nbytes()


@pytest.mark.usefixtures("workers")
def test_large_tensors() -> None:
    for elements in (1 << 10, (1 << 14) + 1, (1 << 20) + 3):
        tensor = torch.arange(elements, dtype=torch.int32)
        found = round_trip(tensor)
        assert torch.equal(found, tensor)
        found += 1  # the memory is ours, and writable
        assert torch.equal(found, tensor + 1)


@pytest.mark.usefixtures("workers")
def test_a_subclass_and_attributes_of_a_tensor_are_kept() -> None:
    tagged = torch.ones(2)
    tagged.tag = "mine"
    assert round_trip(tagged).tag == "mine"
    made = torch.ones(2).as_subclass(Tagged)
    made.tag = "subclass"
    found = round_trip(made)
    assert type(found) is Tagged
    assert found.tag == "subclass"
    assert_same(found.as_subclass(torch.Tensor), torch.ones(2))


class Tagged(torch.Tensor):
    """A user's own kind of tensor."""


# Aliases.


@pytest.mark.usefixtures("workers")
def test_tensors_that_share_memory_share_it_again() -> None:
    base = torch.zeros(10)
    same, whole, head, tail, column = round_trip((base, base, base[:6], base[4:], base.view(5, 2)[:, 1]))
    assert same is whole
    head[5] = 1
    column[0] = 2
    expected = torch.zeros(10)
    expected[5], expected[1] = 1, 2
    assert_same((whole, tail), (expected, expected[4:]))
    assert_same(base, torch.zeros(10))


@pytest.mark.usefixtures("workers")
def test_aliases_across_arguments_are_seen_by_the_function() -> None:
    base = torch.zeros(4)
    assert bh.rpc_sync("bob", write_and_look, args=(base, base[1:3]), kwargs={"deep": [{"x": base}]}) == (
        [0.0, 5.0, 5.0, 0.0],
        True,
    )
    other = torch.zeros(4)
    assert bh.rpc_sync("bob", write_and_look, args=(base, other[1:3]), kwargs={"deep": [{"x": other}]}) == (
        [0.0] * 4,
        False,
    )


def write_and_look(base: torch.Tensor, view: torch.Tensor, deep: Any) -> tuple[list[float], bool]:
    view.fill_(5.0)
    return base.tolist(), deep[0]["x"] is base


@pytest.mark.usefixtures("workers")
def test_aliases_of_other_kinds() -> None:
    bits, number = round_trip(_two_views())
    number.fill_(1.0)
    assert bits.tolist() == [0x3F800000, 0x3F800000]
    spread, row = round_trip((torch.zeros(3, 3).t(), torch.zeros(3)))
    row.fill_(1)
    assert spread.sum() == 0
    found = round_trip(remote.Network())
    assert found.tied()
    one, two = round_trip((np_array := np.zeros(10_000), np_array))
    assert one is two


def _two_views() -> tuple[torch.Tensor, torch.Tensor]:
    number = torch.zeros(2)
    return number.view(torch.int32), number


# What cannot travel.


class Reluctant:
    """Says itself that it stays."""

    def __reduce__(self) -> Any:
        raise RuntimeError("I stay here")


def _generator() -> Iterator[int]:
    yield 1


UNFIT: dict[str, Callable[[], Any]] = {
    "lock": threading.Lock,
    "generator": _generator,
    "frame": sys._getframe,
    "reluctant object": Reluctant,
    "file": lambda: io.FileIO(0, closefd=False),
    "mkldnn tensor": lambda: torch.ones(2).to_mkldnn(),
}


@pytest.fixture
def sent(workers: list[bh.Worker], when_sent: Callable[[Callable[[Kind], None]], None]) -> list[Kind]:
    """A cluster, and what is ever sent in it."""
    kinds: list[Kind] = []
    when_sent(kinds.append)
    return kinds


@pytest.mark.parametrize("case", UNFIT)
def test_what_cannot_travel_is_named_and_nothing_is_sent(case: str, sent: list[Kind]) -> None:
    unfit = UNFIT[case]()
    kind = type(unfit).__name__
    for args, kwargs, path in (
        ((1, unfit), {}, "args[1]"),
        ((unfit,), {}, "args[0]"),
        (([{"deep": (0, unfit)}],), {}, "args[0][0]['deep'][1]"),
        ((torch.ones(2),), {"named": [unfit]}, "kwargs['named'][0]"),
        ((remote.Point(1, unfit),), {}, "args[0].y"),
    ):
        for call in (bh.rpc_sync, bh.rpc_async):
            with pytest.raises(bh.errors.SerializationError) as caught:
                call("bob", remote.identity, args=args, kwargs=kwargs)
            assert caught.value.path == path
            assert path in str(caught.value)
            assert kind in str(caught.value)
            assert "identity" in str(caught.value)
            assert isinstance(caught.value, TypeError)
    assert Kind.REQUEST not in sent
    assert bh.rpc_sync("bob", remote.identity, args=(3,)) == 3
    assert sent.count(Kind.REQUEST) == 1


def test_a_function_that_cannot_travel_is_named_and_nothing_is_sent(sent: list[Kind]) -> None:
    lock = threading.Lock()
    with pytest.raises(bh.errors.SerializationError) as caught:
        bh.rpc_sync("bob", lambda: lock)
    assert caught.value.path == "function.<lock>"
    with pytest.raises(bh.errors.SerializationError) as caught:
        bh.rpc_sync("bob", remote.Point(lock).__eq__, args=(1,))
    assert caught.value.path == "function.__self__.x"
    with socket.socket() as sock, pytest.raises(bh.errors.SerializationError) as caught:
        bh.rpc_sync("bob", sock.getsockname)
    assert caught.value.path.startswith("function")
    assert Kind.REQUEST not in sent


# What is not a tuple of arguments. In each case a comma was forgotten: ``args=(x)`` is ``args=x``.

ENTRIES: dict[str, Callable[..., Any]] = {
    "rpc_sync": functools.partial(bh.rpc_sync, "bob", remote.combine),
    "rpc_async": functools.partial(bh.rpc_async, "bob", remote.combine),
    "remote": functools.partial(bh.remote, "bob", remote.combine),
    "remote to itself": functools.partial(bh.remote, "alice", remote.combine),
    "rpc_sync with retry": functools.partial(bh.rpc_sync, "bob", remote.combine, retry=bh.Retry()),
    "rpc_async with retry": functools.partial(bh.rpc_async, "bob", remote.combine, retry=bh.Retry()),
    "RemoteModule": functools.partial(bh.nn.RemoteModule, "bob", torch.nn.Identity),
    "launch": functools.partial(bh.launch, remote.combine, 1),
}
NO_TUPLES: dict[str, tuple[Any, str]] = {
    "tensor": (torch.ones(2), r"a Tensor of shape \(2,\)"),
    "tensor of one element": (torch.ones(1), r"a Tensor of shape \(1,\)"),
    "scalar tensor": (torch.tensor(5.0), r"a Tensor of shape \(\)"),
    "tensor that is zero": (torch.zeros(1), r"a Tensor of shape \(1,\)"),
    "empty tensor": (torch.empty(0), r"a Tensor of shape \(0,\)"),
    "parameter": (torch.nn.Parameter(torch.ones(1)), r"a Parameter of shape \(1,\)"),
    "string": ("ab", "a str"),
    "empty string": ("", "a str"),
    "integer": (0, "an int"),
    "dict": ({}, "a dict"),
    "set": ({1}, "a set"),
    "array": (np.ones(2), "a ndarray"),
    "iterator": (iter([1]), "a list_iterator"),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_args_that_are_no_tuple_are_refused(entry: str, sent: list[Kind]) -> None:
    for value, described in NO_TUPLES.values():
        with pytest.raises(TypeError, match=rf"args must be a tuple or a list, not {described}; .*args=\(x,\)"):
            ENTRIES[entry](args=value)
    assert Kind.REQUEST not in sent


@pytest.mark.parametrize("entry", ENTRIES)
def test_kwargs_that_are_no_dict_are_refused(entry: str, sent: list[Kind]) -> None:
    for value in (torch.zeros(1), [("other", 1)], [], (), "", 0):
        with pytest.raises(TypeError, match=r"kwargs must be a dict, not an? \w+( of shape .*)?; write kwargs="):
            ENTRIES[entry](args=(1,), kwargs=value)
    assert Kind.REQUEST not in sent


@pytest.mark.usefixtures("workers")
def test_args_may_be_tuples_and_lists_of_any_class() -> None:
    expected = remote.combine(1, [2], other=3)
    for args in ((1, [2]), [1, [2]], remote.Pair(1, [2])):
        for kwargs in ({"other": 3}, OrderedDict(other=3), types.MappingProxyType({"other": 3})):
            assert bh.rpc_sync("bob", remote.combine, args, kwargs) == expected
            assert bh.rpc_async("bob", remote.combine, args, kwargs).wait() == expected
            assert bh.remote("bob", remote.combine, args, kwargs).to_here() == expected
    for nothing in ((), [], None):
        assert bh.rpc_sync("bob", remote.whoami, nothing, {}) == "bob"
