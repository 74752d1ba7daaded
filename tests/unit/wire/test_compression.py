"""Compressed tensors: what arrives, how far it is from what was sent, and what a receiver refuses."""

from __future__ import annotations

import math
import struct
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backhaul._native import core
from backhaul._wire.call_frames import encode_values, read_reply, reply_frame
from backhaul._wire.codec import Encoded, decode, encode
from backhaul._wire.compression import compress
from backhaul._wire.frames import Frame
from backhaul._wire.messages import Payload, pack, unpack
from backhaul._wire.strict import check_payload
from backhaul._wire.tensors import buffer_forms
from backhaul._wire.tensors.buffer_forms import BLOCK, LOSSY, readable_forms, restore, shrink
from backhaul._wire.tensors.specs import TensorTable, encode_record, read_record
from backhaul.errors import ProtocolError

zstd = pytest.param("zstd", marks=pytest.mark.skipif("zstd" not in readable_forms(), reason="zstd is not installed"))
FORMS = pytest.mark.parametrize("form", [*LOSSY, zstd])
finite = st.floats(-60000.0, 60000.0, width=32)


def sent(*values: Any, form: str, plain: bool = False) -> tuple[Payload, list[Any]]:
    """The payload and the buffers of a compressed message."""
    found = compress(encode(values, names=[""] * len(values), plain=plain), form)
    assert found is not None, "nothing was compressed"
    return unpack(pack(found.payload), Payload), [bytearray(buffer) for buffer in found.buffers]


def carried(*values: Any, form: str, plain: bool = False) -> list[Any]:
    return decode(*sent(*values, form=form, plain=plain))


def there_and_back(numbers: torch.Tensor, form: str) -> torch.Tensor | None:
    made = shrink(memoryview(bytes(numbers.view(torch.uint8).tolist())), form, numbers.dtype)
    if made is None:
        return None
    restored = restore(bytearray(bytes(made.tolist())), form, numbers.dtype, numbers.nbytes)
    return torch.frombuffer(restored, dtype=numbers.dtype)


def as_half(number: float) -> float:
    return float(struct.unpack("<e", struct.pack("<e", number))[0])


def as_bfloat(number: float) -> float:
    """Round to nearest, ties to even, in integers."""
    (bits,) = struct.unpack("<I", struct.pack("<f", number))
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


@given(st.lists(finite, min_size=1, max_size=40))
def test_halves_are_rounded_to_nearest(numbers: list[float]) -> None:
    given = torch.tensor(numbers)
    for form, rounded in (("fp16", as_half), ("bf16", as_bfloat)):
        made = there_and_back(given, form)
        assert made is not None
        assert made.tolist() == [rounded(number) for number in numbers]


@given(st.lists(finite, min_size=1, max_size=3 * BLOCK), st.sampled_from(sorted(LOSSY["int8"], key=str)))
def test_a_byte_is_within_half_a_step_of_its_block(numbers: list[float], dtype: torch.dtype) -> None:
    given = torch.tensor(numbers, dtype=dtype)
    made = there_and_back(given, "int8")
    if made is None:  # the dtype rounds a number up to infinity
        assert not given.isfinite().all()
        return
    for start in range(0, len(numbers), BLOCK):
        old = given[start : start + BLOCK].double()
        new = made[start : start + BLOCK].double()
        peak = float(old.abs().max())
        rounding = torch.finfo(dtype).eps * peak + torch.finfo(torch.float32).tiny * 127
        assert float((new - old).abs().max()) <= peak / 254 * (1 + 1e-5) + rounding


@pytest.mark.skipif("zstd" not in readable_forms(), reason="zstd is not installed")
@given(st.binary(min_size=8, max_size=4000), st.sampled_from([torch.uint8, torch.float16, torch.float32, torch.int64]))
def test_zstd_changes_nothing(data: bytes, dtype: torch.dtype) -> None:
    data = (data * 3)[: 3 * len(data) // 8 * 8]
    made = shrink(data, "zstd", dtype)
    if made is not None:
        assert len(made) < len(data)
        assert bytes(restore(bytearray(bytes(made.tolist())), "zstd", dtype, len(data))) == data


@pytest.mark.parametrize("form", LOSSY)
@pytest.mark.parametrize("count", [1, BLOCK - 1, BLOCK, (1 << 18) + 1, (1 << 18) + BLOCK])
def test_sizes_around_blocks_and_chunks(form: str, count: int) -> None:
    given = torch.linspace(-1, 1, count)
    made = there_and_back(given, form)
    assert made is not None
    assert float((made - given).abs().max()) <= 1 / 250


def test_what_a_form_cannot_hold_travels_as_it_is() -> None:
    big, lost = torch.full((600,), 70000.0), torch.tensor([math.nan, math.inf, -math.inf, 1.0] * 200)
    assert there_and_back(big, "fp16") is None
    assert there_and_back(torch.full((600,), 3.4e38), "bf16") is None
    assert there_and_back(torch.full((600,), 1e300, dtype=torch.float64), "int8") is None
    assert there_and_back(lost, "int8") is None
    for form in ("fp16", "bf16"):
        made = there_and_back(lost, form)
        assert made is not None
        assert torch.equal(made.nan_to_num(7), lost.nan_to_num(7))
    # Only that tensor: others of the message are compressed.
    payload, buffers = sent(big, torch.ones(600), form="fp16")
    assert [len(buffer) for buffer in buffers] == [2400, 1200]
    assert [float(each.max()) for each in decode(payload, buffers)] == [70000.0, 1.0]


def test_tiny_numbers_become_zeros() -> None:
    made = there_and_back(torch.full((300,), 1e-40), "int8")
    assert made is not None
    assert made.count_nonzero() == 0


def values() -> dict[str, Any]:
    base = torch.randn(64, 64)
    rows = torch.randint(0, 50, (2, 400)).unique(dim=1)
    return {
        "dense": base,
        "requires grad": torch.randn(64, 64, requires_grad=True),
        "double": torch.randn(40, 40, dtype=torch.float64),
        "transposed": torch.randn(64, 32).t(),
        "gaps": torch.randn(64, 64)[:, ::2],
        "views": (base[:40], base[20:].t(), base),
        "columns": tuple(torch.randn(300, 8).unbind(1)),
        "sparse": torch.sparse_coo_tensor(rows, torch.randn(rows.shape[1]), (50, 50)),
        "csr": torch.randn(40, 40).to_sparse_csr(),
        "in a dict": {"x": [torch.randn(500), "text"]},
    }


@FORMS
@pytest.mark.parametrize(
    "name",
    ["dense", "requires grad", "double", "transposed", "gaps", "views", "columns", "sparse", "csr", "in a dict"],
)
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_all_kinds_of_tensors(form: str, name: str) -> None:
    torch.manual_seed(0)
    value = values()[name]
    (made,) = carried(value, form=form)
    for new, old in zip(tensors_in(made), tensors_in(value), strict=True):
        assert (new.shape, new.dtype, new.layout, new.requires_grad) == (
            old.shape,
            old.dtype,
            old.layout,
            old.requires_grad,
        )
        if old.layout is torch.strided:
            assert name == "columns" or new.stride() == old.stride()
        old, new = old.detach().to_dense(), new.detach().to_dense()  # noqa: PLW2901 (the same tensors)
        bound = 0.0 if form == "zstd" else 0.05
        assert float((new - old).abs().max()) <= bound
    if name == "views":
        made[2][30] = 9.0
        assert float(made[0][30, 0]) == float(made[1][0, 10]) == 9.0


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class Holder:
    def __init__(self, held: torch.Tensor) -> None:
        self.held = held


@pytest.mark.parametrize("form", LOSSY)
def test_what_a_lossy_form_leaves_alone(form: str) -> None:
    exact = [
        torch.arange(4000),
        torch.ones(4000) > 0,
        torch.randn(2000, dtype=torch.complex64),
        torch.nn.Parameter(torch.randn(4000)),
        torch.randn(1).expand(4000),
        torch.randn(200),
        torch.quantize_per_channel(
            torch.randn(600, 4), torch.rand(600).double() + 0.1, torch.zeros(600), 0, torch.qint8
        ),
        Holder(torch.randn(4000)),
    ]
    for value in exact:
        assert compress(encode([value], names=["value"]), form) is None


def test_a_parameter_beside_others() -> None:
    weight, x = torch.nn.Parameter(torch.randn(900)), torch.randn(900)
    got = carried(weight, x, form="fp16", plain=True)  # among trusted peers parameters are pickled
    assert torch.equal(got[0], weight)
    assert torch.equal(got[1], x.half().float())


@FORMS
def test_both_twins_read_it(form: str) -> None:
    x = torch.randn(2000, requires_grad=True)
    encoded = encode_values((x,), ("result",), False, False, None, False)
    found = compress(encoded, form)
    assert found is not None
    assert (found.recorded, found.tensors) == ((0,), [x])
    frame = reply_frame(5, found, {"note": b"x"})
    arrived = Frame(frame.kind, 5, bytes(frame.body), [bytearray(buffer) for buffer in frame.buffers])
    reply = read_reply(arrived)
    (got,) = tensors = reply.tensors(None)
    assert reply.requires_grad
    assert reply.value(tensors, None) is got
    assert float((got - x).detach().abs().max()) < 0.05
    assert frame.nbytes < reply_frame(5, encoded, {"note": b"x"}).nbytes


@pytest.mark.skipif(core is None, reason="there is no native core")
def test_the_core_leaves_compressed_tensors_to_python() -> None:
    payload, buffers = sent(torch.randn(2000), form="fp16")
    assert core.read_gradients(pack(payload), buffers) is None


# Hostile input.


def with_table(payload: Payload, table: TensorTable) -> Payload:
    return msgspec.structs.replace(payload, tensors=table)


@FORMS
def test_a_size_that_does_not_fit_is_refused(form: str) -> None:
    payload, buffers = sent(torch.randn(2000), form=form)
    (record,) = payload.tensors.ordinary
    for shape in ((1999,), (2001,), (1 << 50,), (1 << 40, 4)):
        other = encode_record(msgspec.structs.replace(read_record(record), shape=shape))
        with pytest.raises(ProtocolError):
            decode(with_table(payload, TensorTable(ordinary=(other,))), buffers)
    with pytest.raises(ProtocolError):
        decode(payload, [buffers[0][:-1]])
    with pytest.raises(ProtocolError):
        decode(payload, [buffers[0] + b"x"])


@FORMS
def test_a_form_that_does_not_fit_is_refused(form: str) -> None:
    payload, buffers = sent(torch.randn(64, 64).t(), form=form)
    (part,) = payload.tensors.parts
    changed = [
        {"form": "gzip"},
        {"buffer": 1},
        {"buffer": -1},
        {"shape": (0, 64)},
        {"offset": -1},
        {"stride": (1 << 40, 1)},
    ]
    changed += [] if form == "zstd" else [{"dtype": "int64"}, {"dtype": "float32x"}, {"dtype": "bool"}]
    for change in changed:
        other = msgspec.structs.replace(part, **change)
        with pytest.raises(ProtocolError):
            decode(with_table(payload, TensorTable(payload.tensors.specs, (other,))), buffers)
    two = TensorTable(payload.tensors.specs * 2, (part, msgspec.structs.replace(part, form="")))
    with pytest.raises(ProtocolError):
        decode(with_table(payload, two), buffers)


@pytest.mark.skipif("zstd" not in readable_forms(), reason="zstd is not installed")
def test_a_bomb_is_refused() -> None:
    payload, buffers = sent(torch.zeros(1 << 22), form="zstd")
    assert len(buffers[0]) < 1 << 14
    with pytest.raises(ProtocolError, match=r"limits\.frame_bytes"):
        check_payload(payload, buffers, 1 << 23)
    check_payload(payload, buffers, 1 << 24)
    (record,) = payload.tensors.ordinary
    small = encode_record(msgspec.structs.replace(read_record(record), shape=(1024,)))
    with pytest.raises(ProtocolError):
        decode(with_table(payload, TensorTable(ordinary=(small,))), buffers)
    payload, buffers = sent(torch.zeros(1 << 10, 1 << 10)[:, ::2].t(), form="zstd")
    part = msgspec.structs.replace(payload.tensors.parts[0], shape=(2, 2), stride=(1 << 19, 1), spread=None)
    with pytest.raises(ProtocolError):  # a small shape with wide strides is counted as what it takes
        check_payload(with_table(payload, TensorTable(payload.tensors.specs, (part,))), buffers, 1 << 20)


@pytest.mark.parametrize("form", ["fp16", "int8", zstd])
def test_strict_receivers_take_it(form: str) -> None:
    payload, buffers = sent([torch.randn(700), {"y": 1}], torch.ones(900) > 0, form=form, plain=True)
    check_payload(payload, buffers, 1 << 20)
    assert len(decode(payload, buffers)) == 2


def test_a_worker_without_zstd_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    if "zstd" in readable_forms():
        payload, buffers = sent(torch.zeros(2000), form="zstd")
        monkeypatch.setattr(buffer_forms, "_zstd", None)
        with pytest.raises(ProtocolError, match=r"backhaul\[compression\]"):
            decode(payload, buffers)
    assert readable_forms() == tuple(LOSSY)


def test_small_tensors_and_nothing_to_save() -> None:
    encoded: Encoded = encode([torch.randn(100)], names=["value"])
    assert compress(encoded, "fp16") is None
    assert compress(encode([1, "two"], names=["", ""]), "int8") is None
    if "zstd" in readable_forms():
        noise = torch.randint(0, 256, (5000,), dtype=torch.uint8)
        assert compress(encode([noise], names=["value"]), "zstd") is None
