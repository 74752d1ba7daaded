"""Tensors of a device travel in slots or staged, in all layouts, and no slot is lost. The device is CPU memory here."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from backhaul._wire.codec import Encoded, decode, encode
from backhaul._wire.device_link import HostLink, TrialEncoding, decline
from backhaul._wire.messages import Payload
from backhaul._wire.strict import check_payload
from backhaul._wire.tensors.reader import read_tensors
from backhaul._wire.tensors.specs import Part, TensorSpec, TensorTable
from backhaul.errors import ProtocolError, SerializationError
from tests.unit.wire.links import FakeLink

pytestmark = pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested")

KINDS = ["slotted", "staged"]


def link_of(kind: str) -> FakeLink:
    return FakeLink(slots=8 if kind == "slotted" else 0)


def depart(link: FakeLink, *values: Any, plain: bool = False) -> Encoded:
    return encode(values, names=[f"values[{i}]" for i in range(len(values))], link=link, plain=plain)


def arrive(link: FakeLink, encoded: Encoded) -> list[Any]:
    packed = msgspec.msgpack.encode(encoded.payload)
    buffers = [bytearray(buffer) for buffer in encoded.buffers]
    if encoded.lease is not None:
        encoded.lease.sent = True
    return decode(msgspec.msgpack.decode(packed, type=Payload), buffers, link)


def carry(link: FakeLink, *values: Any) -> list[Any]:
    return arrive(link, depart(link, *values))


def parts_of(encoded: Encoded) -> tuple[Part, ...]:
    return encoded.payload.tensors.parts


@pytest.mark.parametrize("kind", KINDS)
class TestLayouts:
    @pytest.mark.parametrize(
        "make",
        [
            lambda: torch.randn(16),
            lambda: torch.randn(4, 6),
            lambda: torch.tensor(3.5),
            lambda: torch.randn(4, 6).t(),
            lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
            lambda: torch.arange(10.0)[2:9:3],
            lambda: torch.randn(100, 100)[:, 7],
            lambda: torch.randn(8, 8)[:, ::2],
            lambda: torch.tensor(3.0).expand(10, 10),
            lambda: torch.arange(5.0).expand(3, 5),
            lambda: torch.arange(10.0).unfold(0, 4, 1),
            lambda: torch.randn(100)[90:],
            lambda: torch.randn(3, dtype=torch.complex64),
            lambda: torch.randn(3, dtype=torch.complex64).conj(),
            lambda: torch.randn(3, dtype=torch.complex64).imag,
            lambda: torch.tensor([True, False, True]),
            lambda: torch.randn(5).half(),
            lambda: torch.randn(5).bfloat16(),
            lambda: torch.arange(5, dtype=torch.int16),
        ],
    )
    def test_strided(self, kind: str, make: Callable[[], torch.Tensor]) -> None:
        tensor, link = make(), link_of(kind)
        (made,) = carry(link, tensor)
        assert torch.equal(made, tensor)
        assert made.dtype is tensor.dtype
        assert link.staged == (0 if kind == "slotted" else 1)
        del made
        assert link.free == len(link.states)

    def test_strides_are_kept(self, kind: str) -> None:
        for tensor in (torch.randn(4, 6).t(), torch.randn(8, 8)[:, ::2], torch.arange(5.0).expand(3, 5)):
            (made,) = carry(link_of(kind), tensor)
            assert made.stride() == tensor.stride()

    def test_empty(self, kind: str) -> None:
        link = link_of(kind)
        encoded = depart(link, torch.empty(0, 3).t())
        assert [part.device for part in parts_of(encoded)] == ["cuda:1"]
        (made,) = arrive(link, encoded)
        assert (made.shape, made.stride()) == ((3, 0), (1, 3))
        assert link.free == len(link.states)

    @pytest.mark.parametrize(
        "make",
        [
            lambda: torch.eye(4).to_sparse(),
            lambda: torch.sparse_coo_tensor(torch.tensor([[1, 1, 0]]), torch.tensor([1.0, 2.0, 3.0]), (5,)),
            lambda: torch.sparse_coo_tensor((2, 3)),
            lambda: torch.eye(4).to_sparse_csr(),
            lambda: torch.eye(4).to_sparse_csc(),
            lambda: torch.eye(4).to_sparse_bsr((2, 2)),
        ],
    )
    def test_sparse(self, kind: str, make: Callable[[], torch.Tensor]) -> None:
        tensor, link = make(), link_of(kind)
        (made,) = carry(link, tensor)
        assert made.layout is tensor.layout
        assert torch.equal(made.to_dense(), tensor.to_dense())
        if tensor.layout is torch.sparse_coo:
            assert made.is_coalesced() is tensor.is_coalesced()
        del made
        assert link.free == len(link.states)

    def test_nested(self, kind: str) -> None:
        tensor = torch.nested.as_nested_tensor([torch.randn(2, 3), torch.randn(1, 3)])
        (made,) = carry(link_of(kind), tensor)
        assert all(map(torch.equal, made.unbind(), tensor.unbind()))

    def test_views_share_memory_again(self, kind: str) -> None:
        matrix, link = torch.randn(4, 6), link_of(kind)
        encoded = depart(link, matrix, matrix[1:3], matrix.t(), matrix.view(torch.int32)[2])
        assert len({part.slot for part in parts_of(encoded)}) == 1
        assert len(encoded.buffers) == (kind == "staged")
        whole, rows, turned, bits = arrive(link, encoded)
        assert link.unstaged == (kind == "staged")
        whole.zero_()
        assert not rows.any()
        assert not turned.any()
        assert not bits.any()
        assert bits.dtype is torch.int32
        del whole, rows, turned
        if kind == "slotted":
            assert link.free == 7  # the last view keeps it
        del bits
        assert link.free == len(link.states)

    def test_the_same_tensor_twice(self, kind: str) -> None:
        tensor = torch.randn(3)
        one, other = carry(link_of(kind), tensor, tensor)
        assert one is other

    def test_requires_grad(self, kind: str) -> None:
        plain, leaf = carry(link_of(kind), torch.ones(2), torch.ones(2, requires_grad=True))
        assert not plain.requires_grad
        assert leaf.requires_grad
        assert leaf.is_leaf

    def test_within_other_values(self, kind: str) -> None:
        link = link_of(kind)
        (made,) = carry(link, {"a": [torch.ones(3), "text"], "p": torch.nn.Parameter(torch.zeros(2))})
        assert torch.equal(made["a"][0], torch.ones(3))
        assert isinstance(made["p"], torch.nn.Parameter)
        del made
        assert link.free == len(link.states)

    def test_with_nothing_pickled(self, kind: str) -> None:
        link = link_of(kind)
        encoded = depart(link, [torch.ones(3), (1, 2)], plain=True)
        assert not encoded.payload.pickle
        ((made, numbers),) = arrive(link, encoded)
        assert torch.equal(made, torch.ones(3))
        assert numbers == (1, 2)

    def test_meta_tensors_are_left_alone(self, kind: str) -> None:
        made, real = carry(link_of(kind), torch.empty(3, device="meta"), torch.ones(2))
        assert made.is_meta
        assert torch.equal(real, torch.ones(2))

    def test_quantized_cannot(self, kind: str) -> None:
        tensor = torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8)
        with pytest.raises(SerializationError, match=r"values\[0\].*quantized") as caught:
            depart(link_of(kind), tensor)
        assert caught.value.path == "values[0]"


class TestSlots:
    def test_what_was_sent_may_be_changed(self) -> None:
        link, tensor = FakeLink(slots=1), torch.ones(4)
        encoded = depart(link, tensor)
        tensor.zero_()
        assert torch.equal(arrive(link, encoded)[0], torch.ones(4))

    def test_what_finds_none_is_staged_together(self) -> None:
        link = FakeLink(slots=1)
        encoded = depart(link, torch.ones(2), torch.zeros(2), torch.full((2,), 2.0))
        assert [part.slot for part in parts_of(encoded)] == [(7, 0), None, None]
        assert [part.buffer for part in parts_of(encoded)] == [-1, 0, 1]
        assert [made[0].item() for made in arrive(link, encoded)] == [1, 0, 2]

    def test_the_peers_cpu_needs_none(self) -> None:
        link = FakeLink(slots=1)
        link.told = ""
        encoded = depart(link, torch.ones(2), torch.empty(0))
        assert [(part.device, part.slot) for part in parts_of(encoded)] == [("", None), ("", None)]
        assert link.free == 1
        assert torch.equal(decode(encoded.payload, [bytearray(b) for b in encoded.buffers])[0], torch.ones(2))

    def test_a_message_that_is_not_sent_gives_them_back(self) -> None:
        link = FakeLink(slots=2)
        encoded = depart(link, torch.ones(2), torch.zeros(2))
        assert link.free == 0
        del encoded
        assert link.free == 2

    def test_a_message_that_is_sent_does_not(self) -> None:
        link = FakeLink(slots=2)
        encoded = depart(link, torch.ones(2))
        assert encoded.lease is not None
        encoded.lease.sent = True
        del encoded
        assert link.free == 1

    def test_a_message_that_fails_gives_them_back_at_once(self) -> None:
        link = FakeLink(slots=1)
        link.breaks = RuntimeError("no pinned memory")
        with pytest.raises(SerializationError, match="no pinned memory") as caught:
            depart(link, torch.ones(2), torch.zeros(2))
        assert link.free == 1, "while the error is still there"
        del caught

    def test_a_value_that_cannot_travel_takes_none(self) -> None:
        link = FakeLink(slots=4)
        with pytest.raises(SerializationError, match=r"values\[1\]\['x'\]") as caught:
            depart(link, torch.ones(2), {"x": (i for i in ())})
        assert link.free == 4
        del caught
        gc.collect()

    def test_too_many_buffers_give_them_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("backhaul._wire.codec.MAX_BUFFERS", 1)
        link = FakeLink(slots=1)
        for plain in (True, False):
            with pytest.raises(SerializationError, match="too much") as caught:
                depart(link, [torch.ones(2), torch.ones(3), torch.ones(4)], plain=plain)
            assert link.free == 1
            del caught

    def test_a_message_that_nobody_reads_is_declined(self) -> None:
        link = FakeLink(slots=2)
        encoded = depart(link, torch.ones(2), torch.zeros(3))
        assert encoded.lease is not None
        encoded.lease.sent = True
        decline(encoded.payload, link)
        assert link.free == 2
        decline(depart(FakeLink(), torch.ones(2)).payload, link)
        decline(encode([torch.ones(2)], names=["x"]).payload, None)

    def test_an_error_names_the_tensor(self) -> None:
        link = FakeLink(slots=1)
        link.told = "none"
        with pytest.raises(SerializationError, match=r"values\[0\]\[1\].*devices\.maps") as caught:
            depart(link, [1, torch.ones(2)])
        assert caught.value.path == "values[0][1]"

    def test_a_trial_takes_nothing(self) -> None:
        link = FakeLink(slots=1)
        trial = TrialEncoding(link)
        encoded = encode([torch.ones(2), torch.ones(3)], names=["a", "b"], link=trial)
        assert link.free == 1
        assert len(encoded.payload.tensors.parts) == 2


def table(*parts: Part) -> TensorTable:
    return TensorTable(tuple(TensorSpec((index,)) for index in range(len(parts))), parts)


class TestWhatAPeerSays:
    @pytest.mark.parametrize(
        "parts",
        [
            [Part(-1, "float32", (2,), device="cuda:1", slot=(7, 0), offset=1)],
            [Part(-1, "float32", (2,), device="cuda:0", slot=(7, 0))],
            [Part(-1, "float32", (2,), device="cuda:-1", slot=(7, 0))],
            [Part(-1, "float32", (2,), device="cuda", slot=(7, 0))],
            [Part(-1, "float32", (2,), device="cpu", slot=(7, 0))],
            [Part(-1, "float32", (2,), device="cuda:1x", slot=(7, 0))],
            [Part(-1, "float32", (2,), device="", slot=(7, 0))],
            [Part(-1, "float32", (2,), device="meta", slot=(7, 0))],
            [Part(0, "float32", (2,), device="cuda:1", slot=(7, 0))],
            [Part(-1, "float32", (2,), device="cuda:1", slot=(7, -1))],
            [Part(-1, "float32", (2,), device="cuda:1", slot=(7, 5))],
            [Part(-1, "float32", (2,), device="cuda:1", slot=(8, 0))],
            [Part(-1, "float32", (1 << 20,), device="cuda:1", slot=(7, 0))],
            [Part(-1, "float32", (2,), (1 << 61,), 0, "cuda:1", slot=(7, 0))],
            [Part(-1, "float32", (2,), (-1,), 0, "cuda:1", slot=(7, 0))],
            [Part(-1, "float32", (0,), (1,), 0, "cuda:1", slot=(7, 0))],
            [Part(-1, "float32", (2,), (1,), 0, "cuda:1")],
            [Part(-1, "float32", (2,), None, 0, "cuda:1", (1 << 40,), (7, 0))],
            [Part(-1, "float32", (0,), (1,), 0, "cuda:9")],
            [Part(5, "float32", (2,), None, 0, "cuda:1")],
            [Part(0, "float32", (3,), None, 0, "cuda:1")],
            [Part(0, "float32", (2,), None, 0, "cuda:1"), Part(0, "float32", (2,), None, 0, "cuda:0")],
            [Part(-1, "quint8", (2,), device="cuda:1", slot=(7, 0))],
            [Part(-1, "float32", (2,), device="cuda:1", slot=(7, 1))],
        ],
    )
    def test_is_checked(self, parts: list[Part]) -> None:
        link = FakeLink(slots=2)
        link.states[0] = "lent"
        with pytest.raises(ProtocolError):
            read_tensors(table(*parts), [bytearray(8)], link)

    def test_a_slot_is_borrowed_once(self) -> None:
        link = FakeLink(slots=1)
        encoded = depart(link, torch.ones(2))
        (held,) = arrive(link, encoded)
        with pytest.raises(ProtocolError):
            arrive(link, encoded)
        assert torch.equal(held, torch.ones(2))

    def test_without_a_link_there_are_no_devices(self) -> None:
        for part in (
            Part(-1, "float32", (2,), device="cuda:1", slot=(7, 0)),
            Part(0, "float32", (2,), device="cuda:1"),
            Part(-1, "float32", (0,), (1,), 0, "cuda:1"),
        ):
            with pytest.raises(ProtocolError, match="no link"):
                read_tensors(table(part), [bytearray(8)])

    def test_what_is_not_trusted_is_looked_at_on_the_host(self) -> None:
        encoded = depart(FakeLink(), torch.tensor([True, False]), plain=True)
        check_payload(encoded.payload, encoded.buffers, 1 << 20)
        with pytest.raises(ProtocolError, match="bools"):
            check_payload(encoded.payload, [bytearray(b"\1\2")], 1 << 20)
        bad = depart(FakeLink(), torch.eye(2).to_sparse(), plain=True)
        with pytest.raises(ProtocolError):
            check_payload(bad.payload, [bytearray(b"\7" * 32), *bad.buffers[1:]], 1 << 20)

    def test_what_is_not_trusted_has_no_slots(self) -> None:
        encoded = depart(FakeLink(slots=1), torch.ones(2), plain=True)
        with pytest.raises(ProtocolError, match="slot"):
            check_payload(encoded.payload, encoded.buffers, 1 << 20)
        assert HostLink().lend(torch.ones(1)) is None


def test_cpu_tensors_do_not_see_a_link_that_does_not_take_them() -> None:
    class Elsewhere(FakeLink):
        takes_host = False

        def takes(self, device: torch.device) -> bool:
            return device.type == "cuda"

    link = Elsewhere(slots=1)
    assert depart(link, torch.ones(2)).payload == encode([torch.ones(2)], names=["x"]).payload
    assert depart(link, torch.ones(4, 4)[:, 1]).payload == encode([torch.ones(4, 4)[:, 1]], names=["x"]).payload
    assert link.free == 1


class TestALoneTensor:
    """It travels in its slot without a table of parts."""

    def table(self, link: FakeLink) -> TensorTable:
        encoded = depart(link, torch.arange(4.0))
        assert encoded.lease is not None
        encoded.lease.sent = True
        return encoded.payload.tensors

    def test_says_no_more_than_needed(self) -> None:
        table = self.table(FakeLink(slots=2))
        assert not table.parts
        assert table.lent == ((7, 0, "cuda:1"),)

    @pytest.mark.parametrize(
        "lent",
        [
            ((7, 0, "cpu"),),
            ((7, 0, "cuda:x"),),
            ((7, 0, "cuda:2"),),
            ((7, 1, "cuda:1"),),
            ((8, 0, "cuda:1"),),
            ((7, -1, "cuda:1"),),
            ((7, 0, "cuda:1"), (7, 0, "cuda:1")),
        ],
    )
    def test_that_is_not_where_it_is_said_to_be(self, lent: tuple[tuple[int, int, str], ...]) -> None:
        link = FakeLink(slots=2)
        wrong = msgspec.structs.replace(self.table(link), lent=lent)
        with pytest.raises(ProtocolError):
            read_tensors(wrong, [], link)

    def test_twice_in_one_message(self) -> None:
        link = FakeLink(slots=2)
        table = self.table(link)
        with pytest.raises(ProtocolError):
            read_tensors(TensorTable(ordinary=table.ordinary * 2, lent=table.lent * 2), [], link)

    def test_without_a_link(self) -> None:
        with pytest.raises(ProtocolError, match="no link"):
            read_tensors(self.table(FakeLink(slots=1)), [], None)

    def test_that_nobody_reads_goes_back(self) -> None:
        link = FakeLink(slots=1)
        encoded = depart(link, torch.arange(4.0))
        assert encoded.lease is not None
        encoded.lease.sent = True
        decline(encoded.payload, link)
        assert link.free == 1
