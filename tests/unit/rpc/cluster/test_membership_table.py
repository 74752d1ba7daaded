"""Two tables that see the same records end with the same members, whatever the order."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul._rpc.cluster.departure import seal_of, secret_of
from backhaul._rpc.cluster.membership_table import Admit, MembershipTable, Refusal, WorkerRecord
from backhaul._types import MAX_WORKERS
from backhaul._wire.messages import Departure


def record(number: int, name: str, incarnation: str, epoch: int) -> WorkerRecord:
    seal = seal_of(secret_of(incarnation))
    return WorkerRecord(number, name, incarnation, "here", (), "", 0, epoch=epoch, seal=seal)


def members(table: MembershipTable, names: str = "abcd") -> set[str]:
    return {found.incarnation for name in names for found in table.rivals(name, -1)}


@given(st.lists(st.sampled_from("bcd"), min_size=1, max_size=8), st.randoms())
def test_the_latest_worker_of_a_name_counts_in_any_order(names: list[str], order: random.Random) -> None:
    """Restarts: the leader enrolls each worker after the one before."""
    leader = MembershipTable(record(0, "a", "first", 0))
    shown = []
    for count, name in enumerate(names):
        place = leader.enroll(name, -1)
        assert place is not None
        shown.append(record(place[0], name, f"i{count}", place[1]))
        assert isinstance(leader.admit(shown[-1]), Admit)
    expected = members(leader)
    assert {f"i{max(i for i, n in enumerate(names) if n == name)}" for name in set(names)} | {"first"} == expected
    other = MembershipTable(record(9, "z", "other", 0))
    other.admit(record(0, "a", "first", 0))
    order.shuffle(shown)
    for one in shown:
        other.admit(one)
    assert members(other) == expected


@given(st.integers(1, 5), st.text("xyz", min_size=1, max_size=3), st.text("xyz", min_size=1, max_size=3))
def test_of_two_workers_enrolled_at_once_the_same_one_wins_everywhere(epoch: int, one: str, other: str) -> None:
    if one == other:
        return
    rivals = [record(1, "b", one, epoch), record(1, "b", other, epoch)]
    winners = []
    for order in (rivals, rivals[::-1]):
        table = MembershipTable(record(0, "a", "first", 0))
        for shown in order:
            table.admit(shown)
        winners.append(members(table, "b"))
    assert winners[0] == winners[1]
    assert len(winners[0]) == 1


def test_workers_that_are_gone_are_not_admitted_again() -> None:
    table = MembershipTable(record(0, "a", "first", 0))
    old = record(1, "b", "old", 0)
    table.admit(old)
    assert table.dismiss(old, "has left the cluster")
    assert not table.dismiss(old, "has left the cluster")
    assert isinstance(table.admit(old), Refusal)
    assert table.why_gone("b") == "has left the cluster"
    assert table.enroll("c", -1) == (1, 1)
    assert table.admit(record(1, "c", "new", 1)) == Admit()
    assert isinstance(table.admit(record(0, "a", "thief", 7)), Refusal)


@pytest.mark.parametrize(
    "bad",
    [
        record(-7, "b", "i", 0),
        record(MAX_WORKERS, "b", "i", 0),
        record(1, "b\n\x1b[31m", "i", 0),
        record(1, "", "i", 0),
        record(1, "b", "", 0),
        record(1, "b", "i" * 1000, 0),
        record(1, "b", "i", -1),
        record(1, "b", "i", 2**64 - 1),
    ],
)
def test_invalid_records_are_refused(bad: WorkerRecord) -> None:
    table = MembershipTable(record(0, "a", "first", 0))
    assert isinstance(table.admit(bad), Refusal)
    assert table.enroll("c", -1) == (1, 1)
    assert table.enroll("d", MAX_WORKERS) is None


def test_an_epoch_far_ahead_is_refused_unless_a_leader_announced_it() -> None:
    table = MembershipTable(record(0, "a", "first", 0))
    assert isinstance(table.admit(record(1, "b", "i", 10**6), heard=False), Refusal)
    assert isinstance(table.admit(record(1, "b", "i", 10**6)), Admit)
    assert isinstance(table.admit(record(2, "c", "j", 10**6 + 1), heard=False), Admit)


def test_an_incarnation_belongs_to_one_worker() -> None:
    table = MembershipTable(record(0, "a", "first", 0))
    table.admit(record(1, "b", "i", 0))
    table.admit(record(2, "evil", "j", 0))
    for number, name in ((1, "evil"), (2, "b"), (3, "evil2"), (2, "evil")):
        assert isinstance(table.admit(record(number, name, "i", 1)), Refusal)
    assert table.admit(record(1, "b", "i", 0)) is None


# Proofs of departure.


def test_only_the_worker_that_leaves_can_prove_it() -> None:
    left, other = record(1, "b", "i", 0), record(2, "c", "j", 0)
    assert secret_of("i") != secret_of("j") != left.seal
    assert left.has_left(secret_of("i"))
    for wrong in ("", "i", left.seal, secret_of("j"), secret_of("i")[:-1], secret_of("i") + "0", "\ud800"):
        assert not left.has_left(wrong)
    assert not other.has_left(secret_of("i"))
    assert not WorkerRecord(1, "b", "i", "here", (), "", 0).has_left("")  # it has no seal


@given(st.lists(st.sampled_from("abcdef"), unique=True), st.lists(st.text(max_size=40), max_size=3))
def test_a_chain_of_members_passes_proofs_on(leaving: str, lies: list[str]) -> None:
    """Whatever else members say: the last member knows which workers have left, and removes no other."""
    tables = []
    for name in ("first", "middle", "last"):
        table = MembershipTable(record(10 + len(tables), name, name, 0))
        for number, other in enumerate("abcdef"):
            table.admit(record(number, other, other, 0))
        tables.append(table)
    first, middle, last = tables
    for name in leaving:
        (found,) = first.rivals(name, -1)
        assert first.dismiss(found, proof=secret_of(name))
    for teller, hearer in ((first, middle), (middle, last)):
        told = [(left.incarnation, left.proof) for left in teller.standing.proven]
        assert {life for life, _ in told} == set(leaving)
        for incarnation, proof in [*told, *((name, lie) for name in "abcdef" for lie in lies)]:
            gone = hearer.proven_gone(incarnation, proof)
            if gone is not None:
                assert hearer.dismiss(gone, proof=proof)
    assert members(last, "abcdef") == set("abcdef") - set(leaving)
    assert all(last.gone(name) == (name, "has left the cluster") for name in leaving)
    assert last.standing.left == ()


def test_nobody_can_prove_that_a_worker_itself_has_left() -> None:
    own = record(0, "a", "first", 0)
    assert MembershipTable(own).proven_gone("first", secret_of("first")) is None


def test_a_departure_without_a_proof_is_listed_separately() -> None:
    table = MembershipTable(record(0, "a", "first", 0))
    table.admit(record(1, "b", "i", 0))
    (found,) = table.rivals("b", -1)
    assert table.dismiss(found, proof="a lie")
    assert (table.standing.left, table.standing.proven) == (("i",), ())


def test_proofs_of_others_are_remembered_within_limits() -> None:
    table = MembershipTable(record(0, "a", "first", 0))
    table.admit(record(1, "b", "i", 0))
    table.remember(
        [Departure("i", 1, "b", "x"), Departure("j" * 1000, 1, "c", "x"), Departure("j", 7, "a", "x" * 10**6)]
    )
    assert table.standing.proven == ()  # one of them is a member, and the others are too long
    kept = [Departure(f"life {number}", number % 3, f"name {number}", "x") for number in range(2000)]
    table.remember(kept)
    proven = table.standing.proven
    assert 100 < len(proven) < 1000
    table.remember([Departure("one more", 5, "z", "x")])
    assert table.standing.proven == proven == tuple(kept[: len(proven)])
    assert {left.id for left in table.predecessors} == {0}


# Two leaders that give the same id to two joiners.


@given(st.data(), st.integers(2, 4), st.permutations(range(4)))
def test_the_joiner_of_the_lowest_leader_stays_whatever_is_heard_later(
    data: st.DataObject, leaders: int, order: list[int]
) -> None:
    """Members hear of joiners in any order, from whichever leader they see. A member that has admitted the joiner of
    the lowest leader never drops it, and in the end it is a member for all that heard of it.
    """
    joiners = {leader: record(9, f"new{order[leader]}", f"life{order[leader]}", 5) for leader in range(leaders)}
    for _ in range(3):
        table = MembershipTable(record(50, "z", "own", 0))
        for leader in range(leaders):
            table.admit(record(leader, f"leader{leader}", f"leader{leader}", 0))
        words = data.draw(st.lists(st.sampled_from(range(leaders)), max_size=6))
        for leader in [*words, 0, *data.draw(st.lists(st.sampled_from(range(leaders)), max_size=6))]:
            rivals = table.rivals(joiners[leader].name, 9)
            if all(table.yields(rival, f"leader{leader}") for rival in rivals):
                table.admit(joiners[leader], decided=True)
                table.vouch(joiners[leader].incarnation, f"leader{leader}")
        assert table.member(joiners[0].incarnation) == joiners[0]


def test_a_leader_that_is_gone_for_good_decides_nothing_any_more() -> None:
    table = MembershipTable(record(5, "z", "own", 0))
    old = record(0, "a", "first", 0)
    for each in (old, record(1, "b", "second", 0), record(4, "new", "i", 1)):
        table.admit(each)
    table.vouch("i", "first")
    (new,) = table.rivals("new", -1)
    assert not table.yields(new, "second")
    assert not table.yields(new, "nobody")
    assert table.yields(new, "first")
    table.dismiss(table.rivals("a", -1)[0])
    assert table.yields(new, "second")
