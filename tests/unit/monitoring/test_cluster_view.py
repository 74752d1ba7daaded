"""What a monitor makes of answers, silence and broken connections."""

from __future__ import annotations

import msgspec

from backhaul._monitoring.cluster_view import SILENT_SECONDS, ClusterStatus, ClusterView
from backhaul._monitoring.status import ChannelStatus, GraphStatus, MemberStatus, WorkerStatus

NAMES = ("a", "b", "c")


def member(name: str, state: str = "ok", reason: str = "", incarnation: str = "") -> MemberStatus:
    return MemberStatus(NAMES.index(name), name, incarnation or f"{name}1", "host", (f"unix:@{name}",), state, reason)


def answer(
    name: str, at: float, *others: MemberStatus, sent: int = 0, served: int = 0, incarnation: str = ""
) -> WorkerStatus:
    own = member(name, incarnation=incarnation)
    return WorkerStatus(
        id=own.id,
        name=name,
        incarnation=own.incarnation,
        host="host",
        machine="machine",
        pid=1,
        version="",
        at=at,
        uptime=at,
        served=served,
        called=0,
        tasks=0,
        num_serving=0,
        num_calling=0,
        memory=0,
        channels=(ChannelStatus("b" if name == "a" else "a", sent, 0, 7),),
        graphs=GraphStatus(passes_ended=served),
        members=(own, *others),
    )


def states(status: ClusterStatus) -> dict[str, str]:
    return {worker.name: worker.state for worker in status.workers}


def kinds(status: ClusterStatus) -> list[tuple[str, str]]:
    return [(event.worker, event.kind) for event in status.events]


def pair() -> ClusterView:
    """Two workers that have answered."""
    view = ClusterView()
    view.answered(answer("a", 0.0, member("b")), 0.0)
    view.answered(answer("b", 0.0, member("a")), 0.0)
    return view


def test_rates_are_differences_of_two_answers() -> None:
    view = pair()
    view.answered(answer("a", 2.0, member("b"), sent=1000, served=10), 5.0)
    status = view.status(5.0, 0.0)
    a, b = status.workers
    assert (a.rates.sent, a.rates.served, a.rates.passes) == (500.0, 5.0, 5.0)
    assert b.rates.received == 500.0
    assert [(each.source, each.target, each.rate, each.total, each.waiting) for each in status.channels] == [
        ("a", "b", 500.0, 1000, 7),
        ("b", "a", 0.0, 0, 7),
    ]


def test_answers_that_are_close_give_no_rate_and_lose_none() -> None:
    view = pair()
    for step in range(1, 9):
        view.answered(answer("a", step / 8, member("b"), served=step), step / 8)
    assert view.status(1.0, 0.0).workers[0].rates.served == 8.0


def test_a_worker_that_was_only_named_is_new() -> None:
    view = ClusterView()
    view.answered(answer("a", 0.0, member("b")), 0.0)
    assert states(view.status(0.0, 0.0)) == {"a": "up", "b": "new"}
    assert [each.name for each in view.members] == ["a", "b"]


def test_silence() -> None:
    view = pair()
    view.asked("b1", 1.0)
    assert view.waits_for("b1", 1.0)
    assert not view.may_be_asked("b1")
    assert states(view.status(1.0 + SILENT_SECONDS, 0.0))["b"] == "up"
    late = 1.1 + SILENT_SECONDS
    assert states(view.status(late, 0.0))["b"] == "silent"
    assert not view.waits_for("b1", late)
    view.answered(answer("a", 5.0, member("b", "lost", "no sign of life")), 5.0)
    status = view.status(5.0, 0.0)
    assert (status.workers[1].state, status.workers[1].reason) == ("lost", "no sign of life (seen by a)")
    view.answered(answer("b", 6.0, member("a")), 6.0)
    assert kinds(view.status(6.0, 0.0)) == [("b", "silent"), ("b", "lost"), ("b", "up")]


def test_a_broken_connection_is_a_loss_until_there_is_an_answer() -> None:
    view = pair()
    view.broke("b1", "closed by the peer")
    status = view.status(1.0, 0.0)
    assert (status.workers[1].state, status.workers[1].reason) == ("lost", "closed by the peer")
    assert not [channel for channel in status.channels if channel.source == "b"]
    view.answered(answer("b", 2.0, member("a")), 2.0)
    assert states(view.status(2.0, 0.0))["b"] == "up"


def test_a_worker_that_this_host_cannot_reach_is_not_lost() -> None:
    view = ClusterView()
    view.answered(answer("a", 0.0, member("b")), 0.0)
    view.broke("b1", "no route")
    assert states(view.status(0.0, 0.0))["b"] == "silent"
    view.answered(answer("a", 1.0, member("b", "lost", "no sign of life")), 1.0)
    assert states(view.status(1.0, 0.0))["b"] == "lost"


def test_a_suspicion_of_another_worker_shows() -> None:
    view = pair()
    view.answered(answer("a", 1.0, member("b", "suspected", "quiet")), 1.0)
    status = view.status(1.0, 0.0)
    assert states(status) == {"a": "up", "b": "silent"}
    assert [msgspec.structs.astuple(doubt) for doubt in status.doubts] == [("a", "b", "suspected", "quiet")]
    view.broke("a1", "closed")  # who is lost has no say
    assert view.status(1.0, 0.0).doubts == ()


def test_a_worker_that_left_is_forgotten() -> None:
    view = pair()
    view.broke("b1", "closed by the peer")
    view.answered(answer("a", 1.0), 1.0)
    assert states(view.status(1.0, 0.0)) == {"a": "up"}
    assert kinds(view.status(1.0, 0.0))[-1] == ("b", "left")


def test_a_worker_that_was_replaced_is_forgotten() -> None:
    view = pair()
    view.status(0.0, 0.0)
    view.answered(answer("a", 1.0, member("b", incarnation="b2")), 1.0)
    assert [each.incarnation for each in view.members] == ["a1", "b2"]
    view.answered(answer("b", 1.0, member("a"), incarnation="b2"), 1.0)
    assert kinds(view.status(1.0, 0.0)) == [("b", "left"), ("b", "joined")]


def test_a_worker_is_not_forgotten_because_one_answer_is_old() -> None:
    """A joiner is known to some members before others."""
    view = pair()
    view.answered(answer("a", 1.0, member("b"), member("c")), 1.0)
    view.answered(answer("b", 1.0, member("a")), 1.0)
    assert set(states(view.status(1.0, 0.0))) == {"a", "b", "c"}
