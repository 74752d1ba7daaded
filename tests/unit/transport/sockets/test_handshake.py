"""The handshake proves both sides to each other, reads no byte too many, and tells a stranger nothing."""

from __future__ import annotations

import hmac
import itertools
from collections.abc import Callable, Iterable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul._transport.sockets.handshake import MAGIC, VERSION, ClientHandshake, ServerHandshake
from backhaul.errors import AuthenticationError

SECRET = b"the secret of this cluster"
GREETING = len(MAGIC) + 1 + 32
PROOF = 32
VERDICT = 1 + PROOF

Side = ClientHandshake | ServerHandshake


def feed(side: Side, data: bytes, sizes: Iterable[int]) -> bytes:
    """Hand ``data`` over in pieces of those sizes, but never more than the side wants."""
    pieces = iter(sizes)
    answer = b""
    while data:
        count = min(next(pieces), side.wanted)
        assert count > 0, "it wants no more, but there is more"
        answer += side.feed(data[:count])
        data = data[count:]
    return answer


def whole() -> Iterator[int]:
    return itertools.repeat(1 << 20)


def greet(secret: bytes = SECRET) -> tuple[ClientHandshake, ServerHandshake, bytes]:
    """A client and a server that have greeted each other, and the client's proof."""
    client, server = ClientHandshake(secret), ServerHandshake(secret)
    proof = feed(client, feed(server, client.start(), whole()), whole())
    return client, server, proof


def greeting(magic: bytes = MAGIC, version: int = VERSION) -> bytes:
    return magic + bytes([version]) + bytes(32)


def expect_refusal(side: Side, data: bytes) -> None:
    with pytest.raises(AuthenticationError):
        feed(side, data, whole())
    assert not side.done


# Success, however the bytes are split.


def run(client_sizes: Callable[[], Iterator[int]], server_sizes: Callable[[], Iterator[int]]) -> None:
    client, server = ClientHandshake(SECRET), ServerHandshake(SECRET)
    first = client.start()
    assert len(first) == GREETING
    answer = feed(server, first, server_sizes())
    assert len(answer) == GREETING
    assert not server.done
    proof = feed(client, answer, client_sizes())
    assert len(proof) == PROOF
    assert not client.done
    verdict = feed(server, proof, server_sizes())
    assert len(verdict) == VERDICT
    assert server.done
    assert feed(client, verdict, client_sizes()) == b""
    assert client.done


def test_both_sides_are_done_when_both_know_the_secret() -> None:
    run(whole, whole)


def test_byte_by_byte() -> None:
    run(lambda: itertools.repeat(1), lambda: itertools.repeat(1))


@pytest.mark.parametrize("first", range(1, GREETING))
def test_every_split_in_two(first: int) -> None:
    def sizes() -> Iterator[int]:
        return itertools.chain([first], whole())

    run(sizes, sizes)


@given(st.lists(st.integers(1, 50), min_size=1), st.lists(st.integers(1, 50), min_size=1))
def test_any_split(client: list[int], server: list[int]) -> None:
    run(lambda: itertools.cycle(client), lambda: itertools.cycle(server))


def test_nothing_is_answered_before_a_piece_is_whole() -> None:
    client, server = ClientHandshake(SECRET), ServerHandshake(SECRET)
    first = client.start()
    for index in range(GREETING - 1):
        assert server.feed(first[index : index + 1]) == b""
    answer = server.feed(first[-1:])
    for index in range(GREETING - 1):
        assert client.feed(answer[index : index + 1]) == b""
    assert client.feed(answer[-1:]) != b""


# What a side asks for is bounded, and never reaches into the frames.


def test_wanted_counts_down_through_fixed_sizes() -> None:
    client, server = ClientHandshake(SECRET), ServerHandshake(SECRET)
    wanted: dict[Side, list[int]] = {client: [], server: []}

    def trickle(side: Side, data: bytes) -> bytes:
        answer = b""
        for byte in data:
            wanted[side].append(side.wanted)
            answer += side.feed(bytes([byte]))
        return answer

    trickle(client, trickle(server, trickle(client, trickle(server, client.start()))))
    assert client.done
    assert server.done
    assert wanted[server] == [*range(GREETING, 0, -1), *range(PROOF, 0, -1)]
    assert wanted[client] == [*range(GREETING, 0, -1), *range(VERDICT, 0, -1)]
    assert client.wanted == server.wanted == 0


@given(st.binary(max_size=300), st.booleans())
def test_random_input_is_never_accepted_and_never_asked_for_much(noise: bytes, as_server: bool) -> None:
    side: Side = ServerHandshake(SECRET) if as_server else ClientHandshake(SECRET)
    try:
        while noise:
            assert 0 < side.wanted <= GREETING
            count = min(side.wanted, len(noise))
            side.feed(noise[:count])
            noise = noise[count:]
    except AuthenticationError:
        pass
    assert not side.done


# Secrets that differ.


@pytest.mark.parametrize("wrong", [b"", b"another secret", SECRET + b"x", SECRET[:-1]])
def test_a_client_with_another_secret_is_refused(wrong: bytes) -> None:
    client, server = ClientHandshake(wrong), ServerHandshake(SECRET)
    proof = feed(client, feed(server, client.start(), whole()), whole())
    expect_refusal(server, proof)
    expect_refusal(client, ServerHandshake.refusal)


def test_a_server_with_another_secret_is_refused() -> None:
    """It cannot check the client's proof, so it says yes to anything, and proves what it can."""
    client = ClientHandshake(SECRET)
    nonces = client.start()[-32:] + bytes(32)
    feed(client, greeting(), whole())
    expect_refusal(client, b"\x01" + hmac.digest(b"another secret", b"backhaul/1/server/" + nonces, "sha256"))


@given(st.integers(0, VERDICT * 8 - 1))
def test_a_verdict_with_one_wrong_bit_is_refused(bit: int) -> None:
    client, server, proof = greet()
    verdict = bytearray(feed(server, proof, whole()))
    verdict[bit // 8] ^= 1 << bit % 8
    expect_refusal(client, bytes(verdict))


@given(st.integers(0, PROOF * 8 - 1))
def test_a_proof_with_one_wrong_bit_is_refused(bit: int) -> None:
    _, server, proof = greet()
    wrong = bytearray(proof)
    wrong[bit // 8] ^= 1 << bit % 8
    expect_refusal(server, bytes(wrong))


# Proofs that were made for something else.


def test_a_proof_cannot_be_replayed() -> None:
    client, server, proof = greet()
    feed(server, proof, whole())
    again = ServerHandshake(SECRET)
    feed(again, client.start(), whole())  # the very greeting that belongs to the proof
    expect_refusal(again, proof)


def test_a_verdict_cannot_be_replayed() -> None:
    client, server = ClientHandshake(SECRET), ServerHandshake(SECRET)
    answer = feed(server, client.start(), whole())
    verdict = feed(server, feed(client, answer, whole()), whole())
    again = ClientHandshake(SECRET)
    feed(again, answer, whole())
    expect_refusal(again, verdict)


def test_a_client_does_not_fall_for_its_own_bytes() -> None:
    client = ClientHandshake(SECRET)
    proof = feed(client, client.start(), whole())  # its own greeting, sent back
    expect_refusal(client, b"\x01" + proof)


def test_a_server_does_not_fall_for_its_own_proof() -> None:
    """Two connections to one server, and what it says on the first sent back on the second."""
    client, first, proof = greet()
    verdict = feed(first, proof, whole())
    second = ServerHandshake(SECRET)
    feed(second, client.start(), whole())
    expect_refusal(second, verdict[1:])


def test_a_client_cannot_be_made_to_prove_for_another_role() -> None:
    """A server that knows no secret lets a client prove, and uses that proof as its own towards the client."""
    client, _, proof = greet()
    expect_refusal(client, b"\x01" + proof)


def test_nonces_are_never_the_same() -> None:
    firsts = {ClientHandshake(SECRET).start() for _ in range(200)}
    answers = {feed(ServerHandshake(SECRET), first, whole()) for first in firsts}
    assert len(firsts | answers) == 400


# Greetings that are none.


@pytest.mark.parametrize("kind", [ClientHandshake, ServerHandshake])
@pytest.mark.parametrize("magic", [b"\0" * 8, b"backhaul", b"BACKHAUK", b"GET / HT"])
def test_another_protocol_is_refused(kind: type[Side], magic: bytes) -> None:
    expect_refusal(kind(SECRET), greeting(magic=magic))


@pytest.mark.parametrize("kind", [ClientHandshake, ServerHandshake])
@pytest.mark.parametrize("version", [0, VERSION + 1, 255])
def test_another_version_is_refused_by_number(kind: type[Side], version: int) -> None:
    with pytest.raises(AuthenticationError, match=rf"\b{version}\b"):
        feed(kind(SECRET), greeting(version=version), whole())


# What a stranger learns.


def test_a_server_reveals_nothing_before_the_client_has_proven_itself() -> None:
    """Until then it says only its magic, its version and fresh random bytes, whatever the secret."""
    server = ServerHandshake(SECRET)
    answer = feed(server, greeting(), whole())
    assert answer == MAGIC + bytes([VERSION]) + server._nonce
    expect_refusal(server, bytes(PROOF))
    assert ServerHandshake.refusal == bytes(VERDICT)


def test_a_refusal_is_the_same_for_everyone() -> None:
    assert ServerHandshake(b"one").refusal == ServerHandshake(b"another").refusal


def test_the_proofs_are_what_the_protocol_says() -> None:
    """docs/protocol.md, byte by byte, so that another implementation would be understood."""
    client, server = ClientHandshake(SECRET), ServerHandshake(SECRET)
    first = client.start()
    second = feed(server, first, whole())
    nonces = first[-32:] + second[-32:]
    proof = feed(client, second, whole())
    assert proof == hmac.digest(SECRET, b"backhaul/1/client/" + nonces, "sha256")
    assert feed(server, proof, whole()) == b"\x01" + hmac.digest(SECRET, b"backhaul/1/server/" + nonces, "sha256")


def test_a_client_of_another_version_is_told_ours() -> None:
    server = ServerHandshake(SECRET)
    with pytest.raises(AuthenticationError, match="version 9"):
        server.feed(greeting(version=9))
    client = ClientHandshake(SECRET)
    client.start()
    answer = server.last_word
    assert len(answer) == client.wanted
    client.feed(answer)  # of the same version, so that there is nothing to complain of; another would say so


def test_strangers_and_those_without_the_secret_are_refused_in_the_same_words() -> None:
    server = ServerHandshake(SECRET)
    with pytest.raises(AuthenticationError, match="Backhaul"):
        server.feed(greeting(magic=b"GET / HT"))
    assert server.last_word == ServerHandshake.refusal
    server = ServerHandshake(SECRET)
    server.feed(greeting())
    with pytest.raises(AuthenticationError, match="secret"):
        server.feed(bytes(32))
    assert server.last_word == ServerHandshake.refusal


def test_who_should_have_spoken_tls_is_told() -> None:
    client = ClientHandshake(SECRET)
    with pytest.raises(AuthenticationError, match="takes TLS only"):
        client.feed(ServerHandshake.wants_tls)
    with pytest.raises(AuthenticationError, match="speaks TLS"):
        ServerHandshake(SECRET).feed(b"\x16\x03\x01" + bytes(38))


# Lanes.


def run_lane(ticket: bytes | None, expected: list[bytes]) -> tuple[ClientHandshake, ServerHandshake]:
    client, server = ClientHandshake(SECRET, ticket), ServerHandshake(SECRET, expected)
    proof = feed(client, feed(server, client.start(), whole()), whole())
    feed(client, feed(server, proof, whole()), whole())
    return client, server


def test_a_lane_proves_that_it_knows_its_ticket() -> None:
    client, server = run_lane(b"two", [b"one", b"two"])
    assert client.done
    assert server.ticket == b"two"
    assert run_lane(None, [b"one"])[1].ticket is None


def test_a_ticket_that_is_not_expected() -> None:
    for expected in ([], [b"one"]):
        with pytest.raises(AuthenticationError):
            run_lane(b"two", expected)


def test_a_ticket_does_not_replace_the_secret() -> None:
    client, server = ClientHandshake(b"another", b"one"), ServerHandshake(SECRET, [b"one"])
    proof = feed(client, feed(server, client.start(), whole()), whole())
    expect_refusal(server, proof)
