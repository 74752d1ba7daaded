"""The handshake of a leg: both sides prove that they know the key of the leg, and nobody else gets through."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul._transport.sockets.handshake import ClientHandshake
from backhaul._transport.sockets.relay_legs import (
    REFUSAL,
    Leg,
    LegHandshake,
    RelayHandshake,
    begins_leg,
    new_leg,
)
from backhaul.errors import AuthenticationError

Side = LegHandshake | RelayHandshake


def feed(side: Side, data: bytes, sizes: Iterable[int] = (1 << 20,)) -> bytes:
    pieces, answer = itertools.cycle(sizes), b""
    while data:
        count = min(next(pieces), side.wanted)
        assert count > 0, "it wants no more, but there is more"
        answer += side.feed(data[:count])
        data = data[count:]
    return answer


def relay_of(*legs: Leg) -> RelayHandshake:
    return RelayHandshake({leg.number: leg.key for leg in legs}.get)


@given(st.lists(st.integers(1, 50), min_size=1), st.lists(st.integers(1, 50), min_size=1))
def test_both_sides_are_done_however_the_bytes_are_split(end_sizes: list[int], relay_sizes: list[int]) -> None:
    leg = new_leg()
    end, relay = LegHandshake(leg), relay_of(leg, new_leg())
    proof = feed(end, feed(relay, end.start(), relay_sizes), end_sizes)
    assert not relay.done
    assert feed(relay, proof, relay_sizes) == b"", "the verdict has to wait for the other end"
    assert relay.done
    assert relay.number == leg.number
    assert not end.done
    assert feed(end, relay.verdict, end_sizes) == b""
    assert end.done


def test_the_first_byte_says_what_a_connection_is() -> None:
    assert begins_leg(LegHandshake(new_leg()).start()[:1])
    assert not begins_leg(ClientHandshake(b"secret").start()[:1])
    assert not begins_leg(b"\x16")  # TLS


def refused(relay: RelayHandshake, end: LegHandshake) -> None:
    answer = feed(relay, end.start())
    with pytest.raises(AuthenticationError):
        feed(relay, feed(end, answer))
    assert not relay.done
    with pytest.raises(ConnectionRefusedError):
        feed(end, REFUSAL)
    assert not end.done


def test_wrong_keys_and_legs_that_are_not_awaited_are_refused() -> None:
    leg, other = new_leg(), new_leg()
    refused(relay_of(leg), LegHandshake(Leg(leg.number, other.key)))
    refused(relay_of(other), LegHandshake(leg))
    refused(relay_of(leg, other), LegHandshake(Leg(other.number, leg.key)))


def feed_until_refused(side: Side, noise: bytes) -> None:
    try:
        while side.wanted:
            count = side.wanted
            side.feed(noise[:count])
            noise = noise[count:]
    except (AuthenticationError, ConnectionRefusedError):
        return
    raise AssertionError("noise was accepted")


@given(st.binary(max_size=200))
def test_noise_is_never_accepted(noise: bytes) -> None:
    leg = new_leg()
    relay, end = relay_of(leg), LegHandshake(leg)
    feed_until_refused(relay, noise + bytes(200))
    feed_until_refused(end, noise + bytes(200))
    assert not relay.done
    assert not end.done


def test_a_proof_cannot_be_replayed_or_sent_back() -> None:
    leg = new_leg()
    end, relay, again = LegHandshake(leg), relay_of(leg), relay_of(leg)
    proof = feed(end, feed(relay, end.start()))
    feed(relay, proof)
    feed(again, end.start())
    with pytest.raises(AuthenticationError):
        feed(again, proof)
    with pytest.raises(ConnectionRefusedError):
        feed(end, b"\x01" + proof)


def test_a_leg_hides_its_key() -> None:
    leg = new_leg()
    assert leg.key.hex() not in repr(leg)
    assert leg.key not in LegHandshake(leg).start()
