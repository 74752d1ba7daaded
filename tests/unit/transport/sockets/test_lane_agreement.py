"""The two sides of a channel agree on lanes, whichever asks first, and refuse what must not come."""

from __future__ import annotations

import pytest

from backhaul._transport.sockets.lane_agreement import ASK, END, INVITE, TICKETS, LaneAgreement
from backhaul._wire.frames import HEADER, HEADER_BYTES
from backhaul.errors import ProtocolError


def taken_apart(control: bytes) -> tuple[int, int, bytes]:
    _, _, kind, _, _, _, number, _ = HEADER.unpack_from(control)
    return kind, number, control[HEADER_BYTES:]


def agree(connecting: LaneAgreement, accepting: LaneAgreement, control: bytes, by_connecting: bool) -> list[int]:
    """Carry control frames to and fro; returns how many lanes each side opens or expects."""
    counts = []
    sides = [accepting, connecting] if by_connecting else [connecting, accepting]
    tickets: tuple[bytes, ...] = ()
    while control:
        agreed = sides[0].received(*taken_apart(control))
        if agreed.tickets or agreed.refused:
            assert not tickets or tickets == agreed.tickets
            tickets = agreed.tickets
            counts.append(len(tickets))
        control = agreed.answer
        sides.reverse()
    assert len(set(tickets)) == len(tickets)
    return counts


@pytest.mark.parametrize(("connecting", "accepting", "lanes"), [(4, 4, 4), (4, 2, 2), (2, 16, 2), (4, 1, 0)])
def test_the_side_that_connects_asks(connecting: int, accepting: int, lanes: int) -> None:
    near, far = LaneAgreement(connects=True, most=connecting), LaneAgreement(connects=False, most=accepting)
    assert agree(near, far, near.want(), by_connecting=True) == [lanes, lanes]
    assert near.want() == far.want() == b""  # once is enough


@pytest.mark.parametrize(("connecting", "accepting", "counts"), [(4, 3, [3, 3]), (1, 3, [0, 0, 0])])
def test_the_side_that_accepts_invites(connecting: int, accepting: int, counts: list[int]) -> None:
    near, far = LaneAgreement(connects=True, most=connecting), LaneAgreement(connects=False, most=accepting)
    assert agree(near, far, far.want(), by_connecting=False) == counts


def test_both_at_once() -> None:
    near, far = LaneAgreement(connects=True, most=2), LaneAgreement(connects=False, most=2)
    ask, invite = near.want(), far.want()
    assert near.received(*taken_apart(invite)).answer == b""
    assert agree(near, far, ask, by_connecting=True) == [2, 2]


def test_a_side_without_lanes_wants_none() -> None:
    assert LaneAgreement(connects=True, most=1).want() == b""


@pytest.mark.parametrize(
    ("connects", "kind", "number", "body"),
    [
        (True, TICKETS, 1, bytes(32)),  # nobody has asked
        (True, ASK, 1, b""),
        (False, INVITE, 0, b""),
        (False, TICKETS, 1, bytes(32)),
        (False, ASK, 65, b""),
        (False, END, 1, b""),
        (False, 99, 0, b""),
    ],
)
def test_what_must_not_come(connects: bool, kind: int, number: int, body: bytes) -> None:
    with pytest.raises(ProtocolError):
        LaneAgreement(connects=connects, most=4).received(kind, number, body)


@pytest.mark.parametrize(("number", "body"), [(5, bytes(32)), (2, bytes(31)), (0, bytes(32))])
def test_tickets_that_do_not_fit(number: int, body: bytes) -> None:
    near = LaneAgreement(connects=True, most=4)
    near.want()
    with pytest.raises(ProtocolError):
        near.received(TICKETS, number, body)


def test_asking_or_answering_twice() -> None:
    far = LaneAgreement(connects=False, most=4)
    far.received(ASK, 1, b"")
    with pytest.raises(ProtocolError):
        far.received(ASK, 1, b"")
    near = LaneAgreement(connects=True, most=4)
    near.want()
    near.received(TICKETS, 1, bytes(32))
    with pytest.raises(ProtocolError):
        near.received(TICKETS, 1, bytes(32))
