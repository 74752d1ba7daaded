"""Every tensor that torch can make arrives unchanged, in no more bytes than it has, and shares memory as before.

The oracle is torch itself: bits, ``torch.equal``, strides, and writes through one tensor seen through another.
"""

from __future__ import annotations

import itertools
import math
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backhaul._wire.tensors.reader import read_tensors
from backhaul._wire.tensors.specs import Ordinary, Part, TensorSpec, TensorTable
from backhaul._wire.tensors.writer import TensorWriter, write_all_ordinary
from backhaul.errors import ProtocolError, SerializationError

DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
QUANTIZED = [torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4]
PLAIN = [dtype for dtype in DTYPES if dtype not in QUANTIZED]
BYTES = bytearray(value % 251 + 1 for value in range(16 * 24))

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")  # torch warns once that CSR is in beta, and similar


def write(*tensors: torch.Tensor) -> tuple[TensorTable, list[bytearray]]:
    writer = TensorWriter()
    for tensor in tensors:
        writer.add(tensor)
    table, buffers, _keep = writer.finish()
    packed = msgspec.msgpack.encode(table)
    return msgspec.msgpack.decode(packed, type=TensorTable), [bytearray(buffer) for buffer in buffers]


def carry_all(*tensors: torch.Tensor) -> tuple[list[torch.Tensor], int]:
    """The tensors that arrive, and how many bytes of memory they took."""
    table, buffers = write(*tensors)
    return read_tensors(table, buffers), sum(map(len, buffers))


def carry(tensor: torch.Tensor) -> torch.Tensor:
    ((made,), _) = carry_all(tensor)
    return made


def size_of(*tensors: torch.Tensor) -> int:
    return carry_all(*tensors)[1]


def bits(tensor: torch.Tensor) -> list[int]:
    """All elements, in order, as integers."""
    size = tensor.dtype.itemsize
    memory = bytes(tensor.untyped_storage())
    places = itertools.product(*(range(n) for n in tensor.shape))
    starts = (tensor.storage_offset() + sum(i * s for i, s in zip(at, tensor.stride(), strict=True)) for at in places)
    return [int.from_bytes(memory[start * size : (start + 1) * size], "little") for start in starts]


def assert_same(made: torch.Tensor, tensor: torch.Tensor) -> None:
    assert made.dtype == tensor.dtype
    assert made.shape == tensor.shape
    assert made.layout == tensor.layout
    assert made.device == tensor.device
    assert bits(made) == bits(tensor)


# One tensor alone.


@pytest.mark.parametrize("dtype", PLAIN, ids=str)
class TestEveryDtype:
    @staticmethod
    def matrix(dtype: torch.dtype) -> torch.Tensor:
        memory = bytearray(value % 2 for value in BYTES) if dtype is torch.bool else bytearray(BYTES)
        return torch.frombuffer(memory, dtype=dtype)[:24].view(4, 6)

    def test_contiguous(self, dtype: torch.dtype) -> None:
        assert_same(carry(self.matrix(dtype)), self.matrix(dtype))

    def test_transposed(self, dtype: torch.dtype) -> None:
        made = carry(self.matrix(dtype).t())
        assert_same(made, self.matrix(dtype).t())
        assert made.stride() == (1, 6)

    def test_with_holes(self, dtype: torch.dtype) -> None:
        tensor = self.matrix(dtype)[::2, 1::3]
        (made,), nbytes = carry_all(tensor)
        assert_same(made, tensor)
        assert nbytes == 4 * dtype.itemsize

    def test_0_dim(self, dtype: torch.dtype) -> None:
        (made,), nbytes = carry_all(self.matrix(dtype)[3, 5])
        assert_same(made, self.matrix(dtype)[3, 5])
        assert nbytes == dtype.itemsize

    def test_empty(self, dtype: torch.dtype) -> None:
        assert_same(carry(self.matrix(dtype)[:0]), self.matrix(dtype)[:0])

    def test_shared(self, dtype: torch.dtype) -> None:
        matrix = self.matrix(dtype)
        (first, second), nbytes = carry_all(matrix, matrix[1:3])
        assert_same(first, matrix)
        assert_same(second, matrix[1:3])
        assert nbytes == 24 * dtype.itemsize


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -0.0, 5e-324, 1.7976931348623157e308])
def test_special_floats_keep_their_bits(value: float) -> None:
    assert_same(carry(torch.tensor([value])), torch.tensor([value]))
    assert_same(carry(torch.tensor(value, dtype=torch.float64)), torch.tensor(value, dtype=torch.float64))


@pytest.mark.parametrize(
    ("shape", "stride"),
    [((0,), (1,)), ((0,), (7,)), ((3, 0, 2), (2, 2, 1)), ((0, 5), (1, 4)), ((2, 0), (0, 0)), ((0,), (0,))],
)
def test_empty_tensors_keep_shape_and_stride(shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    (made,), nbytes = carry_all(torch.empty_strided(shape, stride, dtype=torch.int16))
    assert (made.shape, made.stride(), made.dtype) == (shape, stride, torch.int16)
    assert nbytes == 0


@pytest.mark.parametrize("format", [torch.channels_last, torch.contiguous_format])
def test_memory_format_is_kept(format: torch.memory_format) -> None:
    tensor = torch.randn(2, 3, 4, 5).to(memory_format=format)
    (made,), nbytes = carry_all(tensor)
    assert torch.equal(made, tensor)
    assert made.stride() == tensor.stride()
    assert made.is_contiguous(memory_format=format)
    assert nbytes == 4 * 120


def test_channels_last_3d_is_kept() -> None:
    tensor = torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d)
    assert carry(tensor).is_contiguous(memory_format=torch.channels_last_3d)
    assert torch.equal(carry(tensor), tensor)


@pytest.mark.parametrize(
    ("make", "nbytes"),
    [
        (lambda: torch.tensor(3.0).expand(1000, 1000), 4),
        (lambda: torch.arange(1000.0).expand(1000, 1000), 4000),
        (lambda: torch.arange(1000.0)[:, None].expand(1000, 1000), 4000),
        (lambda: torch.randn(10, 1, 10).expand(10, 500, 10), 400),
        (lambda: torch.arange(10.0).unfold(0, 4, 1), 40),
    ],
)
def test_expanded_tensors_are_sent_small(make: Callable[[], torch.Tensor], nbytes: int) -> None:
    tensor = make()
    (made,), sent = carry_all(tensor)
    assert torch.equal(made, tensor)
    assert made.stride() == tensor.stride()
    assert sent == nbytes


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(1000)[::10],
        lambda: torch.randn(100, 100)[:, 7],
        lambda: torch.randn(100, 100)[3],
        lambda: torch.randn(100, 100)[:50, :3],
        lambda: torch.randn(100, 100).t()[:, ::9],
        lambda: torch.randn(10, 10, 10).permute(2, 0, 1)[::3, :, 1:],
        lambda: torch.randn(100, 100).diagonal(),
        lambda: torch.view_as_real(torch.randn(50, dtype=torch.complex64))[:, 1],
        lambda: torch.randn(50, dtype=torch.complex64).imag,
        lambda: torch.randn(1000)[990:],
    ],
)
def test_what_lies_between_the_elements_is_not_sent(make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    (made,), sent = carry_all(tensor)
    assert torch.equal(made, tensor)
    assert sent == tensor.numel() * tensor.itemsize


@pytest.mark.parametrize(
    "make",
    [
        lambda z: z.conj(),
        lambda z: z.conj().imag,
        lambda z: z.conj().t(),
        lambda z: z.conj()[::2],
        lambda z: torch._neg_view(z.real),
        torch._neg_view,
        lambda z: torch._neg_view(z.conj()),
    ],
    ids=["conj", "neg", "conj t", "conj slice", "neg slice", "neg view", "both"],
)
def test_lazy_conjugates_and_negatives_are_sent_as_values(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensor = make(torch.randn(4, 4, dtype=torch.complex64))
    assert tensor.is_conj() or tensor.is_neg()
    made = carry(tensor)
    assert torch.equal(made, tensor.resolve_conj().resolve_neg())
    assert made.dtype == tensor.dtype


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(3, 4, device="meta"),
        lambda: torch.empty(1 << 40, 1 << 20, device="meta", dtype=torch.int8),
        lambda: torch.empty(3, 4, device="meta", dtype=torch.bfloat16).t(),
        lambda: torch.empty(9, device="meta")[::2],
        lambda: torch.empty((), device="meta"),
        lambda: torch.empty(0, 2, device="meta"),
    ],
)
def test_meta_tensors_take_no_memory(make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    (made, real), nbytes = carry_all(tensor, torch.ones(2))
    assert made.is_meta
    assert (made.dtype, made.shape, made.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert torch.equal(real, torch.ones(2))
    assert nbytes == 8


class TestRequiresGrad:
    @pytest.mark.parametrize("flag", [True, False])
    def test_of_a_leaf(self, flag: bool) -> None:
        made = carry(torch.ones(3, requires_grad=flag))
        assert made.requires_grad is flag
        assert made.is_leaf

    def test_of_a_result(self) -> None:
        result = torch.ones(3, requires_grad=True) * 2
        made = carry(result)
        assert made.requires_grad
        assert made.grad_fn is None
        assert torch.equal(made, torch.full((3,), 2.0))

    @pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
    def test_of_sparse(self, layout: torch.layout) -> None:
        tensor = torch.eye(3).to_sparse(layout=layout).requires_grad_()
        assert carry(tensor).requires_grad
        assert not carry(tensor.detach()).requires_grad

    def test_is_read_under_no_grad(self) -> None:
        table, buffers = write(torch.ones(3, requires_grad=True))
        with torch.no_grad():
            (made,) = read_tensors(table, buffers)
        assert made.requires_grad

    def test_the_original_is_not_touched(self) -> None:
        tensor = torch.ones(3, requires_grad=True)
        carry(tensor).sum().backward()
        assert tensor.grad is None


def test_what_arrives_can_be_written_and_is_not_the_original() -> None:
    tensor = torch.zeros(5)
    made = carry(tensor)
    made += 1
    assert torch.equal(made, torch.ones(5))
    assert torch.equal(tensor, torch.zeros(5))


def test_contiguous_memory_is_sent_where_it_is() -> None:
    tensor = torch.zeros(1000)
    writer = TensorWriter()
    writer.add(tensor)
    _table, (buffer,), _keep = writer.finish()
    tensor.fill_(1)
    assert bytes(buffer) == bytes(tensor.numpy())


# Layouts.


def hybrid() -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[0, 2], [1, 0]]), torch.randn(2, 3), (3, 4, 3))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(4).to_sparse(),
        lambda: torch.sparse_coo_tensor(torch.tensor([[1, 1, 0]]), torch.tensor([1.0, 2.0, 3.0]), (5,)),
        lambda: torch.sparse_coo_tensor(torch.tensor([[0, 1]]), torch.tensor([1, 2]), (3,), is_coalesced=True),
        lambda: torch.sparse_coo_tensor((2, 3)),
        lambda: torch.sparse_coo_tensor((0,), dtype=torch.complex64),
        lambda: torch.sparse_coo_tensor(torch.empty(0, 2, dtype=torch.int64), torch.tensor([1.0, 2.0]), ()),
        hybrid,
        lambda: hybrid().transpose(0, 1),
        lambda: torch.eye(4, dtype=torch.bfloat16).to_sparse(),
        lambda: torch.eye(4, dtype=torch.bool).to_sparse(),
    ],
)
def test_coo(make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    made = carry(tensor)
    assert made.layout is torch.sparse_coo
    assert made.is_coalesced() == tensor.is_coalesced()
    assert (made.dtype, made.shape, made._nnz()) == (tensor.dtype, tensor.shape, tensor._nnz())
    assert (made.sparse_dim(), made.dense_dim()) == (tensor.sparse_dim(), tensor.dense_dim())
    assert torch.equal(made._indices(), tensor._indices())
    assert torch.equal(made._values(), tensor._values())
    assert torch.equal(made.to_dense(), tensor.to_dense())


COMPRESSED = {
    torch.sparse_csr: (torch.Tensor.crow_indices, torch.Tensor.col_indices),
    torch.sparse_csc: (torch.Tensor.ccol_indices, torch.Tensor.row_indices),
    torch.sparse_bsr: (torch.Tensor.crow_indices, torch.Tensor.col_indices),
    torch.sparse_bsc: (torch.Tensor.ccol_indices, torch.Tensor.row_indices),
}


@pytest.mark.parametrize("layout", COMPRESSED, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.complex128, torch.bool], ids=str)
@pytest.mark.parametrize("kind", ["matrix", "batch", "zero", "none", "narrow", "hybrid"])
def test_compressed(layout: torch.layout, dtype: torch.dtype, kind: str) -> None:
    block = (2, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
    dense = torch.zeros(4, 6, dtype=dtype)
    dense[0, 1] = dense[2, 5] = dense[3, 0] = 1
    dense_dim = 0
    if kind == "batch":
        dense = torch.stack([dense, dense])
    elif kind == "zero":
        dense = torch.zeros_like(dense)
    elif kind == "none":
        dense = dense[:0]
    elif kind == "hybrid":
        dense, dense_dim = dense[..., None].expand(4, 6, 3).contiguous(), 1
    tensor = dense.to_sparse(layout=layout, blocksize=block, dense_dim=dense_dim)
    outer, inner = COMPRESSED[layout]
    if kind == "narrow":
        build: Callable[..., torch.Tensor] = torch.sparse_compressed_tensor
        tensor = build(outer(tensor).int(), inner(tensor).int(), tensor.values(), tensor.shape, layout=layout)
    made = carry(tensor)
    assert made.layout is layout
    assert (made.dtype, made.shape) == (tensor.dtype, tensor.shape)
    for part in (outer, inner, torch.Tensor.values):
        assert torch.equal(part(made), part(tensor))
        assert part(made).dtype == part(tensor).dtype
    assert torch.equal(made.to_dense(), tensor.to_dense())


def quantized(dtype: torch.dtype, scheme: str) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantization is deprecated upstream
        values = torch.linspace(-3, 3, 24).view(4, 6)
        if scheme == "tensor":
            return torch.quantize_per_tensor(values, 0.125, 3, dtype)
        scales = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
        zeros = torch.tensor([0.5, 1.5, 2.0, 0.0] if scheme == "floats" else [0, 1, 2, 3])
        return torch.quantize_per_channel(values, scales, zeros, 0, dtype)


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32], ids=str)
@pytest.mark.parametrize(
    "view", [lambda q: q, lambda q: q.t(), lambda q: q[:, ::2], lambda q: q[:0]], ids=["all", "t", "holes", "none"]
)
def test_quantized_per_tensor(dtype: torch.dtype, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensor = view(quantized(dtype, "tensor"))
    made = carry(tensor)
    assert (made.dtype, made.shape, made.qscheme()) == (dtype, tensor.shape, torch.per_tensor_affine)
    assert (made.q_scale(), made.q_zero_point()) == (0.125, 3)
    assert torch.equal(made.int_repr(), tensor.int_repr())
    assert torch.equal(made.dequantize(), tensor.dequantize())


@pytest.mark.parametrize(
    ("dtype", "scheme"),
    [(torch.qint8, "channel"), (torch.quint8, "channel"), (torch.qint32, "channel"), (torch.quint8, "floats")],
)
def test_quantized_per_channel(dtype: torch.dtype, scheme: str) -> None:
    tensor = quantized(dtype, scheme)
    made = carry(tensor)
    assert (made.dtype, made.shape, made.qscheme()) == (dtype, tensor.shape, tensor.qscheme())
    assert made.q_per_channel_axis() == 0
    assert torch.equal(made.q_per_channel_scales(), tensor.q_per_channel_scales())
    assert torch.equal(made.q_per_channel_zero_points(), tensor.q_per_channel_zero_points())
    assert torch.equal(made.int_repr(), tensor.int_repr())
    assert torch.equal(made.dequantize(), tensor.dequantize())


def test_quantized_axis_is_kept() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensor = torch.quantize_per_channel(
            torch.randn(2, 3), torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 1, 2]), 1, torch.qint8
        )
    made = carry(tensor)
    assert made.q_per_channel_axis() == 1
    assert torch.equal(made.dequantize(), tensor.dequantize())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize(
    "parts",
    [
        lambda: [torch.randn(2), torch.randn(3)],
        lambda: [torch.randn(2, 5), torch.randn(3, 1), torch.randn(0, 4)],
        lambda: [torch.randn(4, dtype=torch.float64)],
        lambda: [torch.randn(3, 4).t(), torch.randn(2, 2)],
    ],
)
def test_nested(parts: Callable[[], list[torch.Tensor]], flag: bool) -> None:
    tensor = torch.nested.nested_tensor(parts(), requires_grad=flag)
    assert tensor.layout is torch.strided
    made = carry(tensor)
    assert made.is_nested
    assert (made.dtype, made.layout, made.requires_grad) == (tensor.dtype, torch.strided, flag)
    assert len(made.unbind()) == len(tensor.unbind())
    for mine, yours in zip(made.unbind(), tensor.unbind(), strict=True):
        assert torch.equal(mine, yours)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_and_its_parts_are_sent_once() -> None:
    tensor = torch.nested.nested_tensor([torch.randn(100), torch.randn(50)])
    assert size_of(tensor, tensor.unbind()[0]) == 600


def _packed() -> torch.Tensor:
    return quantized(torch.quint4x2, "floats")


@pytest.mark.parametrize("make", [lambda: torch.ones(2).to_mkldnn(), _packed], ids=["mkldnn", "quint4x2"])
def test_a_tensor_that_cannot_be_sent_raises(make: Callable[[], torch.Tensor]) -> None:
    with pytest.raises(SerializationError):
        write(make())


# Several tensors: memory that is shared.


def assert_shared(first: torch.Tensor, second: torch.Tensor) -> None:
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def test_overlapping_views_are_sent_once_and_share_again() -> None:
    base = torch.arange(100.0)
    (low, high), nbytes = carry_all(base[:60], base[40:])
    assert nbytes == 400
    assert torch.equal(low, base[:60])
    assert torch.equal(high, base[40:])
    low[50] = -1
    assert high[10] == -1
    high[0] = -2
    assert low[40] == -2


def test_a_tensor_and_its_transpose_share() -> None:
    base = torch.randn(30, 40)
    (made, turned), nbytes = carry_all(base, base.t())
    assert nbytes == 4800
    made[3, 4] = 7
    assert turned[4, 3] == 7
    assert turned.stride() == (1, 40)


def test_the_same_view_twice_is_sent_once() -> None:
    base = torch.randn(1000)
    (first, second), nbytes = carry_all(base[5:], base[5:])
    assert nbytes == 4 * 995
    first.zero_()
    assert torch.equal(second, torch.zeros(995))


def test_views_of_other_dtypes_share() -> None:
    base = torch.arange(16, dtype=torch.int64)
    views = [base, base.view(torch.uint8)[3:101], base.view(torch.float32)[5:9], base.view(torch.complex64)[2:]]
    made, nbytes = carry_all(*views)
    assert nbytes == 128
    for got, view in zip(made, views, strict=True):
        assert_same(got, view)
    made[0].zero_()
    assert all(not any(bits(got)) for got in made)


def test_views_of_other_dtypes_share_from_an_odd_byte_on() -> None:
    base = torch.arange(1, 5, dtype=torch.int64)
    views = [base.view(torch.uint8)[3:20], base[1:2], base.view(torch.int16)[5:9]]
    made, _ = carry_all(*views)
    for got, view in zip(made, views, strict=True):
        assert_same(got, view)


def test_disjoint_views_of_a_large_storage_are_sent_alone() -> None:
    base = torch.arange(1_000_000)
    (low, high), nbytes = carry_all(base[:10], base[-10:])
    assert nbytes == 160
    assert torch.equal(low, base[:10])
    assert torch.equal(high, base[-10:])


def test_columns_of_a_matrix_are_sent_without_those_between_them() -> None:
    """The tensors are disjoint, but their memory ranges overlap."""
    base = torch.arange(1_000_000).view(1000, 1000)
    (first, second), nbytes = carry_all(base[:, 3], base[:, 700:702])
    assert torch.equal(first, base[:, 3])
    assert torch.equal(second, base[:, 700:702])
    assert nbytes == 3 * 8000


def test_neighbours_are_disjoint() -> None:
    base = torch.arange(100)
    made, nbytes = carry_all(*base.split(10))
    assert nbytes == 800
    assert torch.equal(torch.cat(made), base)


def test_equal_tensors_of_their_own_stay_apart() -> None:
    first, second = carry_all(torch.zeros(9), torch.zeros(9))[0]
    first += 1
    assert torch.equal(second, torch.zeros(9))


def test_only_the_stretch_that_is_covered_is_sent() -> None:
    base = torch.arange(1_000_000)
    assert size_of(base[500:600], base[550:650]) == 150 * 8


def test_parts_of_sparse_tensors_share_with_others() -> None:
    values = torch.ones(3)
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 1, 2]]), values, (3,), is_coalesced=True)
    assert_shared(sparse._values(), values)
    made, made_values = carry_all(sparse, values)[0]
    made_values.mul_(5)
    assert torch.equal(made.to_dense(), torch.full((3,), 5.0))


def test_shared_memory_with_flags_and_metas_between() -> None:
    base = torch.arange(10.0)
    tensors = [base[2:], torch.empty(0), torch.empty(3, device="meta"), base.clone().requires_grad_(), base[:5]]
    made, nbytes = carry_all(*tensors)
    assert nbytes == 80
    made[0][0] = 50
    assert made[4][2] == 50
    assert made[3].requires_grad
    assert made[2].is_meta
    assert made[1].shape == (0,)


@st.composite
def views(draw: st.DrawFn, base: torch.Tensor) -> torch.Tensor:
    """A view of ``base`` after a few operations."""
    view = base
    if draw(st.booleans()):
        view = view.view(draw(st.sampled_from([torch.uint8, torch.int16, torch.float32, torch.int64])))
    for _ in range(draw(st.integers(0, 4))):
        step = draw(st.sampled_from(["slice", "slice", "select", "transpose", "fold", "expand"]))
        if step == "slice" and view.dim():
            axis = draw(st.integers(0, view.dim() - 1))
            start = draw(st.integers(0, view.shape[axis]))
            stop = draw(st.integers(start, view.shape[axis]))
            cut = [slice(None)] * view.dim()
            cut[axis] = slice(start, stop, draw(st.integers(1, 3)))
            view = view[tuple(cut)]
        elif step == "select" and view.dim() and view.shape[0]:
            view = view[draw(st.integers(0, view.shape[0] - 1))]
        elif step == "transpose" and view.dim() > 1:
            view = view.transpose(0, draw(st.integers(1, view.dim() - 1)))
        elif step == "fold" and view.dim() and view.shape[0] % 2 == 0:
            view = view.unflatten(0, (2, view.shape[0] // 2))
        elif step == "expand":
            view = view.unsqueeze(0).expand(draw(st.integers(0, 3)), *view.shape)
    return view


def fresh() -> torch.Tensor:
    return torch.arange(1, 97, dtype=torch.uint8)


@given(st.data())
@settings(max_examples=150)
def test_any_view_arrives_in_no_more_bytes_than_it_has(data: st.DataObject) -> None:
    view = data.draw(views(fresh()))
    (made,), nbytes = carry_all(view)
    assert_same(made, view)
    assert nbytes <= view.numel() * view.itemsize


@given(st.data())
@settings(max_examples=150)
def test_any_views_of_one_storage_alias_as_they_did(data: st.DataObject) -> None:
    base = fresh()
    tensors = [data.draw(views(base)) for _ in range(data.draw(st.integers(2, 4)))]
    made, nbytes = carry_all(*tensors)
    for got, tensor in zip(made, tensors, strict=True):
        assert_same(got, tensor)
    assert nbytes <= 96 + 8  # no byte twice; the start may move to align with the largest elements
    for index, (got, tensor) in enumerate(zip(made, tensors, strict=True)):
        if 0 not in tensor.stride():
            got.fill_(index + 100)
            tensor.fill_(index + 100)
            assert [bits(one) for one in made] == [bits(one) for one in tensors]


# Ordinary tensors have a form of their own.


def write_ordinary(*tensors: torch.Tensor) -> tuple[TensorTable, list[bytearray]] | None:
    written = write_all_ordinary(tensors)
    if written is None:
        return None
    table, buffers = written
    packed = msgspec.msgpack.encode(table)
    return msgspec.msgpack.decode(packed, type=TensorTable), [bytearray(buffer) for buffer in buffers]


COMMON = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


@st.composite
def any_tensors(draw: st.DrawFn) -> torch.Tensor:
    """A tensor that is dense, expanded in some dimensions or all, transposed, with gaps, or empty."""
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    stored = [1 if draw(st.booleans()) else size for size in shape] if draw(st.booleans()) else shape
    dtype = draw(st.sampled_from([*COMMON, torch.int16, torch.complex64]))
    tensor = torch.arange(math.prod(stored)).to(dtype).view(stored).expand(shape)
    if draw(st.booleans()):
        tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    if shape and draw(st.booleans()):
        tensor = tensor[:: draw(st.integers(1, 2))]
    return tensor.requires_grad_() if dtype.is_floating_point and draw(st.booleans()) else tensor


@given(st.lists(any_tensors(), min_size=1, max_size=3))
@settings(max_examples=300)
def test_the_ordinary_form_gives_what_the_general_form_gives(tensors: list[torch.Tensor]) -> None:
    written = write_ordinary(*tensors)
    if written is None:
        return
    table, buffers = write(*tensors)
    assert written[1] == buffers
    for got, expected in zip(read_tensors(*written), read_tensors(table, buffers), strict=True):
        assert got.dtype == expected.dtype
        assert got.shape == expected.shape
        assert got.stride() == expected.stride()
        assert got.requires_grad == expected.requires_grad
        assert got.is_leaf
        assert got.untyped_storage().nbytes() == expected.untyped_storage().nbytes()
        assert got.equal(expected)


@pytest.mark.parametrize("dtype", COMMON, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (1, 1, 2)], ids=str)
def test_what_is_ordinary(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    assert write_ordinary(torch.ones(shape, dtype=dtype)) is not None
    assert write_ordinary(torch.ones((), dtype=dtype).expand(shape)) is not None


MATRIX = torch.arange(12.0).view(3, 4)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(0),
        torch.ones(2, 0),
        torch.ones(3, device="meta"),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.ones(3, dtype=torch.complex64).conj().imag,
        torch.ones(3, dtype=torch.int16),
        torch.ones(1, 3).expand(2, 3),
        MATRIX.t(),
        MATRIX[:, 1],
        torch.eye(3).to_sparse(),
        torch.ones(1).view((1,) * 1500),
    ],
    ids=["empty", "also empty", "meta", "conj", "neg", "dtype", "rows", "t", "column", "coo", "many dims"],
)
def test_what_is_not_ordinary(tensor: torch.Tensor) -> None:
    assert write_ordinary(tensor) is None
    assert write_ordinary(torch.ones(2), tensor) is None


def test_a_tensor_whose_storage_was_freed_is_refused() -> None:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    assert write_ordinary(tensor) is None
    with pytest.raises(SerializationError, match="freed"):
        write(tensor)


def test_tensors_on_the_same_memory_are_not_ordinary() -> None:
    flat = MATRIX.view(-1)
    assert write_ordinary(flat, MATRIX) is None
    assert write_ordinary(flat[:5], flat[4:]) is None
    assert write_ordinary(flat[4:], flat[:5]) is None
    assert write_ordinary(flat, flat[3].expand(7)) is None
    assert write_ordinary(flat[3].expand(7), flat[3].expand(2)) is None
    assert write_ordinary(flat[:4], flat[4:]) is not None
    assert write_ordinary(flat[6:], torch.ones(3), flat[:6]) is not None


# What a peer may not say.


def table_of(part: Part, **spec: Any) -> TensorTable:
    return TensorTable((TensorSpec((0,), **spec),), (part,))


STRIDED = {
    "buffer too high": Part(1, "float32", (16,)),
    "buffer too low": Part(-2, "float32", (16,)),
    "no such dtype": Part(0, "float33", (16,)),
    "not a dtype": Part(0, "nn", (16,)),
    "too long": Part(0, "float32", (17,)),
    "too short": Part(0, "float32", (15,)),
    "too large": Part(0, "float32", (4, 5)),
    "far too large": Part(0, "float32", (1 << 62, 1 << 62)),
    "wraps around": Part(0, "uint8", (1 << 32, 1 << 32)),
    "negative size": Part(0, "float32", (-16,)),
    "size to be guessed": Part(0, "float32", (-1,)),
    "size to be guessed too": Part(0, "float32", (4, -1)),
    "two negative sizes": Part(0, "float32", (-4, -4)),
    "offset without stride": Part(0, "float32", (16,), None, 1),
    "stride too long": Part(0, "float32", (16,), (2,)),
    "just too long": Part(0, "float32", (2, 3), (8, 4)),
    "negative stride": Part(0, "float32", (4,), (-1,)),
    "negative stride from the end": Part(0, "float32", (4,), (-1,), 15),
    "stride beyond 64 bits": Part(0, "float32", (1,), (1 << 63,)),
    "stride beyond 64 bits, empty": Part(0, "float32", (0,), (1 << 63,)),
    "shape beyond 64 bits": Part(0, "float32", (1 << 63,), (0,)),
    "more elements than can be counted": Part(0, "float32", (1 << 40, 1 << 40), (0, 0)),
    "negative offset": Part(0, "float32", (4,), (1,), -1),
    "offset too high": Part(0, "float32", (4,), (1,), 13),
    "offset far too high": Part(0, "float32", (1,), (1,), 1 << 62),
    "offset beyond 64 bits": Part(0, "float32", (0,), (1 << 63,), 1 << 63),
    "fewer strides than sizes": Part(0, "float32", (2, 2), (1,)),
    "more strides than sizes": Part(0, "float32", (2,), (1, 1)),
    "elements without memory": Part(-1, "float32", (4,), (1,)),
    "many elements without memory": Part(-1, "float32", (1 << 60,), (1,)),
    "no memory, negative stride": Part(-1, "float32", (0,), (-1,)),
    "no memory, negative size": Part(-1, "float32", (-1,), (1,)),
    "no memory, no stride": Part(-1, "float32", (0, 2), (1,)),
    "no memory, another device": Part(-1, "float32", (0,), (1,), 0, "cuda"),
    "no memory, no device": Part(-1, "float32", (0,), (1,), 0, "abacus"),
    "quantized without a scale": Part(0, "qint8", (64,)),
    "quantized without a scale, strided": Part(0, "qint8", (64,), (1,)),
}


@pytest.mark.parametrize("name", STRIDED)
def test_a_part_that_makes_no_sense_is_refused(name: str) -> None:
    with pytest.raises(ProtocolError):
        read_tensors(table_of(STRIDED[name]), [bytearray(64)])


@pytest.mark.parametrize("spec", [(), (1,), (-1,), (5,), (0, 0)], ids=str)
def test_a_spec_of_the_wrong_parts_is_refused(spec: tuple[int, ...]) -> None:
    with pytest.raises(ProtocolError):
        read_tensors(TensorTable((TensorSpec(spec),), (Part(0, "float32", (16,)),)), [bytearray(64)])


PARTS = (
    torch.tensor([[0, 1, 2]]),
    torch.tensor([1.0, 2.0, 3.0]),
    torch.tensor([1, 2, 3], dtype=torch.int8),
    torch.tensor([[0, 1, -1]]),
    torch.tensor([0, 1, 2]),
    torch.tensor([1.0]),
    torch.tensor([1]),
)
SPECS = {
    "no such layout": TensorSpec((0,), layout="nonesuch"),
    "coo: a part is missing": TensorSpec((0,), layout="coo", shape=(3,), detail=(True,)),
    "coo: a part too many": TensorSpec((0, 1, 2), layout="coo", shape=(3,), detail=(True,)),
    "coo: no detail": TensorSpec((0, 1), layout="coo", shape=(3,)),
    "coo: negative size": TensorSpec((0, 1), layout="coo", shape=(-3,), detail=(True,)),
    "coo: index too high": TensorSpec((0, 1), layout="coo", shape=(1,), detail=(True,)),
    "coo: index too low": TensorSpec((3, 1), layout="coo", shape=(3,), detail=(True,)),
    "coo: indices of the wrong dtype": TensorSpec((2, 1), layout="coo", shape=(3,), detail=(True,)),
    "csr: two parts are missing": TensorSpec((0,), layout="csr", shape=(2, 2)),
    "csr: a part is missing": TensorSpec((0, 1), layout="csr", shape=(2, 2)),
    "csr: parts do not fit": TensorSpec((0, 0, 1), layout="csr", shape=(2, 2)),
    "csr: index too high": TensorSpec((4, 4, 1), layout="csr", shape=(1, 1)),
    "quantized: no detail": TensorSpec((2,), layout="quantized", shape=(3,)),
    "quantized: too little detail": TensorSpec((2,), layout="quantized", shape=(3,), detail=(0.5,)),
    "quantized: not numbers": TensorSpec((2,), layout="quantized", shape=(3,), detail=("half", "none")),
    "quantized: of floats": TensorSpec((1,), layout="quantized", shape=(3,), detail=(0.5, 0)),
    "channel: parts are missing": TensorSpec((2,), layout="quantized_channel", shape=(3,), detail=(0,)),
    "channel: no axis": TensorSpec((2, 1, 4), layout="quantized_channel", shape=(3,)),
    "channel: axis too high": TensorSpec((2, 1, 4), layout="quantized_channel", shape=(3,), detail=(1,)),
    "channel: axis too low": TensorSpec((2, 1, 4), layout="quantized_channel", shape=(3,), detail=(-1,)),
    "channel: too few scales": TensorSpec((2, 5, 6), layout="quantized_channel", shape=(3,), detail=(0,)),
    "integers that require grad": TensorSpec((4,), requires_grad=True),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SPECS)
def test_a_spec_that_makes_no_sense_is_refused(name: str) -> None:
    table, buffers = write(*PARTS)
    with pytest.raises(ProtocolError):
        read_tensors(TensorTable((SPECS[name],), table.parts), buffers)


def test_a_buffer_of_half_an_element_is_refused() -> None:
    with pytest.raises(ProtocolError):
        read_tensors(table_of(Part(0, "float32", (4,))), [bytearray(18)])


def ordinary_of(
    dtype: Any = "float32", shape: Any = (16,), requires_grad: Any = False, expanded: Any = False
) -> TensorTable:
    return TensorTable(ordinary=(msgspec.msgpack.encode((dtype, shape, requires_grad, expanded)),))


ORDINARY = {
    "no such dtype": ordinary_of("float33"),
    "not a dtype": ordinary_of("nn"),
    "quantized": ordinary_of("qint8", (64,)),
    "another dtype": ordinary_of("complex64", (8,)),
    "too long": ordinary_of(shape=(17,)),
    "too short": ordinary_of(shape=(15,)),
    "far too large": ordinary_of(shape=(1 << 62, 1 << 62)),
    "wraps around": ordinary_of("uint8", (1 << 32, 1 << 32)),
    "negative size": ordinary_of(shape=(-16,)),
    "size to be guessed": ordinary_of(shape=(4, -1)),
    "two negative sizes": ordinary_of(shape=(-4, -4)),
    "empty": ordinary_of(shape=(0,)),
    "integers that require grad": ordinary_of("int32", requires_grad=True),
    "expanded, but of more than one": ordinary_of(expanded=True),
    "not a shape": ordinary_of(shape=16),
    "not a flag": ordinary_of(requires_grad=1),
    "not a record": TensorTable(ordinary=(b"\x01",)),
    "no record": TensorTable(ordinary=(b"",)),
    "garbage": TensorTable(ordinary=(b"\xff" * 20,)),
    "more records than buffers": TensorTable(ordinary=ordinary_of(shape=(16,)).ordinary * 2),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_a_record_that_makes_no_sense_is_refused(name: str) -> None:
    for _ in range(2):
        with pytest.raises(ProtocolError):
            read_tensors(ORDINARY[name], [bytearray(64)])


def test_records_for_other_buffers_are_refused() -> None:
    good = ordinary_of()
    assert len(read_tensors(good, [bytearray(64)])) == 1
    for sizes in ([], [63], [65], [0], [64, 64]):
        with pytest.raises(ProtocolError):
            read_tensors(good, [bytearray(size) for size in sizes])


def test_a_tensor_of_more_elements_than_can_be_counted_is_refused() -> None:
    for shape in ((1 << 40, 1 << 40), (1 << 63,), ((1 << 64) - 1,), (1 << 62,)):
        with pytest.raises(ProtocolError):
            read_tensors(ordinary_of(shape=shape, expanded=True), [bytearray(4)])


def test_a_record_too_long_to_remember_is_refused() -> None:
    packed = msgspec.msgpack.encode(ordinary_of(shape=(1,) * 2000))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(packed, type=TensorTable)


small = st.integers(-2, 6)
wild = st.one_of(
    small, small, small, st.sampled_from([1 << 31, 1 << 32, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
)
parts = st.builds(
    Part,
    st.integers(-1, 1),
    st.sampled_from(["uint8", "float32", "complex128", "bool", "float8_e5m2"]),
    st.lists(wild, max_size=3).map(tuple),
    st.none() | st.lists(wild, max_size=3).map(tuple),
    wild,
    st.sampled_from(["", "", "meta"]),
)


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The first address of a tensor, and the address after its last byte."""
    reach = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + reach * tensor.itemsize


@given(st.lists(parts, min_size=1, max_size=3))
@settings(max_examples=300)
def test_no_tensor_reaches_beyond_its_buffer(claims: Sequence[Part]) -> None:
    buffers = [bytearray(64), bytearray(24)]
    table = TensorTable(tuple(TensorSpec((index,)) for index in range(len(claims))), tuple(claims))
    try:
        made = read_tensors(table, buffers)
    except ProtocolError:
        return
    for part, tensor in zip(claims, made, strict=True):
        assert tuple(tensor.shape) == part.shape
        assert all(stride >= 0 for stride in tensor.stride())
        if tensor.numel() and not tensor.is_meta:
            start, end = extent(tensor)
            memory = torch.frombuffer(buffers[part.buffer], dtype=torch.uint8)
            assert part.buffer >= 0
            assert memory.data_ptr() <= start
            assert end <= memory.data_ptr() + memory.numel()


@given(
    st.builds(
        Ordinary,
        st.sampled_from(["uint8", "float32", "bool", "int64", "complex64"]),
        st.lists(wild, max_size=3).map(tuple),
        st.booleans(),
        st.booleans(),
    ),
    st.sampled_from([0, 1, 4, 8, 24, 64]),
)
@settings(max_examples=300)
def test_no_ordinary_tensor_reaches_beyond_its_buffer(claim: Ordinary, size: int) -> None:
    buffer = bytearray(size)
    try:
        (tensor,) = read_tensors(TensorTable(ordinary=(msgspec.msgpack.encode(claim),)), [buffer])
    except ProtocolError:
        return
    assert tuple(tensor.shape) == claim.shape
    assert tensor.requires_grad is claim.requires_grad
    start, end = extent(tensor)
    assert start == torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
    assert end == start + size


def test_reading_leaves_the_warning_filters_of_other_threads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Filters belong to the process. Two threads that change and restore them could leave them changed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table, buffers = write(torch.eye(3).to_sparse_csr())
    before = list(warnings.filters)
    build, inside, go_on = torch.sparse_compressed_tensor, threading.Semaphore(0), threading.Event()

    def slow(*args: Any, **kwargs: Any) -> torch.Tensor:
        inside.release()
        go_on.wait()
        return build(*args, **kwargs)

    monkeypatch.setattr(torch, "sparse_compressed_tensor", slow)
    thread = threading.Thread(target=read_tensors, args=(table, buffers))
    thread.start()
    assert inside.acquire(timeout=60)
    during = list(warnings.filters)
    go_on.set()
    thread.join()
    assert during == before


def test_a_tensor_of_zeros_that_has_no_memory() -> None:
    assert carry(torch._efficientzerotensor((3,))).tolist() == [0.0] * 3
