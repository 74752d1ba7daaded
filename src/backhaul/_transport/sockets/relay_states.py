"""What a relay knows of the connections that it carries: which legs it awaits, and which bytes are on their way. Pure:
no I/O, no threads, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from backhaul._transport.sockets.relay_legs import Leg

AWAIT_SECONDS = 10.0
"""How long a relay awaits the two legs of a connection."""

HALF_CLOSED_SECONDS = 10.0
"""How long one direction may go on without a byte after the other has ended."""


@dataclass(slots=True)
class _Offer:
    """A connection whose legs are awaited."""

    legs: dict[bytes, bytes]  # by number: the keys
    until: float
    arrived: bytes = b""  # the number of the leg that has come first


class AwaitedLegs:
    """The legs that a relay awaits. Each is good for one connection, and two belong together.

    Args:
        most: How many connections there may be, awaited and carried.

    Attributes:
        carried: How many connections have both legs and have not ended.

    Example:
        >>> legs = AwaitedLegs(most=1)
        >>> one, other = Leg(b"1", b"key"), Leg(b"2", b"key")
        >>> legs.offer(one, other, now=0.0), legs.offer(Leg(b"3", b""), Leg(b"4", b""), now=0.0)
        (True, False)
        >>> legs.arrive(b"1"), legs.arrive(b"2"), legs.carried
        (b'', b'1', 1)
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._offers: dict[bytes, _Offer] = {}  # by the numbers of both legs
        self.carried = 0

    def __len__(self) -> int:
        return len({id(offer) for offer in self._offers.values()})

    def offer(self, one: Leg, other: Leg, now: float) -> bool:
        """Await two legs of one connection. False: there are too many connections."""
        if len(self) + self.carried >= self._most:
            return False
        offer = _Offer({one.number: one.key, other.number: other.key}, now + AWAIT_SECONDS)
        self._offers[one.number] = self._offers[other.number] = offer
        return True

    def key_of(self, number: bytes) -> bytes | None:
        """The key of a leg that has not come; None: this leg is not awaited."""
        offer = self._offers.get(number)
        return None if offer is None or offer.arrived == number else offer.legs[number]

    def arrive(self, number: bytes) -> bytes | None:
        """A leg has come and has shown its key. Returns the number of the leg to join it with; empty: that one has
        not come yet; None: this leg is not awaited.
        """
        offer = self._offers.get(number)
        if offer is None or offer.arrived == number:
            return None
        if not offer.arrived:
            offer.arrived = number
            return b""
        self._remove(offer)
        self.carried += 1
        return offer.arrived

    def expire(self, now: float) -> list[bytes]:
        """Give up the connections whose time is over. Returns the numbers of their legs that had come."""
        late = [offer for offer in self._offers.values() if offer.until <= now]
        for offer in late:
            self._remove(offer)
        return list(dict.fromkeys(offer.arrived for offer in late if offer.arrived))

    def withdraw(self, number: bytes) -> list[bytes]:
        """Give up a connection because one of its legs has failed. As ``expire``."""
        offer = self._offers.get(number)
        if offer is None:
            return []
        self._remove(offer)
        return [offer.arrived] if offer.arrived else []

    def end(self) -> None:
        """A connection that was carried has ended."""
        self.carried -= 1

    def _remove(self, offer: _Offer) -> None:
        for number in offer.legs:
            self._offers.pop(number, None)


class ByteFlow:
    """One direction of a relayed connection. It holds what one read has brought, and reads no more before all of that
    is written: a sender that is faster than the receiver has to wait.

    Attributes:
        waiting: Bytes that were read and not yet written.
        ended: The source sends no more.
        finished: The sink was told so.
    """

    __slots__ = ("ended", "finished", "waiting")

    def __init__(self) -> None:
        self.waiting: memoryview = memoryview(b"")
        self.ended = False
        self.finished = False

    @property
    def wants(self) -> bool:
        """Whether to read from the source."""
        return not self.ended and not self.waiting

    @property
    def to_finish(self) -> bool:
        """Whether to tell the sink that the source sends no more."""
        return self.ended and not self.waiting and not self.finished

    def take(self, data: bytes) -> None:
        """Bytes were read from the source; none: it sends no more."""
        assert self.wants
        if data:
            self.waiting = memoryview(data)
        else:
            self.ended = True

    def give(self, count: int) -> None:
        """The sink has taken so many of the bytes that wait."""
        self.waiting = self.waiting[count:]


class RelayedFlows:
    """Both directions of a relayed connection, and when it is over.

    An end that closes its half is told on to the other; the opposite direction goes on until it ends too, or until no
    byte has moved for ``HALF_CLOSED_SECONDS``.

    Attributes:
        flows: The direction from end 0 to end 1, and the opposite one.
    """

    def __init__(self, now: float) -> None:
        self.flows = ByteFlow(), ByteFlow()
        self._moved = now  # when bytes moved last, or a direction ended

    def interest(self, end: int) -> tuple[bool, bool]:
        """Whether to wait until an end can be read, and until it can be written."""
        return self.flows[end].wants, bool(self.flows[1 - end].waiting)

    def moved(self, now: float) -> None:
        """Bytes were read or written, or a direction has ended."""
        self._moved = now

    @property
    def over(self) -> bool:
        """Whether both directions have ended."""
        return all(flow.finished for flow in self.flows)

    def stale(self, now: float) -> bool:
        """Whether to give up: one direction has ended, and the other does nothing."""
        return any(flow.ended for flow in self.flows) and now >= self._moved + HALF_CLOSED_SECONDS
