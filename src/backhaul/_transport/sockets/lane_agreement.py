"""How the two ends of a channel agree on its lanes. Pure: control frames in, control frames out.

    INVITE  accepting side   please ask for lanes; I have large frames
    ASK     connecting side  number: how many lanes to open
    TICKETS accepting side   number: how many it may open; body: 32 bytes, from which the tickets are made
    END     either side      number of a large frame: what follows does not overtake it

The connecting side opens lanes, since it knows an address of the other. Each proves that it knows its ticket
(``handshake``). A ticket is good for one connection.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from backhaul._options import MOST_LANES
from backhaul._wire.frames import control_frame
from backhaul.errors import ProtocolError

INVITE, ASK, TICKETS, END = 4, 5, 6, 7  # kinds of control frames
_SEED_BYTES = 32


@dataclass(frozen=True, slots=True)
class Agreed:
    """What to do now.

    Attributes:
        answer: What to send.
        tickets: Of the lanes: to open, at the side that connects; to expect, at the other.
        refused: There will be no lanes.
    """

    answer: bytes = b""
    tickets: tuple[bytes, ...] = ()
    refused: bool = False


class LaneAgreement:
    """One side's part of the agreement.

    Args:
        connects: Whether this side has opened the channel.
        most: How many lanes this side wants at most.
    """

    def __init__(self, *, connects: bool, most: int) -> None:
        self._connects = connects
        self._most = most if most > 1 else 0
        self._wanted = False  # this side has said that it wants lanes
        self._asked = False
        self._answered = False

    def want(self) -> bytes:
        """This side has a large frame. Returns what to send, if anything."""
        if self._wanted or self._asked or not self._most:
            return b""
        self._wanted = True
        return self._ask() if self._connects else control_frame(INVITE, 0)

    def _ask(self) -> bytes:
        self._asked = True
        return control_frame(ASK, self._most)

    def received(self, kind: int, number: int, body: bytes) -> Agreed:
        """A control frame has come. Raises ``ProtocolError`` if it must not come now."""
        if kind == INVITE and self._connects:
            return Agreed(b"" if self._asked else self._ask(), refused=not self._most)
        if kind == ASK and not self._connects and not self._asked and number <= MOST_LANES:
            self._asked = True
            count = min(number, self._most)
            seed = secrets.token_bytes(_SEED_BYTES) if count else b""
            return Agreed(control_frame(TICKETS, count, seed), _tickets(seed, count), refused=not count)
        if kind == TICKETS and self._connects and self._asked and not self._answered:
            self._answered = True
            if number <= self._most and len(body) == (_SEED_BYTES if number else 0):
                return Agreed(tickets=_tickets(body, number), refused=not number)
        raise ProtocolError(f"unexpected control frame of kind {kind}, number {number}, {len(body)} bytes")


def _tickets(seed: bytes, count: int) -> tuple[bytes, ...]:
    return tuple(seed + bytes([index]) for index in range(count))
