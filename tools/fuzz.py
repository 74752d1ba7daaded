"""Broken input for everything that reads bytes of others: frames, messages, tensors, handshakes, shared memory.

``python -m tools.fuzz --inputs 10000000`` makes that many inputs out of valid ones (and of a corpus, see
``--corpus``) by flipping bits, cutting, splicing, changing lengths and inserting many small values, and feeds each to
one of the targets. What comes out may be a value or a documented error, and nothing else; no target allocates more than
its input and its limit allow, or makes more values than it has counted.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import hashlib
import io
import itertools
import random
import resource
import secrets
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from backhaul._autograd.forward.functions import ContextId, MessageId
from backhaul._autograd.messages import (
    Abort,
    AutogradNote,
    Gradient,
    Gradients,
    Know,
    PassSpec,
    PassTally,
    Release,
    Report,
)
from backhaul._rpc.cluster.membership_table import Standing, WorkerRecord
from backhaul._rpc.security.rate_limits import over_limits
from backhaul._transport.shm import shared_memory
from backhaul._transport.shm.slots import Budget
from backhaul._transport.sockets import handshake
from backhaul._transport.sockets.handshake import ClientHandshake, ServerHandshake
from backhaul._types import Options
from backhaul._wire import messages, value_count
from backhaul._wire.codec import encode, load
from backhaul._wire.frames import Frame, FrameReader, control_frame
from backhaul._wire.memory import Buffer, Recycler
from backhaul._wire.messages import Fault, Hello, Kind, Payload, Refuse, Reply, Request, pack, unpack
from backhaul._wire.strict import check_payload
from backhaul._wire.tensors.reader import tensors_of
from backhaul.errors import AuthenticationError, LimitError, ProtocolError

LIMIT = 1 << 20
"""The largest frame of the readers here, and so the most that a target may allocate at once."""

_SECRET = b"nobody outside knows it"
_GROWTH = 256 << 20  # bytes by which the process may grow: what torch and the interpreter keep
_VALUES = 4096  # that a message may have
_SMALL_VALUES = (b"\x90", b"\x91\x01", b"\x80", b"\x81\x01\x90", b"\x01", b"\xa0", b"\xc0", b"\xc4\x00", b"\x91\x91")
_STRANGE = (0, 1, 2, 7, 8, 63, 64, 65, 127, 128, 255, 256, 4095, 4096, 65535, 65536, 1 << 20)
_STRANGE_WIDE = (*_STRANGE, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 59) - 1, (1 << 63) - 1, (1 << 64) - 1)


class FindingError(Exception):
    """A target did what it must not."""


# Inputs.


class Mutator:
    """Makes inputs out of others. Draws with ``random``: what it makes depends on the seed alone."""

    def __init__(self, seeds: Sequence[bytes], draw: random.Random) -> None:
        self._seeds = list(seeds)
        self._draw = draw
        self._ways: tuple[Callable[[bytearray], None], ...] = (
            self._flip,
            self._flip,
            self._byte,
            self._number,
            self._number,
            self._cut,
            self._double,
            self._splice,
            self._truncate,
            self._swell,
        )

    def make(self) -> bytes:
        """The next input."""
        random_ = self._draw.random
        seeds = self._seeds
        data = bytearray(seeds[int(random_() * len(seeds))])
        ways = self._ways
        for _ in range(1 + int(random_() * random_() * 5)):
            if data:
                ways[int(random_() * len(ways))](data)
        return bytes(data)

    def _at(self, data: bytearray) -> int:
        """Mostly near the beginning: that is where lengths are."""
        random_ = self._draw.random
        size = len(data)
        return int(random_() * (size if size < 64 or random_() < 0.4 else 64))

    def _flip(self, data: bytearray) -> None:
        data[self._at(data)] ^= 1 << int(self._draw.random() * 8)

    def _byte(self, data: bytearray) -> None:
        data[self._at(data)] = int(self._draw.random() * 256)

    def _number(self, data: bytearray) -> None:
        """Put a strange number where one may be, in either byte order."""
        random_ = self._draw.random
        at, width = self._at(data), (1, 2, 4, 8)[int(random_() * 4)]
        value = _STRANGE_WIDE[int(random_() * len(_STRANGE_WIDE))] & ((1 << 8 * width) - 1)
        if random_() < 0.3 and at + width <= len(data):  # near to what is there
            value = (int.from_bytes(data[at : at + width], "little") + int(random_() * 9) - 4) & ((1 << 8 * width) - 1)
        data[at : at + width] = value.to_bytes(width, "big" if random_() < 0.3 else "little")

    def _cut(self, data: bytearray) -> None:
        at = self._at(data)
        del data[at : at + 1 + int(self._draw.random() * 16)]

    def _double(self, data: bytearray) -> None:
        at = self._at(data)
        data[at:at] = data[at : at + 1 + int(self._draw.random() * 32)]

    def _splice(self, data: bytearray) -> None:
        """Go on as another input does."""
        other = self._seeds[int(self._draw.random() * len(self._seeds))]
        at = self._at(data)
        data[at:] = other[min(at, len(other)) :] if self._draw.random() < 0.5 else other[self._at(bytearray(1)) :]

    def _swell(self, data: bytearray) -> None:
        """Put many small values in the place of one: an array or a map of them, or without a header."""
        random_ = self._draw.random
        item = _SMALL_VALUES[int(random_() * len(_SMALL_VALUES))]
        count = (3, 40, 700, 9000)[int(random_() * random_() * 4)]
        head = (b"", b"\xdc" + count.to_bytes(2, "big"), b"\xdd\0\0" + count.to_bytes(2, "big"), b"\xde\x10\0")
        at = self._at(data)
        data[at : at + 1] = head[int(random_() * 4)] + item * count

    def _truncate(self, data: bytearray) -> None:
        del data[self._at(data) :]


# Targets: each has valid inputs, and takes one.


class _Counting(Recycler):
    """Refuses to allocate what no valid frame needs."""

    most = LIMIT

    def allocate(self, size: int) -> Buffer:
        if size > self.most:
            raise FindingError(f"{size} bytes were allocated, the limit is {self.most}")
        return super().allocate(size)


class Target:
    """Something that reads bytes of others.

    Attributes:
        name: Of its folder in the corpus, too.
        expected: Errors that may come out.
    """

    name = ""
    expected: tuple[type[BaseException], ...] = (ProtocolError,)

    def seeds(self) -> list[bytes]:
        """Valid inputs."""
        raise NotImplementedError

    def take(self, data: bytes) -> object:
        """Read an input."""
        raise NotImplementedError


def _samples() -> list[list[Any]]:
    """Values of all kinds that travel without pickle."""
    base = torch.arange(12.0)
    return [
        [],
        [1, -1, 1.5, True, None, "text", b"bytes"],
        [torch.ones(3)],
        [torch.ones(2, 3, requires_grad=True), 5],
        [torch.zeros(1).expand(4, 4)],
        [base, base[2:5], base[::3]],
        [torch.ones(4, 4).t()[1:, 1:]],
        [torch.empty(0, 3), torch.tensor(2, dtype=torch.int8), torch.ones(2, dtype=torch.complex64)],
        [torch.eye(3).to_sparse(), torch.eye(4).to_sparse_csr(), torch.eye(4).to_sparse_csc()],
        [torch.eye(4).to_sparse_bsr((2, 2)), torch.ones(2, device="meta")],
        [torch.quantize_per_tensor(torch.ones(4), 0.5, 1, torch.qint8)],
        [torch.quantize_per_channel(torch.ones(2, 3), torch.ones(2), torch.zeros(2), 0, torch.qint8)],
        [torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)])],
        [torch.ones(3, dtype=torch.uint16), torch.ones(2, dtype=torch.float8_e4m3fn)],
    ]


def _frames() -> list[Frame]:
    found = [
        Frame(Kind.HELLO, 0, pack(Hello("attacked", "2", b"nobody"))),
        Frame(Kind.REPLY, 12, b"nothing", [bytes(300), b"", bytes(70)]),
        Frame(Kind.REPLY, 12, b"", [bytes(40_000)]),
        Frame(Kind.READY),
    ]
    for values in _samples():
        encoded = encode(values, names=["value"] * len(values))
        body = pack(Request("operator:add", encoded.payload))
        found.append(Frame(Kind.REQUEST, 7, body, [bytes(buffer) for buffer in encoded.buffers]))
    return found


class FrameTarget(Target):
    """``FrameReader``; the bytes come in pieces, which the input's hash decides on."""

    name = "frames"

    def seeds(self) -> list[bytes]:
        wires = [b"".join(bytes(part) for part in frame.parts()) for frame in _frames()]
        return [*wires, b"".join(wires[:4]), b"".join(wires[3:8])]

    def take(self, data: bytes) -> object:
        return self._read(FrameReader(LIMIT, _Counting()), data)

    def _read(self, reader: FrameReader, data: bytes) -> int:
        piece = (len(data), 1 << 16, 33, 7)[(data[-1] if data else 0) & 3] or 1
        count, held = 0, 0
        for start in range(0, len(data), piece):
            rest = data[start : start + piece]
            while rest:
                space = reader.writable()
                if not space:
                    raise FindingError("the reader has no room for more")
                fits = min(len(space), len(rest))
                space[:fits] = rest[:fits]
                for frame in reader.fed(fits):
                    count += 1
                    held += len(frame.body) + sum(map(len, frame.buffers))
                rest = rest[fits:]
        if held > len(data):
            raise FindingError(f"frames of {held} bytes were made of {len(data)}")
        return count


class _FakeSlots:
    """The slots of a channel without a peer: places up to 8 exist."""

    def __init__(self) -> None:
        self._borrower = shared_memory.HostBorrower(0)
        self._lender = shared_memory.HostLender(Budget(0))

    def resolve(self, place: int, size: int) -> Buffer:
        if not 0 < place <= 8 or size > 4096:
            return self._borrower.borrow(place, size)
        return bytearray(size)

    def control(self, kind: int, number: int, body: bytes) -> None:
        if kind == shared_memory.OFFER:
            self._borrower.offered(number, body)
        elif kind == shared_memory.RETIRE:
            self._borrower.retired(number)
        elif kind == shared_memory.ANSWER:
            self._lender.answered(number, body)
        else:
            raise ProtocolError(f"unexpected control frame of kind {kind}")


class _CountingSlots(_Counting):
    """Limits are those of the same frame without slots; the table may be twice as long as its."""

    most = 2 * LIMIT


class SlotTarget(FrameTarget):
    """Frames with slots, and control frames."""

    name = "slots"

    def seeds(self) -> list[bytes]:
        offer = struct.pack("<iIQ16s", 5, 2, 4096, b"cookie")
        controls = [
            control_frame(shared_memory.OFFER, 1, offer),
            control_frame(shared_memory.ANSWER, 1, b"\1"),
            control_frame(shared_memory.RETIRE, 1),
        ]
        slotted = Frame(Kind.REPLY, 3, b"body", [bytes(100), bytes(10), bytes(200)]).parts([1, 0, 2])
        wire = b"".join(bytes(part) for part in slotted)
        return [*controls, b"".join(controls), wire, controls[0] + wire]

    def take(self, data: bytes) -> object:
        reader = FrameReader(LIMIT, _CountingSlots(), _FakeSlots())
        try:
            return self._read_slotted(reader, data)
        finally:
            reader.close()

    def _read_slotted(self, reader: FrameReader, data: bytes) -> int:
        space, count = reader.writable(), 0
        fits = min(len(space), len(data))
        space[:fits] = data[:fits]
        for frame in reader.fed(fits):
            count += 1 + len(frame.buffers)
        return count


_STRICT = Options(trusted=False, max_values=_VALUES)
_SPEC = PassSpec(ContextId(1 << 48), 1, 2, profiles=(3,))
_NOTE = AutogradNote(ContextId(1 << 48), MessageId(7), (0, 2), (1, 2, 3))
_PAYLOAD = Payload(plain=[1, "two", 3.0])
_LEFT = messages.Departure("incarnation", 1, "name", "proof")
_MESSAGES: tuple[msgspec.Struct, ...] = (
    Hello("c", "d", b"record", (_LEFT,), True),
    Refuse("no"),
    Request("operator:add", _PAYLOAD, True, {"autograd": b"note"}),
    Reply(_PAYLOAD, {"rref": b"note"}),
    Fault("worker", "ValueError", "text", "trace", _PAYLOAD),
    messages.CallTally(1, 2, 3),
    messages.Count(1),
    _NOTE,
    Gradients(_SPEC, [Gradient(MessageId(7), _PAYLOAD, 1, _NOTE)], PassTally((1, 2), {3: 4})),
    Report(_SPEC, PassTally((1,), {2: 3}), 4, Fault("w", "t", "m", "tb"), 5, "gone"),
    Abort(_SPEC),
    Release(1 << 48),
    Know(1 << 48),
    WorkerRecord(1, "name", "incarnation", "host", ("tcp:127.0.0.1:1",), "main", 1 << 20),
    messages.Join(b"record"),
    messages.Welcome(b"record", (b"one", b"two"), (_LEFT,)),
    messages.Cancel((1, 2, 3)),
    Standing(("one", "two"), ("three",), (_LEFT,)),
)


def _count(body: bytes) -> None:
    """Raise ``LimitError`` as a worker does that does not trust its peers."""
    if (error := over_limits("fuzzed", _STRICT, body, "an input")) is not None:
        raise error


def _values_in(value: Any) -> int:
    """How many values have been made."""
    found, left = 0, [value]
    while left:
        each = left.pop()
        found += 1
        if isinstance(each, dict):
            left += [*each.keys(), *each.values()]
        elif isinstance(each, (list, tuple)):
            left += each
    return found


class Counting(Target):
    """The number of values: whatever can be made of an input has been counted before, and is within the limit."""

    name = "counting"
    expected = (LimitError,)

    def seeds(self) -> list[bytes]:
        samples: list[Any] = [
            *([[]], [[1]] * 400, [[[[]]] * 20] * 20, {"a": [1] * 40, "b": {"c": b"x" * 300}}, ["x" * 70_000, 1.5]),
            *(
                [list(range(4090))],
                [[0] * 15] * 200,
                [{}] * 100,
                [None, True, -5, 1 << 40, msgspec.msgpack.Ext(3, b"")],
            ),
        ]
        return [msgspec.msgpack.encode(sample) for sample in samples]

    def take(self, data: bytes) -> object:
        _count(data)
        _, found = value_count.count(data, _VALUES, 256)
        try:
            value = msgspec.msgpack.decode(data)
        except (msgspec.DecodeError, ValueError, OverflowError, TypeError, RecursionError):
            return None
        if not _values_in(value) <= found <= _VALUES:
            raise FindingError(f"{_values_in(value)} values were made, {found} were counted, {_VALUES} are allowed")
        return found


class MessageTarget(Target):
    """The body of every kind of message. The first byte of an input says which."""

    name = "messages"
    expected = (ProtocolError, LimitError)

    def seeds(self) -> list[bytes]:
        return [bytes([index]) + pack(message) for index, message in enumerate(_MESSAGES)]

    def take(self, data: bytes) -> object:
        _count(data[1:])
        return unpack(data[1:], type(_MESSAGES[data[0] % len(_MESSAGES)])) if data else None


class TensorTarget(Target):
    """A payload with its buffers: the tensors, and the list they stand in. What is a pickle is not read.

    An input is the number of buffers (1), their lengths (2 each), the payload's length (2), payload, buffers.
    """

    name = "tensors"
    expected = (ProtocolError, LimitError)

    def seeds(self) -> list[bytes]:
        found = []
        for values in _samples():
            encoded = encode(values, names=["value"] * len(values))
            buffers = [bytes(buffer) for buffer in encoded.buffers]
            body = pack(encoded.payload)
            head = bytes([len(buffers)]) + b"".join(len(b).to_bytes(2, "little") for b in buffers)
            found.append(head + len(body).to_bytes(2, "little") + body + b"".join(buffers))
        return found

    def take(self, data: bytes) -> object:
        file = io.BytesIO(data)
        sizes = [int.from_bytes(file.read(2), "little") for _ in range(int.from_bytes(file.read(1), "little") & 15)]
        body = file.read(int.from_bytes(file.read(2), "little"))
        _count(body)
        payload = unpack(body, Payload)
        buffers = [bytearray(file.read(size)) for size in sizes]
        if payload.plain is None:
            return None
        with contextlib.suppress(ProtocolError):
            check_payload(payload, buffers, LIMIT)  # it must not raise anything else
        tensors = tensors_of(payload, buffers)
        load(payload, buffers, tensors)
        for tensor in tensors:
            if tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_nested:
                self._check(tensor, sum(map(len, buffers)))
        return len(tensors)

    @staticmethod
    def _check(tensor: torch.Tensor, given: int) -> None:
        if tensor.untyped_storage().nbytes() > 4 * given + 64:
            raise FindingError(f"a tensor on {tensor.untyped_storage().nbytes()} bytes was made of {given}")
        if tensor.numel() and tensor.numel() < 1 << 16 and not tensor.is_quantized:
            reach = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            if (tensor.storage_offset() + reach) * tensor.itemsize > tensor.untyped_storage().nbytes():
                raise FindingError(f"a tensor {tuple(tensor.shape)}, {tensor.stride()} reaches beyond its memory")


class _Fixed:
    """Nonces that are always the same, so that an input means the same every time."""

    def __enter__(self) -> None:
        self._token = secrets.token_bytes
        handshake.secrets.token_bytes = lambda _=32: bytes(32)  # type: ignore[attr-defined]

    def __exit__(self, *_: object) -> None:
        handshake.secrets.token_bytes = self._token  # type: ignore[attr-defined]


class Server(Target):
    """What a client may say to a server before its bytes are frames. Nothing that it says may count as a proof."""

    name = "server"
    expected = (AuthenticationError,)
    _side: type[ServerHandshake] | type[ClientHandshake] = ServerHandshake

    def _honest(self) -> bytes:
        """What the other side says that knows the secret."""
        with _Fixed():
            client, server = ClientHandshake(_SECRET), ServerHandshake(_SECRET)
            first = client.start()
            greeting = server.feed(first)
            proof = client.feed(greeting)
            verdict = server.feed(proof)
        return first + proof if self._side is ServerHandshake else greeting + verdict

    def seeds(self) -> list[bytes]:
        honest = self._honest()
        return [honest, honest[:41] + bytes(40), honest + b"BkHl\1" + bytes(40)]

    def take(self, data: bytes) -> object:
        side: Any = self._side.__new__(self._side)
        with _Fixed():
            side.__init__(_SECRET)
        said, at = b"", 0
        while not side.done and at < len(data):
            wanted = side.wanted
            if not 0 < wanted <= 64:
                raise FindingError(f"a handshake wants {wanted} bytes")
            piece = data[at : at + min(wanted, 1 + (data[at] & 63))]
            at += len(piece)
            said += side.feed(piece)
        if side.done and data[:at] != self._valid():
            raise FindingError(f"a handshake was over with {data[:at].hex()}")
        if side.done:
            return at  # bytes from here on are frames: not one before was looked at as such
        return None

    def _valid(self) -> bytes:
        if not hasattr(self, "_known"):
            self._known = self._honest()
        return self._known


class Client(Server):
    """What a server may say to a client."""

    name = "client"
    _side = ClientHandshake


def _plain_target() -> Target | None:
    """The strict encoding for peers that are not trusted, where it is there."""
    try:
        from backhaul._wire import plain
    except ImportError:
        return None
    errors: tuple[type[BaseException], ...] = (ProtocolError,)
    from backhaul import errors as known

    if hasattr(known, "LimitError"):
        errors = (*errors, known.LimitError)

    class Plain(Target):
        name = "plain"
        expected = errors
        _tensors = (torch.ones(2), torch.zeros(1))
        _decode = msgspec.msgpack.Decoder(list[Any]).decode

        def seeds(self) -> list[bytes]:
            from backhaul._wire.tensors.writer import TensorWriter

            values: list[Any] = [
                *(1, None, 2.5, "text", b"x", 1 << 70, "\ud800", 1j, torch.Size([1, 2]), torch.float32),
                *([1, [2, (3, {4})]], {"a": [1], 2: frozenset([3])}, torch.device("cpu"), [torch.ones(1)]),
                *([[]] * 700, {(): ()}, set(range(900)), {number: [] for number in range(300)}),
                *(PassTally((1, 2), {3: 4}), [_SPEC, PassTally(tuple(range(500)), dict.fromkeys(range(500), 1))]),
            ]
            flattener = plain.Flattener(TensorWriter())
            return [msgspec.msgpack.encode([flattener.flatten(value, "value")]) for value in values]

        def take(self, data: bytes) -> object:
            _count(data)
            try:
                flat = self._decode(data)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                return None
            return plain.restore(flat, self._tensors, values=_VALUES)

    return Plain()


def targets() -> list[Target]:
    """All there are."""
    found: list[Target] = [FrameTarget(), SlotTarget(), Counting(), MessageTarget(), TensorTarget(), Server(), Client()]
    plain = _plain_target()
    return [*found, plain] if plain is not None else found


# Running.


def feed(target: Target, data: bytes) -> str:
    """Give one input to a target; how it took it. Raises ``FindingError``, or what came out and must not."""
    try:
        return "read" if target.take(data) is not None else "ignored"
    except target.expected as error:
        return type(error).__name__


class FuzzFindings:
    """What came out of a run, by target."""

    def __init__(self) -> None:
        self.inputs: collections.Counter[str] = collections.Counter()
        self.outcomes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.seconds: collections.Counter[str] = collections.Counter()
        self.findings: list[tuple[str, bytes, str]] = []


def corpus_of(folder: Path | None, target: Target) -> list[bytes]:
    """The inputs that are kept for a target."""
    if folder is None or not (folder / target.name).is_dir():
        return []
    return [path.read_bytes() for path in sorted((folder / target.name).iterdir())]


def keep(folder: Path, target: str, data: bytes) -> Path:
    """Add an input to the corpus."""
    path = folder / target / hashlib.sha256(data).hexdigest()[:16]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def run(
    chosen: Iterable[Target], *, inputs: int, seconds: float = float("inf"), seed: int = 0, corpus: Path | None = None
) -> FuzzFindings:
    """Feed ``inputs`` inputs to the targets in turn, or as many as come in ``seconds``."""
    report, draw = FuzzFindings(), random.Random(seed)
    chosen = list(chosen)
    mutators = {}
    for target in chosen:
        kept = corpus_of(corpus, target)
        for data in (*target.seeds(), *kept):
            _one(target, data, report)
        mutators[target.name] = Mutator([*target.seeds(), *kept], draw)
    begun = time.monotonic()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for target in itertools.cycle(chosen):
        if report.inputs.total() >= inputs or time.monotonic() - begun > seconds or len(report.findings) > 20:
            break
        make, started = mutators[target.name].make, time.monotonic()
        for _ in range(min(2000, inputs - report.inputs.total())):
            _one(target, make(), report)
        report.seconds[target.name] += time.monotonic() - started  # type: ignore[assignment]
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) << 10
        if grown > _GROWTH:
            report.findings.append((target.name, b"", f"the process has grown by {grown >> 20} MiB"))
            break
    return report


def _one(target: Target, data: bytes, report: FuzzFindings) -> None:
    report.inputs[target.name] += 1
    try:
        report.outcomes[target.name][feed(target, data)] += 1
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        report.findings.append((target.name, data, "".join(traceback.format_exception(error))))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--targets", default="", help="names, with commas between them; default: all")
    parser.add_argument("--corpus", type=Path, default=Path("tests/fuzz/corpus"))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None, write: Callable[[str], object] = print) -> int:
    """The command; returns its exit status."""
    given = _parse(arguments)
    wanted = set(given.targets.split(",")) if given.targets else None
    chosen = [target for target in targets() if wanted is None or target.name in wanted]
    torch.set_num_threads(1)
    begun = time.monotonic()
    report = run(chosen, inputs=given.inputs, seconds=given.minutes * 60, seed=given.seed, corpus=given.corpus)
    spent = time.monotonic() - begun
    for target in chosen:
        count, took = report.inputs[target.name], report.seconds[target.name] or 1e-9
        how = ", ".join(f"{name} {n}" for name, n in report.outcomes[target.name].most_common())
        write(f"{target.name:<9} {count:>9} inputs {count / took:>9,.0f} a second   {how}")
    total = report.inputs.total()
    write(f"{total} inputs in {spent:.0f} s ({total / spent:,.0f} a second), {len(report.findings)} findings")
    for name, data, text in report.findings:
        path = keep(given.corpus, name, data) if data else "-"
        write(f"FINDING {name}, kept as {path}\n  {text.rstrip()}".replace("\n", "\n  "))
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())
