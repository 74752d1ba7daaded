"""Members that attack a worker which does not trust them: they know the secret, and say who they are."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
import torch

import backhaul as bh
from backhaul._autograd.backward.engine import Engine
from backhaul._autograd.ids import MessageId
from backhaul._autograd.messages import (
    Abort,
    AutogradKind,
    AutogradNote,
    Gradients,
    Know,
    PassSpec,
    Release,
    Report,
)
from backhaul._rpc.cluster.enrollment import expect
from backhaul._rpc.cluster.membership_table import WorkerRecord
from backhaul._rpc.node import Node
from backhaul._transport.shm.host_memory import OFFER
from backhaul._transport.sockets.endpoint import SocketEndpoint
from backhaul._wire.frame_reader import FrameReader
from backhaul._wire.frames import Frame, control_frame
from backhaul._wire.messages import TREE, Cancel, Fault, Hello, Join, Kind, Payload, Reply, Request, pack, unpack
from backhaul._wire.tensors.specs import Ordinary, Part, TensorSpec, TensorTable
from backhaul.testing.transport_conformance import PATIENCE

from .attackers import (
    LIMIT,
    SECRET,
    dial,
    make_endpoint,
    own_name,
    prove,
    read_to_end,
    say,
    say_and_leave,
    warnings_about,
    wire,
)


class Bomb:
    """Says so when it is unpickled."""

    def __reduce__(self) -> object:
        return os.putenv, ("BACKHAUL_TEST_BOMB", "gone off")


PICKLE = pickle.dumps([Bomb()])
weight = torch.ones(2, requires_grad=True)


@bh.expose(name="attacked.add")
def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


@bh.expose(name="attacked.scale")
def scale(x: torch.Tensor) -> torch.Tensor:
    return x * weight


@bh.expose(name="attacked.large")
def large() -> torch.Tensor:
    return torch.zeros(200_000)


@bh.expose(name="attacked.slow")
def slow() -> None:
    time.sleep(0.5)


promised: list[bh.Future[int]] = []


@bh.expose(name="attacked.later")
@bh.async_execution
def later() -> bh.Future[int]:
    promised.append(bh.Future())
    return promised[-1]


@contextlib.contextmanager
def strict_worker(**limits: int) -> Iterator[list[bh.Worker]]:
    options = bh.Options(
        shutdown_timeout=10,
        timeout=PATIENCE,
        security=bh.Security(trusted=False),
        limits=bh.Limits(frame_bytes=LIMIT, **limits),
    )
    names = ["honest", "attacked", "evil"]
    with bh.cluster(names, options=options, endpoints=make_endpoint) as workers:
        check(workers)
        yield workers
        check(workers)
    assert "BACKHAUL_TEST_BOMB" not in os.environ


def check(workers: list[bh.Worker]) -> None:
    """The honest one is served, over the channel it had."""
    channel = workers[0].part(Node).peers.find("attacked").channel
    assert torch.equal(bh.rpc_sync("attacked", "attacked.add", args=(torch.ones(2), 1)), torch.full((2,), 2.0))
    assert channel in (None, workers[0].part(Node).peers.find("attacked").channel)
    with bh.context() as ctx:
        x = torch.ones(2, requires_grad=True)
        ctx.backward(bh.rpc_sync("attacked", "attacked.scale", args=(x,)).sum())
        assert torch.equal(ctx.grads[x], weight.detach())


def member(workers: list[bh.Worker], *, way: int = 1) -> socket.socket:
    """A raw connection of the evil one to the attacked."""
    attacked, evil = workers[1:]
    sock = dial(attacked.endpoint.addresses[way])
    prove(sock)
    hello = Hello(attacked.name, attacked.incarnation, pack(evil.part(Node).peers.own.record))
    sock.sendall(wire(Frame(Kind.HELLO, 0, pack(hello))))
    return sock


def call(function: str, payload: Payload, number: int = 1, notes: dict[str, bytes] | None = None) -> Frame:
    return Frame(Kind.REQUEST, number, pack(Request(function, payload, False, notes or {})))


def answers(sock: socket.socket, count: int = 1) -> list[Frame]:
    reader, found = FrameReader(LIMIT), []
    while len(found) < count:
        memory = reader.space
        size = sock.recv_into(memory)
        assert size, "closed"
        found += [frame for frame in reader.fed(size) if frame.kind != Kind.BEAT]
    return found


def gradients(messages: list[int], counts: list[int], payload: Payload, buffers: Sequence[bytes] = ()) -> Frame:
    numbers = [MessageId(message) for message in messages]
    return Frame(AutogradKind.GRADIENT, 0, pack(Gradients(SPEC, numbers, counts, payload)), buffers)


SPEC = PassSpec(1 << 48, 0, 1)
PLAIN = Payload(plain=[1, 2])
PICKLED = Payload(pickle=PICKLE)
NO_GRAD = Payload(plain=[None])
BOOL = TensorTable(ordinary=(msgspec.msgpack.encode(Ordinary("bool", (1,), False, False)),))
FAULT = Fault("evil", "builtins.ValueError", "", "", PICKLED)
NOTE = pack(AutogradNote(1 << 48, 5 << 48 | 1, (0,)))

CLOSING = {
    "a pickled argument": [call("attacked.add", PICKLED)],
    "a pickle for a function that is not there": [call("os:system", PICKLED)],
    "a function by value": [call("", PICKLED)],
    "a function by value, unpickled": [call("", PLAIN)],
    "a pickle beside plain values": [call("attacked.add", Payload(plain=[1, 2], pickle=PICKLE))],
    "loose buffers": [
        Frame(Kind.REQUEST, 1, pack(Request("attacked.add", Payload(plain=[1, 2], loose=1))), [b"12345678"])
    ],
    "no values": [call("attacked.add", Payload())],
    "values without tags": [call("attacked.add", Payload(plain=[{"a": [1]}, 2]))],
    "a pickled reply": [Frame(Kind.REPLY, 1, pack(Reply(PICKLED)))],
    "a pickled fault": [Frame(Kind.FAULT, 1, pack(FAULT))],
    "pickled gradients": [gradients([1], [1], PICKLED)],
    "no gradients": [gradients([], [], Payload(plain=[]))],
    "gradients without their buffers": [gradients([1], [1], Payload(BOOL, [None], ((0, 0),)))],
    "gradients of too few messages": [gradients([1], [1], Payload(plain=[None, None]))],
    "gradients of too many messages": [gradients([1, 2], [1], NO_GRAD)],
    "fewer gradients than none": [gradients([1, 2], [-1, 2], NO_GRAD)],
    "gradients of one message twice": [gradients([1, 1], [1, 1], Payload(plain=[None, None]))],
    "a bool of 2 behind other gradients": [
        gradients([1, 2], [1, 1], Payload(BOOL, [None, None], ((1, 0),)), buffers=[b"\x02"])
    ],
    "a number that is under way": [call("attacked.slow", Payload(plain=[])), call("attacked.slow", Payload(plain=[]))],
    "a time that is none": [
        Frame(Kind.REQUEST, 1, pack(Request("attacked.add", PLAIN, left=float("nan")))),
    ],
    "a time that is over": [Frame(Kind.REQUEST, 1, pack(Request("attacked.add", PLAIN, left=-1.0)))],
    "a pickled fault of a pass": [Frame(AutogradKind.REPORT, 0, pack(Report(SPEC, fault=FAULT)))],
    "notes of references": [call("attacked.add", PLAIN, notes={"rref": b"\x91\x90"})],
    "not a request": [Frame(Kind.REQUEST, 1, b"\xc1")],
    "a hello again": [Frame(Kind.HELLO, 0, pack(Hello("attacked", "", b"honest")))],
    "an unknown kind": [Frame(99)],
    "a quantized tensor": [
        call("attacked.add", Payload(TensorTable((TensorSpec((), layout="quantized"),)), [[0, 0]], loose=TREE))
    ],
    "a tensor far larger than its memory": [
        Frame(
            Kind.REQUEST,
            1,
            pack(
                Request(
                    "attacked.add",
                    Payload(
                        TensorTable((TensorSpec((0,)),), (Part(0, "float32", (1 << 40,), (0,)),)),
                        [[0, 0], 1],
                        loose=TREE,
                    ),
                )
            ),
            [b"1234"],
        )
    ],
}


@pytest.fixture
def workers() -> Iterator[list[bh.Worker]]:
    with strict_worker() as made:
        yield made


@pytest.mark.parametrize("attack", CLOSING)
def test_what_breaks_the_rules_closes_its_channel(
    workers: list[bh.Worker], attack: str, caplog: pytest.LogCaptureFixture
) -> None:
    with member(workers) as sock:
        name = own_name(sock)
        say(sock, wire(*CLOSING[attack]))
        assert read_to_end(sock) == b""
        assert len(warnings_about(caplog, name)) == 1
    check(workers)


def test_shared_memory_is_not_taken(workers: list[bh.Worker], caplog: pytest.LogCaptureFixture) -> None:
    with member(workers, way=0) as sock:
        body = (3).to_bytes(4, "little") + (1).to_bytes(4, "little") + (4096).to_bytes(8, "little") + bytes(16)
        say(sock, control_frame(OFFER, 1, body))
        assert sock.recv(100).endswith(b"\0")  # an answer: no
    assert not workers[1].endpoint.shm_bytes
    check(workers)


REFUSED = {
    "a function that is not exposed": (call("os:system", Payload(plain=["true"])), "PermissionDeniedError"),
    "one of our own for references": (call("backhaul._rref.remote:create", PLAIN), "PermissionDeniedError"),
    "deep nesting": (
        Frame(Kind.REQUEST, 1, pack(Request("attacked.add", Payload(plain=[_deep], loose=TREE))))
        if (_deep := [1, [1, [1, [1, [1, [1]]]]]])
        else None,
        "LimitError",
    ),
    "nesting beyond all measure": (Frame(Kind.REQUEST, 1, b"\x91" * 100_000), "LimitError"),
    "too many tensors": (
        call("attacked.add", Payload(TensorTable(ordinary=(b"x",) * 9), [1])),
        "LimitError",
    ),
    "arguments of the wrong types for one of our own": (
        call("backhaul._autograd.plan.planner:orders_for", Payload(plain=[1, 2, "x"])),
        "TypeError",
    ),
    "records of another form": (
        call("backhaul._autograd.plan.planner:summary_of", Payload(plain=[[12, "PassSpec", b"\x90"]], loose=TREE)),
        "SerializationError",
    ),
    "a message of another worker": (call("attacked.add", PLAIN, notes={"autograd": NOTE}), "SerializationError"),
    "a note that is none": (call("attacked.add", PLAIN, notes={"autograd": b"\xc1"}), "SerializationError"),
}


@pytest.mark.parametrize("attack", REFUSED)
def test_what_asks_too_much_is_answered(attack: str) -> None:
    frame, kind = REFUSED[attack]
    assert frame is not None
    with strict_worker(tensors=8, depth=5) as workers, member(workers) as sock:
        sock.sendall(wire(frame, call("attacked.add", PLAIN, number=2)))
        found = {frame.number: frame for frame in answers(sock, 2)}
        assert found[1].kind == Kind.FAULT
        fault = unpack(found[1].body, Fault)
        assert fault.type_name.endswith(kind), fault
        assert fault.payload is not None
        assert not fault.payload.pickle
        assert "File" not in fault.traceback
        assert found[2].kind == Kind.REPLY


def message(*fields: Any) -> bytes:
    return msgspec.msgpack.encode(fields)


def many(item: bytes) -> msgspec.Raw:
    """An array of a megabyte, of a value that takes little there and much once it is made."""
    count = 900_000 // len(item)
    return msgspec.Raw(b"\xdd" + count.to_bytes(4, "big") + item * count)


NUMBERS = many(b"\x01")
LISTS = Payload(plain=[[1, many(b"\x91\x01")]], loose=TREE)
GHOST = msgspec.to_builtins(WorkerRecord(9, "ghost", "i", "here", (), "", 1 << 20))
SHOWN = msgspec.msgpack.encode({**GHOST, "maps": {f"{number:x}": {} for number in range(100_000)}})
RECORDS = Payload(plain=[[12, "Summary", message(many(b"\x80"), {})]], loose=TREE)

MANY = {
    "values": (call("attacked.add", LISTS), "LimitError"),
    "notes": (call("attacked.add", PLAIN, notes={"autograd": message(1, 1, NUMBERS)}), "LimitError"),
    "records": (call("attacked.add", RECORDS), "LimitError"),
    "arguments of our own": (
        call("backhaul._rpc.cluster.partition_healing:compare", Payload(plain=[message(many(b"\xa2ab"), [])])),
        "LimitError",
    ),
    "tensors": (Frame(Kind.REQUEST, 1, message("attacked.add", [[many(b"\x91\x90")], [1]])), "LimitError"),
    "parts": (Frame(Kind.REQUEST, 1, message("attacked.add", [[[], many(b"\x93\x00\xa1x\x90")], [1]])), "LimitError"),
    "reply": (Frame(Kind.REPLY, 1, pack(Reply(LISTS))), ""),
    "fault": (Frame(Kind.FAULT, 1, pack(Fault("evil", "builtins.ValueError", "", "", LISTS))), ""),
    "cancel": (Frame(Kind.CANCEL, 0, message(NUMBERS)), "closed"),
    "gradients": (gradients([1], [1], LISTS), "closed"),
    "many gradients": (
        Frame(AutogradKind.GRADIENT, 0, message(SPEC, many(b"\x94\x01\x90\x00\xc0"))),
        "closed",
    ),
    "report": (Frame(AutogradKind.REPORT, 0, message(SPEC, [NUMBERS, {}])), "closed"),
    "abort": (Frame(AutogradKind.ABORT, 0, message([1 << 48, 0, 1, *[False] * 6, 0, NUMBERS])), "closed"),
    "hello": (Frame(Kind.HELLO, 0, pack(Hello("attacked", "", SHOWN))), "closed"),
    "join": (Frame(Kind.JOIN, 0, pack(Join(SHOWN))), "closed"),
    "buffers": (Frame(Kind.REQUEST, 1, pack(Request("attacked.add", PLAIN)), [b""] * 120_000), "closed"),
}


@pytest.mark.parametrize("attack", MANY)
def test_values_are_counted_before_anything_is_made_of_them(workers: list[bh.Worker], attack: str) -> None:
    frame, outcome = MANY[attack]
    sent = wire(frame)
    stranger = frame.kind in (Kind.HELLO, Kind.JOIN)
    with member(workers) if not stranger else dial(workers[1].endpoint.addresses[1]) as sock:
        if stranger:
            prove(sock)
        else:
            sock.sendall(wire(call("attacked.add", PLAIN, number=7)))
            assert answers(sock)[0].kind == Kind.REPLY
        tracemalloc.start()
        try:
            say(sock, sent)
            if outcome == "closed":
                read_to_end(sock)
            else:
                say(sock, wire(call("attacked.add", PLAIN, number=2)))
                found = {frame.number: frame for frame in answers(sock, 2 if outcome else 1)}
                assert found[2].kind == Kind.REPLY
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 6 * len(sent)  # copies of its bytes, and not what could be made of them
        if outcome == "LimitError":
            fault = unpack(found[1].body, Fault)
            assert fault.type_name.endswith("LimitError"), fault
            assert "limits.values" in fault.message
    check(workers)


def test_contexts_of_others_are_left_alone() -> None:
    with strict_worker() as workers, member(workers) as sock, bh.context() as ctx:
        x = torch.ones(2, requires_grad=True)
        y = bh.rpc_sync("attacked", "attacked.scale", args=(x,)).sum()
        spec = PassSpec(int(ctx), 0, 1)
        sock.sendall(
            wire(
                Frame(AutogradKind.RELEASE, 0, pack(Release(int(ctx)))),
                Frame(AutogradKind.KNOW, 0, pack(Know(int(ctx)))),
                Frame(AutogradKind.RELEASE, 0, pack(Release(int(ctx)))),
                Frame(AutogradKind.ABORT, 0, pack(Abort(spec))),
                Frame(Kind.LEAVE),
                call("attacked.add", PLAIN),
            )
        )
        assert [frame.kind for frame in answers(sock)] == [Kind.REPLY]
        ctx.backward(y)
        assert torch.equal(ctx.grads[x], weight.detach())


def test_messages_of_others_are_not_dropped() -> None:
    with strict_worker() as workers, member(workers) as sock, bh.context() as ctx:
        x = torch.ones(2, requires_grad=True)
        y = bh.rpc_sync("attacked", "attacked.scale", args=(x,)).sum()
        context = workers[1].part(Engine).container.find(int(ctx))
        assert context is not None
        note = pack(AutogradNote(context.id, next(iter(context.sends)), (0,)))
        sock.sendall(wire(call("attacked.add", PLAIN, notes={"autograd": note})))
        assert [frame.kind for frame in answers(sock)] == [Kind.FAULT]
        sock.sendall(wire(Frame(Kind.REPLY, 999, pack(Reply(Payload(plain=[1]), {"autograd": note})))))
        sock.sendall(wire(call("attacked.add", PLAIN, number=2)))
        assert [frame.kind for frame in answers(sock)] == [Kind.REPLY]
        ctx.backward(y)
        assert torch.equal(ctx.grads[x], weight.detach())


def test_cancelled_calls_do_not_count_any_more() -> None:
    with strict_worker(calls=1) as workers, member(workers) as sock:
        nothing = Payload(plain=[])
        cancel = Frame(Kind.CANCEL, 0, pack(Cancel((1, 7))))
        sock.sendall(wire(call("attacked.slow", nothing), call("attacked.slow", nothing, number=2), cancel))
        (refused,) = answers(sock)
        assert (refused.kind, refused.number) == (Kind.FAULT, 2)
        while workers[1].counters["num_calls_in_flight"]():
            time.sleep(0.01)
        sock.sendall(wire(call("attacked.add", PLAIN, number=3)))
        assert [(frame.kind, frame.number) for frame in answers(sock)] == [(Kind.REPLY, 3)]


def test_what_goes_on_after_a_call_was_cancelled_counts() -> None:
    with strict_worker(calls=1) as workers, member(workers) as sock:
        in_flight = workers[1].counters["num_calls_in_flight"]
        sock.sendall(wire(call("attacked.later", Payload(plain=[]))))
        while not promised:
            time.sleep(0.01)
        sock.sendall(wire(Frame(Kind.CANCEL, 0, pack(Cancel((1,))))))
        while workers[1].part(Node).server.under_way:
            time.sleep(0.01)
        sock.sendall(wire(call("attacked.add", PLAIN, number=2)))
        assert [(frame.kind, frame.number) for frame in answers(sock)] == [(Kind.FAULT, 2)]
        assert in_flight() == 1
        promised.pop().set_result(1)
        while in_flight():
            time.sleep(0.01)
        sock.sendall(wire(call("attacked.add", PLAIN, number=3)))
        assert [(frame.kind, frame.number) for frame in answers(sock)] == [(Kind.REPLY, 3)]


def test_floods_are_refused_and_honest_peers_served() -> None:
    with strict_worker(calls=4) as workers, member(workers) as sock:
        flood = wire(*(call("attacked.add", PLAIN, number=number) for number in range(1, 3001)))
        sock.sendall(flood)
        check(workers)
        found = answers(sock, 3000)
        assert {frame.kind for frame in found} <= {Kind.REPLY, Kind.FAULT}
        assert {frame.number for frame in found} == set(range(1, 3001))
        assert workers[1].counters["num_calls_in_flight"]() == 0


def test_replies_that_nobody_reads_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backhaul._rpc.security.untrusted._SEND_SECONDS", 0.05)
    monkeypatch.setattr("backhaul._rpc.security.untrusted._MAX_ASIDE", 1 << 20)
    with strict_worker() as workers, member(workers) as sock:
        request = Request("attacked.large", Payload(plain=[]))
        with contextlib.suppress(ConnectionError):
            for number in range(1, 200):
                sock.sendall(wire(Frame(Kind.REQUEST, number, pack(request))))
        check(workers)
        while workers[1].part(Node).server._usage.calls:  # type: ignore[attr-defined]
            check(workers)
        read_to_end(sock)  # it was closed


def test_frames_before_a_hello_are_not_taken(workers: list[bh.Worker]) -> None:
    for frame in (call("attacked.add", PLAIN), Frame(Kind.LEAVE), Frame(AutogradKind.RELEASE, 0, pack(Release(1)))):
        with dial(workers[1].endpoint.addresses[1]) as sock:
            prove(sock)
            say(sock, wire(frame))
            assert read_to_end(sock) == b""
    check(workers)


def show(workers: list[bh.Worker], **changes: Any) -> WorkerRecord:
    """The evil one shows the attacked a record that is not quite its own, and waits for what comes of it."""
    attacked, evil = workers[1:]
    record = msgspec.structs.replace(evil.part(Node).peers.own.record, **changes)
    with dial(attacked.endpoint.addresses[1]) as sock:
        prove(sock)
        hello = Hello(attacked.name, attacked.incarnation, pack(record))
        say_and_leave(sock, wire(Frame(Kind.HELLO, 0, pack(hello))))
    return record


def test_nobody_takes_anothers_place_on_its_own_word() -> None:
    with strict_worker() as workers:
        honest, attacked, evil = workers
        members = attacked.part(Node).peers.records
        for epoch in (1, 10**6, 2**64 - 1):
            show(workers, id=honest.info.id, incarnation=f"new {epoch}", epoch=epoch)
            show(workers, name="honest", incarnation=f"newer {epoch}", epoch=epoch)
        show(workers, id=honest.info.id, incarnation=honest.incarnation)
        assert attacked.part(Node).peers.records == members
        # Nor because it says that it has enrolled itself: it is not the leader.
        record = show(workers, id=honest.info.id, incarnation="enrolled", epoch=7)
        with evil:
            bh.rpc_sync("attacked", expect, args=([pack(record)],))
        show(workers, id=honest.info.id, incarnation="enrolled", epoch=7)
        assert attacked.part(Node).peers.records == members


def test_floods_of_joins() -> None:
    """They make neither members nor threads, and those who come honestly get in."""
    with strict_worker() as workers:
        leader = workers[0]
        own = workers[2].part(Node).peers.own.record
        threads = threading.active_count()

        def ask(number: int) -> Frame:
            changes = {"id": -1, "name": f"ghost{number}", "incarnation": f"{number}"}
            return Frame(Kind.JOIN, 0, pack(Join(pack(msgspec.structs.replace(own, **changes)))))

        with dial(leader.endpoint.addresses[1]) as sock:  # many questions at once
            prove(sock)
            say_and_leave(sock, wire(*map(ask, range(300))))
        for number in range(300, 400):  # and many that ask once
            with dial(leader.endpoint.addresses[1]) as sock:
                prove(sock)
                sock.sendall(wire(ask(number)))
                assert answers(sock)[0].kind == Kind.WELCOME
        peers = leader.part(Node).peers
        assert [record.name for record in peers.records] == ["honest", "attacked", "evil"]
        assert len(leader.part(Node).admission.expected) <= 64
        assert threading.active_count() < threads + 20


def test_connections_that_prove_nothing_are_dropped_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backhaul._transport.sockets.acceptor._HANDSHAKE_SECONDS", 0.2)
    with (
        contextlib.closing(SocketEndpoint(secret=SECRET, bind="127.0.0.1")) as endpoint,
        contextlib.ExitStack() as stack,
    ):
        crowd = [stack.enter_context(dial(address)) for address in endpoint.addresses for _ in range(3)]
        while len(endpoint._acceptor.pending) < len(crowd):
            endpoint.poll(PATIENCE)
        while endpoint._acceptor.pending:  # nobody else comes; its own clock tells
            endpoint.poll(PATIENCE)
        for sock in crowd:
            assert read_to_end(sock) == b""
