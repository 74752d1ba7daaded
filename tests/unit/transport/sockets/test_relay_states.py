"""Legs that a relay awaits, and bytes on their way: whatever happens in whatever order."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from backhaul._transport.sockets.relay_legs import Leg
from backhaul._transport.sockets.relay_states import AWAIT_SECONDS, HALF_CLOSED_SECONDS, AwaitedLegs, RelayedFlows

MOST = 3


class Legs(RuleBasedStateMachine):
    """The model: each offer is awaited, half arrived, carried, or over; a leg is good for one arrival."""

    def __init__(self) -> None:
        super().__init__()
        self.legs = AwaitedLegs(MOST)
        self.now = 0.0
        self.made = 0
        self.offers: dict[int, tuple[float, list[bytes]]] = {}  # number -> until, and which of its legs have come
        self.over: list[bytes] = []
        self.carried = 0

    def number(self, offer: int, end: int) -> bytes:
        return f"{offer}/{end}".encode()

    @rule()
    def offer(self) -> None:
        one, other = (Leg(self.number(self.made, end), bytes([end])) for end in (0, 1))
        taken = self.legs.offer(one, other, self.now)
        assert taken == (len(self.offers) + self.carried < MOST)
        if taken:
            self.offers[self.made] = self.now + AWAIT_SECONDS, []
        self.made += 1

    @precondition(lambda self: self.offers)
    @rule(data=st.data(), end=st.integers(0, 1))
    def arrive(self, data: st.DataObject, end: int) -> None:
        offer = data.draw(st.sampled_from(sorted(self.offers)))
        number, (_, come) = self.number(offer, end), self.offers[offer]
        found = self.legs.arrive(number)
        if number in come:
            assert found is None, "each leg comes once"
        elif not come:
            assert found == b""
            assert self.legs.key_of(number) is None, "its key is used"
            come.append(number)
        else:
            assert found == come[0], "it is joined with the other leg of the same offer"
            self.over += [number, *come]
            del self.offers[offer]
            self.carried += 1

    @rule(number=st.sampled_from([b"never", b"0/2"]))
    def arrive_from_nowhere(self, number: bytes) -> None:
        assert self.legs.arrive(number) is None

    @precondition(lambda self: self.over)
    @rule(data=st.data())
    def arrive_again(self, data: st.DataObject) -> None:
        assert self.legs.arrive(data.draw(st.sampled_from(self.over))) is None

    @precondition(lambda self: self.carried)
    @rule()
    def end(self) -> None:
        self.legs.end()
        self.carried -= 1

    @precondition(lambda self: self.offers)
    @rule(data=st.data(), end=st.integers(0, 1))
    def withdraw(self, data: st.DataObject, end: int) -> None:
        offer = data.draw(st.sampled_from(sorted(self.offers)))
        assert self.legs.withdraw(self.number(offer, end)) == self.offers.pop(offer)[1]
        self.over += [self.number(offer, 0), self.number(offer, 1)]

    @rule(seconds=st.sampled_from([0.0, 1.0, AWAIT_SECONDS / 2, AWAIT_SECONDS]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        late = {offer: come for offer, (until, come) in self.offers.items() if until <= self.now}
        assert sorted(self.legs.expire(self.now)) == sorted(number for come in late.values() for number in come)
        for offer in late:
            del self.offers[offer]
            self.over += [self.number(offer, 0), self.number(offer, 1)]

    @invariant()
    def limits_and_keys(self) -> None:
        assert len(self.legs) == len(self.offers)
        assert self.legs.carried == self.carried
        for offer, (_, come) in self.offers.items():
            for end in (0, 1):
                number = self.number(offer, end)
                assert self.legs.key_of(number) == (None if number in come else bytes([end]))
        assert all(self.legs.key_of(number) is None for number in self.over)


TestLegs = Legs.TestCase
TestLegs.settings = settings(max_examples=30, stateful_step_count=40)


@given(st.lists(st.binary(min_size=1, max_size=20), max_size=10), st.lists(st.integers(1, 7), min_size=1))
def test_bytes_pass_in_order_and_at_most_one_read_is_held(reads: list[bytes], writes: list[int]) -> None:
    flows = RelayedFlows(0.0)
    flow, found, sizes = flows.flows[0], b"", writes * 200
    for data in [*reads, b""]:
        assert flows.interest(0) == (True, False)
        flow.take(data)
        while flow.waiting:
            assert not flow.wants, "the source has to wait"
            assert flows.interest(1)[1]
            assert not flow.to_finish
            count = min(sizes.pop(), len(flow.waiting))
            found += flow.waiting[:count]
            flow.give(count)
    assert found == b"".join(reads)
    assert flow.to_finish, "the sink is told after all bytes"
    flow.finished = True
    assert not flow.to_finish
    assert flows.interest(0) == (False, False)
    assert flows.interest(1)[0], "the other direction goes on"
    assert not flows.over


def test_a_half_closed_connection_is_given_up_when_nothing_moves() -> None:
    flows = RelayedFlows(0.0)
    assert not flows.stale(1e6), "while both directions are open, the ends decide"
    flows.flows[1].take(b"")
    flows.moved(5.0)
    assert not flows.stale(5.0 + HALF_CLOSED_SECONDS - 0.1)
    assert flows.stale(5.0 + HALF_CLOSED_SECONDS)
    flows.moved(14.0)
    assert not flows.stale(20.0)
    for flow in flows.flows:
        if not flow.ended:
            flow.take(b"")
        flow.finished = True
    assert flows.over
