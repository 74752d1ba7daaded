"""Messages survive packing, and other bytes raise ``ProtocolError``."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from backhaul._wire.codec import encode
from backhaul._wire.messages import CallTally, Cancel, Count, Fault, Hello, Refuse, Reply, Request, pack, unpack
from backhaul.errors import ProtocolError

KINDS = [Hello, Refuse, Request, Reply, Fault, Cancel, CallTally, Count]
payload = encode([torch.ones(2), "x", 3], names="abc").payload

MESSAGES = [
    Hello("other", "second", b"record"),
    Refuse("why not"),
    Request("module:function", payload, True),
    Reply(payload),
    Fault("worker", "builtins.ValueError", "message", "traceback", payload),
    Fault("worker", "builtins.ValueError", "message", "traceback"),
    Request("module:function", payload, left=1.5),
    Cancel((1, 2)),
    CallTally(1, 2, 3),
    Count((1 << 63) - 1),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_a_message_survives(message: msgspec.Struct, kind: type) -> None:
    assert unpack(kind(pack(message)), type(message)) == message


@pytest.mark.parametrize(
    ("bad", "kind"),
    [
        (b"", Hello),
        (b"\xc1", Count),
        (msgspec.msgpack.encode([]), Count),
        (msgspec.msgpack.encode(["one"]), Count),
        (msgspec.msgpack.encode([1.5]), Count),
        (msgspec.msgpack.encode({"wave": 1}), Count),
        (msgspec.msgpack.encode([1, 2]), CallTally),
        (msgspec.msgpack.encode([1]) + b"\x00", Count),
        (msgspec.msgpack.encode([b"why"]), Refuse),
        (b"\x91\xa1\xff", Refuse),
        (msgspec.msgpack.encode(["f", None]), Request),
        (pack(Refuse("x")), CallTally),
        (b"\x91\x95\x92\x91\x95\x90\xc2\xa0\x90" + b"\x91" * 100_000, Reply),
    ],
)
def test_what_is_no_message_is_refused(bad: bytes, kind: type[msgspec.Struct]) -> None:
    with pytest.raises(ProtocolError):
        unpack(bad, kind)


@given(st.binary(max_size=60), st.sampled_from(KINDS))
@example(b"\x91\x92\xc0\x91" + b"\x91" * 5000, Reply)
def test_bytes_are_a_message_or_refused(noise: bytes, kind: type[msgspec.Struct]) -> None:
    try:
        assert isinstance(unpack(noise, kind), kind)
    except ProtocolError:
        pass
