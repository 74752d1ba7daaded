"""Listening sockets under attack: whatever arrives, honest peers are served, and nothing of a stranger is decoded."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backhaul._rpc.node import Node
from backhaul._transport.shm.host_memory import ANSWER, OFFER, RETIRE
from backhaul._transport.sockets.endpoint import SocketEndpoint
from backhaul._transport.sockets.handshake import MAGIC, VERSION, ClientHandshake, ServerHandshake
from backhaul._wire.frames import HEADER, Frame, control_frame
from backhaul._wire.frames import MAGIC as FRAME_MAGIC
from backhaul._wire.messages import CallTally, Count, Hello, Kind, Payload, Refuse, Request, pack
from backhaul.errors import AuthenticationError
from backhaul.testing.transport_conformance import PATIENCE, Aside, Pollers

from .attackers import (
    LIMIT,
    SECRET,
    BareEndpoint,
    Target,
    WholeWorker,
    dial,
    own_name,
    prove,
    read_exactly,
    read_to_end,
    request,
    say,
    say_and_leave,
    warnings_about,
    wire,
)

GREETING = MAGIC + bytes([VERSION]) + bytes(32)
PROOF = 32
REFUSALS = (b"", ServerHandshake.refusal)

fuzz = settings(max_examples=30, deadline=None, derandomize=True, database=None)


# A bomb: unpickling it leaves a trace.

fired: list[int] = []


def fire() -> None:
    fired.append(1)


class Bomb:
    def __reduce__(self) -> Any:
        return fire, ()


def bomb() -> Frame:
    return Frame(Kind.REQUEST, 9, pack(Request("builtins:id", Payload(pickle=pickle.dumps([Bomb()])))))


@pytest.fixture(autouse=True)
def nothing_fired() -> None:
    fired.clear()


# Before the handshake.


def test_random_bytes(target: Target) -> None:
    @fuzz
    @given(st.binary(max_size=2000), st.sampled_from(target.addresses))
    def attack(noise: bytes, address: str) -> None:
        with dial(address) as sock:
            assert say_and_leave(sock, noise) in REFUSALS

    attack()
    assert target.allocated == []
    target.check()


def test_random_bytes_behind_a_good_greeting(target: Target) -> None:
    @fuzz
    @given(st.binary(max_size=200), st.sampled_from(target.addresses))
    def attack(noise: bytes, address: str) -> None:
        with dial(address) as sock:
            sock.sendall(GREETING)
            answer = read_exactly(sock, len(GREETING))
            assert answer.startswith(GREETING[:-32])
            assert say_and_leave(sock, noise) in REFUSALS

    attack()
    target.check()


def test_handshakes_that_stop_anywhere(target: Target) -> None:
    for address in target.addresses:
        for length in range(len(GREETING) + PROOF):
            with dial(address) as sock:
                handshake = ClientHandshake(SECRET)
                data = handshake.start()
                if length > len(GREETING):
                    sock.sendall(data)
                    data = handshake.feed(read_exactly(sock, handshake.wanted))[: length - len(GREETING)]
                if length % 2:
                    say_and_leave(sock, data[:length])
                else:
                    say(sock, data[:length])  # and gone, without a word
    target.check()


def test_handshakes_byte_by_byte_are_good_ones(target: Target) -> None:
    for address in target.addresses:
        with dial(address) as sock:
            handshake = ClientHandshake(SECRET)
            data = handshake.start()
            while not handshake.done:
                for byte in data:
                    sock.sendall(bytes([byte]))
                data = handshake.feed(read_exactly(sock, handshake.wanted))
            sock.sendall(wire(*target.opening(), request(5)))
            assert HEADER.unpack(read_exactly(sock, HEADER.size))[2] == Kind.REPLY
    target.check()


# A wrong secret, and a pickle that must not be opened.


def without_handshake(sock: socket.socket, frames: bytes) -> bytes:
    return say_and_leave(sock, frames)


def instead_of_a_proof(sock: socket.socket, frames: bytes) -> bytes:
    sock.sendall(GREETING)
    read_exactly(sock, len(GREETING))
    return say_and_leave(sock, frames)


def behind_a_wrong_proof(sock: socket.socket, frames: bytes) -> bytes:
    prove(sock, b"another secret", wait=False)
    return say_and_leave(sock, frames)


def behind_a_proof_sent_twice(sock: socket.socket, frames: bytes) -> bytes:
    """The proof of a session that somebody listened to."""
    seen = ClientHandshake(SECRET)
    old = ServerHandshake(SECRET)
    proof = seen.feed(old.feed(seen.start()))
    sock.sendall(seen.start())
    read_exactly(sock, len(GREETING))
    return say_and_leave(sock, proof + frames)


@pytest.mark.parametrize(
    "attack", [without_handshake, instead_of_a_proof, behind_a_wrong_proof, behind_a_proof_sent_twice]
)
def test_nothing_of_a_stranger_is_decoded(
    whole: WholeWorker, caplog: pytest.LogCaptureFixture, attack: Callable[[socket.socket, bytes], bytes]
) -> None:
    for address in whole.addresses:
        with dial(address) as sock:
            assert attack(sock, wire(*whole.opening(), bomb(), bomb())) in REFUSALS
            assert warnings_about(caplog, own_name(sock))
    whole.check()
    assert fired == []


def test_the_bomb_is_a_live_one(whole: WholeWorker) -> None:
    """Else the test above would say nothing: with the secret it is opened."""
    with dial(whole.addresses[0]) as sock:
        prove(sock)
        sock.sendall(wire(*whole.opening(), bomb()))
        read_exactly(sock, HEADER.size)
        assert fired == [1]
    whole.check()


def test_nothing_of_a_stranger_is_delivered(bare: BareEndpoint) -> None:
    before = len(bare.pollers.frames())
    for attack in (without_handshake, instead_of_a_proof, behind_a_wrong_proof, behind_a_proof_sent_twice):
        for address in bare.addresses:
            with dial(address) as sock:
                attack(sock, wire(request(1), request(2)))
    assert len(bare.pollers.frames()) == before
    bare.check()


def test_a_peer_that_has_not_said_who_it_is_calls_nothing(whole: WholeWorker, caplog: pytest.LogCaptureFixture) -> None:
    for address in whole.addresses:
        with dial(address) as sock:
            prove(sock)
            sock.sendall(wire(bomb()))
            assert read_to_end(sock) == b""
            assert warnings_about(caplog, own_name(sock))
    whole.check()
    assert fired == []


# Authenticated, and then nonsense.


def header(
    *,
    magic: bytes = FRAME_MAGIC,
    version: int = 1,
    kind: int = Kind.REQUEST,
    flags: int = 0,
    count: int = 0,
    body: int = 0,
    number: int = 1,
    payload: int = 0,
) -> bytes:
    return HEADER.pack(magic, version, kind, flags, count, body, number, payload)


HUGE = (1 << 64) - 1
IMPOSSIBLE = {
    "no magic": header(magic=b"HTTP"),
    "another version": header(version=2),
    "unknown flags": header(flags=4),
    "a body beyond the limit": header(body=LIMIT),
    "the largest body": header(body=(1 << 32) - 1),
    "a payload beyond the limit": header(count=1, payload=LIMIT),
    "the largest payload": header(count=1, payload=HUGE),
    "a table beyond the limit": header(count=LIMIT // 8),
    "the largest table": header(count=(1 << 32) - 1),
    "everything at its largest": header(count=(1 << 32) - 1, body=(1 << 32) - 1, payload=HUGE),
    "sizes that overflow 64 bits": header(count=2, body=1, payload=HUGE - 48) + b"\0" * 17,
    "a payload without buffers": header(payload=100),
    "buffers beyond the payload": header(count=2, payload=100) + (51).to_bytes(8, "little") * 2,
    "buffers short of the payload": header(count=2, payload=100) + (49).to_bytes(8, "little") * 2,
    "a buffer of the largest length": header(count=1, payload=100) + HUGE.to_bytes(8, "little"),
    "lengths that add up only in 64 bits": header(count=2, payload=100)
    + HUGE.to_bytes(8, "little")
    + (101).to_bytes(8, "little"),
    "slots without buffers": header(flags=1),
    "slots in a control frame": header(flags=3),
    "a place in no segment": header(flags=1, count=1, payload=100) + struct.pack("<QQ", 100, 1 << 32),
    "the last of all places": header(flags=1, count=1, payload=100) + struct.pack("<QQ", 100, HUGE),
    "a control frame with buffers": header(flags=2, count=1, payload=100),
    "a control frame that is long": header(flags=2, body=65),
    "an unknown control frame": control_frame(9, 1),
    "an empty offer": control_frame(OFFER, 1),
    "an offer of no slots": control_frame(OFFER, 1, struct.pack("<iIQ16s", 0, 0, 4096, b"")),
    "an offer of the largest slots": control_frame(OFFER, 1, struct.pack("<iIQ16s", 0, 64, HUGE - 4095, b"")),
    "an answer to no offer": control_frame(ANSWER, 1, b"\1"),
    "the end of no segment": control_frame(RETIRE, 1),
}


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_impossible_frames_close_their_channel_before_anything_is_allocated(
    target: Target, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    for address in target.addresses:
        for before in ([], target.opening()):
            caplog.clear()
            with dial(address) as sock:
                prove(sock)
                sock.sendall(wire(*before) + IMPOSSIBLE[what])
                assert read_to_end(sock) == b""  # it closes; we have not
                assert warnings_about(caplog, own_name(sock))
    assert target.allocated == []
    target.check()


VALID = wire(
    Frame(Kind.HELLO, 0, pack(Hello("attacked", "2", b"nobody"))),
    Frame(Kind.COUNT, 0, pack(Count(1))),
    Frame(Kind.TALLY, 0, pack(CallTally(1, 2, 3))),
    Frame(Kind.REFUSE, 0, pack(Refuse("no"))),
    Frame(Kind.REPLY, 12, b"nothing", [bytes(300), b"", bytes(70_000)]),
    request(3),
    Frame(Kind.REQUEST, 4, b"", [b"tensor"] * 3),
) + control_frame(OFFER, 1, struct.pack("<iIQ16s", 0, 2, 4096, b"no segment"))


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """Valid frames with some bytes changed, a piece cut out, a piece doubled, or the end missing."""
    data = bytearray(VALID)
    places = st.one_of(st.integers(0, 300), st.integers(0, len(data) - 1))  # mostly where the headers are
    for _ in range(draw(st.integers(0, 4))):
        data[draw(places)] = draw(st.integers(0, 255))
    start = draw(places)
    stop = start + draw(st.integers(0, 40))
    match draw(st.sampled_from(["keep", "cut", "double", "truncate", "insert"])):
        case "cut":
            del data[start:stop]
        case "double":
            data[start:start] = data[start:stop]
        case "truncate":
            del data[start:]
        case "insert":
            data[start:start] = draw(st.binary(max_size=50))
    return bytes(data)


def test_mutated_frames(target: Target) -> None:
    @settings(fuzz, max_examples=80)
    @given(mutated(), st.sampled_from(target.addresses), st.booleans())
    def attack(data: bytes, address: str, introduced: bool) -> None:
        with dial(address) as sock:
            prove(sock)
            say_and_leave(sock, (wire(*target.opening()) if introduced else b"") + data)

    attack()
    assert all(size <= LIMIT for size in target.allocated)
    target.check()


def test_frames_that_stop_anywhere(target: Target) -> None:
    data = wire(*target.opening(), Frame(Kind.REPLY, 1, b"body", [bytes(100), bytes(40_000)]))
    ends = [*range(0, 60), *range(60, 300, 7), 40_000, len(data) - 1]
    for address, end in itertools.product(target.addresses, ends):
        with dial(address) as sock:
            prove(sock)
            say_and_leave(sock, data[:end])
    target.check()


def test_bodies_that_are_no_messages(whole: WholeWorker) -> None:
    kinds = st.sampled_from([*(int(kind) for kind in Kind if kind != Kind.LEAVE), 0, 6, 7, 99, 255])

    @settings(fuzz, max_examples=60)
    @given(kinds, st.binary(max_size=100), st.integers(0, 1 << 63), st.sampled_from(whole.addresses), st.booleans())
    def attack(kind: int, body: bytes, number: int, address: str, introduced: bool) -> None:
        with dial(address) as sock:
            prove(sock)
            frames = [*whole.opening()] if introduced else []
            say_and_leave(sock, wire(*frames, Frame(kind, number, body, [b"buffer"])))

    attack()
    whole.check()


DEEP = b"\x91" * 20_000 + b"\xc0"  # msgpack: one list inside the other
NAMES = b"\xa1s" * 4
DEEP_MESSAGES = {
    Kind.HELLO: b"\x96\x01" + NAMES + DEEP,
    Kind.REFUSE: b"\x92\xa1s" + DEEP,
    Kind.COUNT: b"\x92\x01" + DEEP,
    Kind.TALLY: b"\x94\x01\x01\x01" + DEEP,
}


@pytest.mark.parametrize("kind", DEEP_MESSAGES, ids=lambda kind: kind.name)
def test_a_message_that_nests_too_deep_closes_its_channel(
    whole: WholeWorker, caplog: pytest.LogCaptureFixture, kind: Kind
) -> None:
    with dial(whole.addresses[1]) as sock:
        prove(sock)
        sock.sendall(wire(*whole.opening(), Frame(kind, 0, DEEP_MESSAGES[kind])))
        sock.settimeout(10)
        assert read_to_end(sock) == b""
        assert warnings_about(caplog, own_name(sock))
    whole.check()


def test_a_bad_frame_takes_no_good_ones_with_it(whole: WholeWorker) -> None:
    """Requests that came together with a bad frame are served or dropped, but not forgotten: shutdown would wait."""
    with dial(whole.addresses[0]) as sock:
        prove(sock)
        bad = Frame(Kind.HELLO, 0, DEEP_MESSAGES[Kind.HELLO])
        sock.sendall(wire(*whole.opening(), request(1), request(2), bad))
        sock.shutdown(socket.SHUT_WR)
        read_to_end(sock)
    whole.check()
    agent = whole.workers[1].part(Node).client
    idle = threading.Event()
    agent.idleness.when_idle(idle.set)
    assert idle.wait(10), "the worker thinks for ever that it is busy"


def test_a_peer_that_leaves_before_it_is_refused(whole: WholeWorker, caplog: pytest.LogCaptureFixture) -> None:
    """The refusal cannot be sent, which is nobody's error but the peer's."""
    wrong = Frame(Kind.HELLO, 0, pack(Hello("attacked", "2", b"nobody")))
    for _ in range(20):
        for address in whole.addresses:
            with dial(address) as sock:
                prove(sock)
                say(sock, wire(wrong))
    whole.check()
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


# Newcomers that take their time, and too many of them.


@pytest.mark.parametrize("said", [b"", GREETING[:5], GREETING], ids=["nothing", "little", "a greeting"])
def test_newcomers_that_take_their_time_do_not_stop_honest_peers(target: Target, said: bytes) -> None:
    for address in target.addresses:
        with contextlib.ExitStack() as stack:
            crowd = []
            for _ in range(300):
                crowd.append(stack.enter_context(dial(address)))
                crowd[-1].sendall(said)
            target.check()
            for sock in crowd[:40]:
                read_to_end(sock)  # the oldest have been sent away
            target.check()
    target.check()


def test_a_burst_of_newcomers_does_not_crowd_out_an_honest_one_before_it_is_heard() -> None:
    """All that follows has arrived when the endpoint is polled for the first time."""
    endpoint = SocketEndpoint(secret=SECRET, unix=True, bind="127.0.0.1")
    with contextlib.ExitStack() as stack:
        stack.callback(endpoint.close)
        for address in endpoint.addresses:
            honest = stack.enter_context(dial(address))
            handshake = ClientHandshake(SECRET)
            honest.sendall(handshake.start())
            for _ in range(400):
                stack.enter_context(dial(address))
            with Pollers(endpoint):
                while not handshake.done:
                    honest.sendall(handshake.feed(read_exactly(honest, handshake.wanted)))


# Honest clients and servers that are not.


def serve_once(listener: socket.socket, answer: Callable[[socket.socket], None]) -> None:
    sock, _ = listener.accept()
    with sock:
        sock.settimeout(PATIENCE)
        with contextlib.suppress(ConnectionError):
            answer(sock)


def noise(sock: socket.socket) -> None:
    read_exactly(sock, len(GREETING))
    sock.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
    read_to_end(sock)


def wrong_secret(sock: socket.socket) -> None:
    read_exactly(sock, len(GREETING))
    sock.sendall(GREETING)
    read_exactly(sock, PROOF)
    sock.sendall(b"\x01" + bytes(PROOF))
    read_to_end(sock)


def refusing(sock: socket.socket) -> None:
    read_exactly(sock, len(GREETING))
    sock.sendall(GREETING)
    read_exactly(sock, PROOF)
    sock.sendall(ServerHandshake.refusal)
    read_to_end(sock)


def leaving(sock: socket.socket) -> None:
    read_exactly(sock, len(GREETING))


def mirror(sock: socket.socket) -> None:
    sock.sendall(read_exactly(sock, len(GREETING)))
    sock.sendall(b"\x01" + read_exactly(sock, PROOF))
    read_to_end(sock)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (noise, AuthenticationError),
        (wrong_secret, AuthenticationError),
        (refusing, AuthenticationError),
        (mirror, AuthenticationError),
        (leaving, ConnectionError),
    ],
)
def test_connecting_to_an_impostor(answer: Callable[[socket.socket], None], error: type[Exception]) -> None:
    with (
        contextlib.closing(SocketEndpoint(secret=SECRET)) as client,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        serving = Aside(lambda: serve_once(listener, answer))
        with pytest.raises(error):
            client.connect(f"tcp:127.0.0.1:{listener.getsockname()[1]}", timeout=PATIENCE)
        serving.result()
        assert client.poll(0) is None


def test_connecting_to_someone_who_never_answers() -> None:
    with (
        contextlib.closing(SocketEndpoint(secret=SECRET)) as client,
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(ConnectionError),
    ):
        client.connect(f"tcp:127.0.0.1:{listener.getsockname()[1]}", timeout=0.05)
