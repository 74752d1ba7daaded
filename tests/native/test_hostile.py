"""Bytes that are not what they should be: both twins make the same values of them, or raise the same errors."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
import torch

from backhaul._wire.frames import Frame
from backhaul._wire.messages import NESTED, Kind, Payload, Reply, Request, pack
from backhaul._wire.tensors.specs import TensorTable
from tools.fuzz.mutator import Mutator
from tools.fuzz.twins import CORE, PYTHON, Twin, wire_of

from .twins import needs_core

pytestmark = [needs_core, pytest.mark.filterwarnings("ignore::UserWarning")]  # torch warns about unusual tensors


def outcome(twin: Twin, wire: bytes) -> Any:
    """What becomes of bytes: where the frames end, and what is in them."""
    found: list[Frame] = []
    end = twin.cut_frames(found, bytearray(wire) + bytes(8), 0, len(wire), 1 << 20, 1 << 10)
    return end, list(map(twin.outcome, found))


tensor = torch.ones(2, 3, requires_grad=True)
SAMPLES: list[list[Any]] = [
    [],
    [1, -1, 1.5, True, None, "text", b"bytes", -(1 << 40), 1 << 63],
    [tensor, 5, tensor, torch.zeros(1).expand(3, 3)],
    [torch.arange(400), torch.ones(300, dtype=torch.uint8)],
    [({"key": [tensor, (1, 2)]}, {3, 4}), [None, [[[]]]], torch.float32],
    [torch.Size([1, 2]), torch.device("cpu"), 1j, frozenset((1,)), max],
]


def test_changed_bytes() -> None:
    wires = [wire_of(PYTHON.request(values, notes={"note": b"bytes"})) for values in SAMPLES]
    wires += [wire_of(PYTHON.reply(values)) for values in SAMPLES]
    make = Mutator(wires, random.Random(1)).make
    reached = 0
    for _ in range(6000):
        data = make()
        expected = outcome(PYTHON, data)
        assert outcome(CORE, data) == expected
        reached += bool(expected[1])
    assert reached > 1000


def test_changed_messages_in_a_whole_frame() -> None:
    """The frame is made after the change, so that every input reaches the reader."""
    frames = [PYTHON.request(values, notes={"note": b"bytes"}) for values in SAMPLES]
    make = {id(frame): Mutator([bytes(frame.body)], random.Random(index)).make for index, frame in enumerate(frames)}
    outcomes = set()
    for _ in range(1500):
        for frame in frames:
            changed = Frame(frame.kind, 7, bytearray(make[id(frame)]()), [bytearray(b) for b in frame.buffers])
            expected = PYTHON.outcome(changed)
            assert CORE.outcome(changed) == expected
            outcomes.add(expected if isinstance(expected, type) else "values")
    assert len(outcomes) > 2


def _request(payload: bytes | Payload, *, left: Any = 0.0, notes: Any = None, more: int = 0) -> bytes:
    raw = msgspec.Raw(payload if isinstance(payload, bytes) else pack(payload))
    return msgspec.msgpack.encode(["operator:add", raw, False, notes or {}, left, *[None] * more])


def _plain(values: list[Any], *, tensors: list[bytes] | None = None, loose: int = 0, places: Any = ()) -> bytes:
    return _request(Payload(TensorTable(ordinary=tuple(tensors or ())), values, places, loose=loose))


def record(dtype: Any = "float32", shape: Any = (2,), grad: Any = False, expanded: Any = False) -> bytes:
    return msgspec.msgpack.encode([dtype, shape, grad, expanded])


DEEP = [1]
for _ in range(60):
    DEEP = [2, DEEP]


def _tensor(described: bytes) -> bytes:
    return _plain([None], tensors=[described], places=((0, 0),))


BROKEN: dict[str, tuple[bytes, list[int]]] = {
    "trailing bytes": (_plain([1]) + b"\0", []),
    "a field more": (_request(Payload(plain=[1]), more=1), []),
    "an int as deadline": (_request(Payload(plain=[1]), left=5), []),
    "a negative int as deadline": (_request(Payload(plain=[1]), left=-5), []),
    "a text as deadline": (_request(Payload(plain=[1]), left="5"), []),
    "a note that is text": (_request(Payload(plain=[1]), notes={"a": "b"}), []),
    "a note under a number": (_request(Payload(plain=[1]), notes={1: b"b"}), []),
    "two notes of one owner": (_plain([1])[:-10] + b"\x82\xa1a\xc4\x01b\xa1a\xc4\x01c\xcb" + bytes(8), []),
    "four billion values": (_request(b"\x96\x94\x90\x90\x90\x90\xdd\xff\xff\xff\xff\x90\xc4\0\0\0"), []),
    "four billion tensors": (_request(b"\x96\x94\x90\x90\xdd\xff\xff\xff\xff\x90\x90\xc4\0\0\0"), []),
    "four billion notes": (_plain([1])[:-10] + b"\xdf\xff\xff\xff\xff" + bytes(20), []),
    "a text of four billion bytes": (_request(b"\x96\x94\x90\x90\x90\x90\x91\xdb\xff\xff\xff\xff\x90\xc4\0\0\0"), []),
    "a text that is not UTF-8": (_request(b"\x96\x94\x90\x90\x90\x90\x91\xa1\xff\x90\xc4\0\0\0"), []),
    "text": (_plain(["grüße"]), []),
    "a float of four bytes": (_request(b"\x96\x94\x90\x90\x90\x90\x91\xca\0\0\0\0\x90\xc4\0\0\0"), []),
    "an extension": (_request(b"\x96\x94\x90\x90\x90\x90\x91\xd4\1\0\x90\xc4\0\0\0"), []),
    "a byte that means nothing": (_request(b"\x96\x94\x90\x90\x90\x90\x91\xc1\x90\xc4\0\0\0"), []),
    "a map": (_plain([{"a": 1}]), []),
    "an array among plain values": (_plain([[1, 2]]), []),
    "an array without a tag": (_plain([[]], loose=NESTED), []),
    "a tag that is text": (_plain([["a"]], loose=NESTED), []),
    "a tag that is a bool": (_plain([[True]], loose=NESTED), []),
    "a negative tag": (_plain([[-1, 2]], loose=NESTED), []),
    "an unknown tag": (_plain([[99, 2]], loose=NESTED), []),
    "a large tag": (_plain([[(1 << 64) - 1, 2]], loose=NESTED), []),
    "a dict with a key only": (_plain([[3, 1, 2, 3]], loose=NESTED), []),
    "a dict with a key twice": (_plain([[3, 1, 2, 1, 3]], loose=NESTED), []),
    "a dict with a list as key": (_plain([[3, [1], 2]], loose=NESTED), []),
    "a tensor that is not there": (_plain([[0, 0]], loose=NESTED), []),
    "a tensor with two indices": (_plain([[0, 0, 0]], tensors=[record()], loose=NESTED), [8]),
    "a negative tensor": (_plain([[0, -1]], tensors=[record()], loose=NESTED), [8]),
    "places among nested values": (_plain([[2]], tensors=[record()], loose=NESTED, places=((0, 0),)), [8]),
    "deep values": (_plain([DEEP], loose=NESTED), []),
    "deeper values": (_plain([[2, [2, [2, [2, [2, DEEP]]]]]], loose=NESTED), []),
    "a place that is not there": (_plain([None], tensors=[record()], places=((1, 0),)), [8]),
    "a tensor of a place that is not there": (_plain([None], tensors=[record()], places=((0, 1),)), [8]),
    "a place twice": (_plain([None], tensors=[record(), record()], places=((0, 0), (0, 1))), [8, 8]),
    "a buffer too few": (_tensor(record()), []),
    "a buffer too many": (_tensor(record()), [8, 8]),
    "a buffer too long": (_tensor(record()), [9]),
    "a long buffer too short": (_tensor(record(shape=(2000,))), [7999]),
    "a dtype that is not ordinary": (_tensor(record("int8")), [2]),
    "a dtype that does not exist": (_tensor(record("float33")), [8]),
    "ints that require grad": (_tensor(record("int64", grad=True)), [16]),
    "a size of zero": (_tensor(record(shape=(2, 0))), [0]),
    "a negative size": (_tensor(record(shape=(-2, -1))), [8]),
    "a huge size": (_tensor(record(shape=(1 << 59,))), [8]),
    "sizes whose product overflows": (
        _plain([None], tensors=[record(shape=(1 << 33, 1 << 33))], places=((0, 0),)),
        [8],
    ),
    "a huge expanded tensor": (
        _plain([None], tensors=[record(shape=(1 << 58,), expanded=True)], places=((0, 0),)),
        [4],
    ),
    "an expanded tensor without dimensions": (
        _plain([None], tensors=[record(shape=(), expanded=True)], places=((0, 0),)),
        [4],
    ),
    "a tensor of 65 dimensions": (_tensor(record(shape=(1,) * 65)), [4]),
    "a record of another form": (_tensor(msgspec.msgpack.encode(["float32"])), [4]),
    "a record with more bytes": (_tensor(record() + b"\0"), [8]),
    "a record that is too long": (_tensor(record(shape=(1,) * 1100)), [4]),
    "a record that is no array": (_tensor(b"\xc0"), [4]),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_request(case: str) -> None:
    body, sizes = BROKEN[case]
    results = [
        twin.outcome(Frame(Kind.REQUEST, 7, bytearray(body), list(map(bytearray, sizes)))) for twin in (PYTHON, CORE)
    ]
    assert results[0] == results[1]


def test_every_beginning_of_a_message() -> None:
    frame = PYTHON.request([1, "text", {"key": torch.ones(300)}])
    for end in range(len(frame.body)):
        short = Frame(frame.kind, 7, bytearray(frame.body[:end]), [bytearray(b) for b in frame.buffers])
        assert CORE.outcome(short) == PYTHON.outcome(short)


@pytest.mark.parametrize("count", [0, 2])
def test_a_reply_of_another_number_of_values(count: int) -> None:
    frame = Frame(Kind.REPLY, 1, bytearray(pack(Reply(Payload(plain=[1] * count)))))
    assert CORE.outcome(frame) == PYTHON.outcome(frame)
    assert CORE.outcome(frame) is ValueError


def test_requests_of_other_forms() -> None:
    for payload in (
        Payload(pickle=b"no pickle"),
        Payload(plain=[1], wrapped=1),
        Payload(plain=[[1, 2]], loose=-1),
        Payload(plain=[1], loose=3),
        Payload(plain=[1], pickle=b"both"),
    ):
        frame = Frame(Kind.REQUEST, 7, bytearray(pack(Request("f", payload))))
        assert CORE.outcome(frame) == PYTHON.outcome(frame)


def test_memory_that_cannot_be_written_to() -> None:
    frame = Frame(Kind.REQUEST, 7, _tensor(record()), [bytes(8)])
    assert CORE.outcome(frame) == PYTHON.outcome(frame)


def test_a_wrong_use_raises() -> None:
    frame = PYTHON.request([torch.ones(2), 1])
    received = Frame(frame.kind, 7, bytearray(frame.body), [bytearray(b) for b in frame.buffers])
    request = CORE.read_request(received)
    for tensors in ([], (torch.ones(2),), None):
        with pytest.raises(TypeError):
            request.values(tensors, None)
    with pytest.raises(TypeError):
        request.values([])
    with pytest.raises(ValueError):
        request.value(request.tensors(None), None)
    with pytest.raises(AttributeError):
        CORE.read_request(None)
    with pytest.raises(TypeError):
        type(request)()
    for given in ((), (1,), ([], b"", 1, 0, 1, 1), ([], b"", 0, 9, 1, 1), (None, b"", 0, 0, 1, 1)):
        with pytest.raises((TypeError, ValueError)):
            CORE.cut_frames(*given)
