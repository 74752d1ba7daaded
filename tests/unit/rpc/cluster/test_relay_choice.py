"""Which members are asked for a worker that cannot be dialed: it and whoever looks for it come to one result."""

from __future__ import annotations

import collections

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from backhaul._rpc.cluster.membership_table import WorkerRecord
from backhaul._rpc.cluster.relay_choice import ANCHORS, MAX_ASKED, anchors_of, asked_for


def member(number: int, listens: bool, host: str, tcp: bool) -> WorkerRecord:
    addresses = ("unix:@x", f"tcp:10.0.0.{number}:7") if tcp and listens else ("unix:@x",)
    return WorkerRecord(number, f"w{number}", f"life{number}", host, addresses, "", 0, listens=listens)


members = st.lists(st.tuples(st.booleans(), st.sampled_from("ab"), st.booleans()), min_size=2, max_size=12).map(
    lambda drawn: [member(number, *each) for number, each in enumerate(drawn)]
)


@given(members, st.randoms())
def test_all_members_know_the_same_order(known: list[WorkerRecord], random: object) -> None:
    hidden = member(99, listens=False, host="c", tcp=False)
    order = anchors_of(hidden, known)
    random.shuffle(known)  # type: ignore[attr-defined]
    assert anchors_of(hidden, known) == order
    assert {each.id for each in order} == {each.id for each in known if each.listens and len(each.addresses) == 2}, (
        "those that it can dial, and no others"
    )
    without = [each for each in known if each is not order[0]] if order else known
    assert anchors_of(hidden, without) == order[1:], "the loss of one changes nothing about the others"


@given(members, st.data())
def test_who_looks_for_it_asks_where_it_is(known: list[WorkerRecord], data: st.DataObject) -> None:
    hidden = member(99, listens=False, host="c", tcp=False)
    own = data.draw(st.sampled_from(known))
    lost = data.draw(st.sets(st.sampled_from([each.id for each in known])))
    asked = asked_for(hidden, own, known, lambda each: each.id in lost)
    order = [each.id for each in anchors_of(hidden, known) if each is not own]
    assert [each.id for each in asked] == [
        *(each for each in order if each not in lost),
        *(each for each in order if each in lost),
    ][:MAX_ASKED]


def test_workers_are_spread_over_the_members() -> None:
    public = [member(number, listens=True, host="a", tcp=True) for number in range(8)]
    found: collections.Counter[int] = collections.Counter()
    for number in range(400):
        hidden = msgspec.structs.replace(member(99, listens=False, host="c", tcp=False), incarnation=f"hidden{number}")
        found.update(each.id for each in anchors_of(hidden, public)[:ANCHORS])
    assert set(found) == set(range(8))
    assert max(found.values()) < 2 * min(found.values())
