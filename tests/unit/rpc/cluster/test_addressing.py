"""What workers offer at a rendezvous decides where they are reached; all of them come to the same result."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul._rpc.cluster.addressing import AddressOffer, neighbor_of, other_host, records_of, settle
from backhaul._rpc.cluster.membership_table import WorkerRecord, choose
from backhaul.errors import RendezvousError


def record(rank: int, host: str = "a", addresses: tuple[str, ...] = ("unix:@x",), epoch: int = 0) -> WorkerRecord:
    return WorkerRecord(rank, f"worker{rank}", str(rank), host, addresses, "", 1, epoch=epoch)


def offer(
    rank: int, host: str, spare: str = "tcp:10.0.0.1:7", addresses: tuple[str, ...] = ("unix:@x",)
) -> AddressOffer:
    return AddressOffer(record(rank, host, addresses), spare, own_secret=True)


def test_on_one_host_nobody_needs_a_spare_address() -> None:
    assert settle([offer(0, "a"), AddressOffer(record(1))]) == [record(0), record(1)]


def test_on_several_hosts_all_use_their_spare_addresses() -> None:
    found = settle([offer(0, "a"), offer(1, "b", addresses=("tcp:127.0.0.1:9",)), offer(2, "b", "", ("tcp:node7:1",))])
    assert [each.addresses for each in found] == [("unix:@x", "tcp:10.0.0.1:7"), ("tcp:10.0.0.1:7",), ("tcp:node7:1",)]
    assert [choose(each, "c") for each in found] == ["tcp:10.0.0.1:7", "tcp:10.0.0.1:7", "tcp:node7:1"]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (AddressOffer(record(1, "b"), "", "it has no network", own_secret=True), "it has no network"),
        (offer(1, "b", ""), "listens on unix:@x only"),
        (offer(1, "b", "", ("unix:@x", "tcp:127.0.0.1:9")), "tcp:127.0.0.1:9 only"),
        (AddressOffer(record(1, "b"), "tcp:10.0.0.1:7"), "set BACKHAUL_SECRET"),
        (AddressOffer(record(1, "b", ("tcp:10.0.0.2:7",))), "set BACKHAUL_SECRET"),
    ],
)
def test_a_worker_that_others_cannot_reach(wrong: AddressOffer, reason: str) -> None:
    for offers in ([offer(0, "a"), wrong], [offer(0, "a"), wrong, offer(2, "b")]):
        with pytest.raises(RendezvousError, match=reason) as caught:
            settle(offers)
        assert caught.value.worker == "worker1"


def test_a_name_taken_twice() -> None:
    with pytest.raises(RendezvousError, match="ranks 0 and 1"):
        settle([offer(0, "a"), AddressOffer(msgspec.structs.replace(record(1), name="worker0"))])


def test_joiners_do_not_change_what_the_first_members_listen_on() -> None:
    """A cluster of one host has closed its spare sockets, whatever host a joiner is on."""
    joiner = AddressOffer(record(2, "b", ("tcp:10.0.0.9:7",), epoch=1))
    assert records_of([offer(0, "a"), offer(1, "a"), joiner]) == [record(0), record(1), joiner.record]
    assert records_of([offer(0, "a"), offer(1, "b"), joiner])[0].addresses == ("unix:@x", "tcp:10.0.0.1:7")


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=24))
def test_every_host_is_tried_by_the_one_before(hosts: list[str]) -> None:
    records = [record(rank, host) for rank, host in enumerate(hosts)]
    tried = {own.id: neighbor_of(own, records) for own in records}
    if len(set(hosts)) == 1:
        assert set(tried.values()) == {None}
        return
    ring = list(dict.fromkeys(hosts))
    for own in records:
        other = tried[own.id]
        assert other is not None
        assert other.host == ring[(ring.index(own.host) + 1) % len(ring)]
    if len({hosts.count(host) for host in ring}) == 1:
        assert sorted(each.id for each in tried.values() if each is not None) == list(range(len(hosts)))


def test_addresses_that_other_hosts_reach() -> None:
    assert [other_host(each) for each in ("tcp:[fd00::1]:7", "tcp:[::1]:7", "tcp:localhost:7", "tcp:node7:7")] == [
        "fd00::1",
        None,
        None,
        "node7",
    ]


# Workers that do not listen.


def hidden(rank: int, host: str, addresses: tuple[str, ...] = ("unix:@x",)) -> AddressOffer:
    made = msgspec.structs.replace(record(rank, host, addresses), listens=False)
    return AddressOffer(made, own_secret=True)


def test_a_worker_that_does_not_listen_needs_no_address() -> None:
    offers = [hidden(0, "a"), offer(1, "b"), hidden(2, "c", ())]
    assert settle(offers)[0::2] == [offers[0].record, offers[2].record]
    assert settle([hidden(0, "a"), hidden(1, "a")])[1].addresses == ("unix:@x",), "on one host they need nobody"
    assert len(settle([hidden(0, "a", ())])) == 1
    assert len(settle([hidden(0, "a", ()), AddressOffer(record(1))])) == 2


@pytest.mark.parametrize(
    "offers",
    [
        [hidden(0, "a"), hidden(1, "b")],
        [hidden(0, "a", ()), hidden(1, "a", ())],
        [hidden(0, "a"), offer(1, "b", "", ("tcp:127.0.0.1:9",))],
    ],
)
def test_somebody_has_to_listen(offers: list[AddressOffer]) -> None:
    with pytest.raises(RendezvousError, match="listen=False") as caught:
        settle(offers)
    assert caught.value.worker == "worker0"


def test_workers_that_do_not_listen_are_not_tried() -> None:
    records = settle([offer(0, "a"), hidden(1, "b"), offer(2, "c"), hidden(3, "c")])
    found = [neighbor_of(each, records) for each in records]
    assert [each and each.id for each in found] == [2, 2, 0, 0]


def test_the_leader_is_a_worker_that_listens() -> None:
    records = [hidden(0, "a").record, record(1), record(2)]
    assert [each.id for each in sorted(records, key=lambda each: each.seniority)] == [1, 2, 0]
