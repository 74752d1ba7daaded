"""Which failure was the first, and what is ordered when. Times are given, none is waited for."""

from __future__ import annotations

import signal

import pytest

from backhaul._command.run_progress import MORE_FAILURES_SECONDS, TERMINATE_SECONDS, Order, RunProgress

TRACEBACK = "Traceback (most recent call last):"


def say(progress: RunProgress, rank: int, now: float, *lines: str) -> None:
    for line in lines:
        progress.on_line(rank, line, is_error=True, now=now)


def test_the_traceback_that_was_printed_first_is_the_cause() -> None:
    """Worker 1 is slow to end after it has failed; worker 0 fails because of it, and ends first."""
    progress = RunProgress(["a", "b"])
    say(progress, 1, 1.0, TRACEBACK, "ValueError: wrong")
    say(progress, 0, 1.1, TRACEBACK, "RuntimeError: b answered with nonsense")
    progress.on_end(0, 1, 1.2)
    progress.on_end(1, 3, 1.3)
    first = progress.first_failure()
    assert first is progress.workers[1]
    assert first.failure() == [TRACEBACK, "ValueError: wrong"]
    assert progress.exit_status() == 3


def test_a_lost_peer_is_no_cause() -> None:
    progress = RunProgress(["a", "b"])
    say(progress, 0, 1.0, TRACEBACK, "backhaul.errors.PeerLostError: cannot reach worker 'b'")
    progress.on_end(0, 1, 1.1)
    progress.on_end(1, -signal.SIGKILL, 1.2)
    assert progress.first_failure() is progress.workers[1]
    assert progress.exit_status() == 128 + signal.SIGKILL


def test_a_cause_that_is_slow_to_end_is_the_cause() -> None:
    """Worker 1 has raised, and handlers still run there when all are told to end."""
    progress = RunProgress(["a", "b", "c"])
    say(progress, 2, 0.5, TRACEBACK, "OSError: handled, and logged")
    say(progress, 1, 1.0, TRACEBACK, "ValueError: wrong")
    say(progress, 0, 1.1, TRACEBACK, "backhaul.errors.PeerLostError: lost worker 'b'")
    progress.on_end(0, 1, 1.2)
    assert progress.on_time(2.0) is Order.TERMINATE
    progress.on_end(1, -signal.SIGTERM, 2.2)
    progress.on_end(2, -signal.SIGTERM, 2.2)
    first = progress.first_failure()
    assert first is progress.workers[1]
    assert first.failure() == [TRACEBACK, "ValueError: wrong"]
    assert progress.exit_status() == 1


def test_a_handled_error_is_no_failure() -> None:
    progress = RunProgress(["a", "b"])
    say(progress, 0, 0.5, TRACEBACK, "OSError: handled, and logged")
    progress.on_end(1, 3, 1.0)
    progress.on_time(2.0)
    progress.on_end(0, -signal.SIGTERM, 2.1)
    assert progress.first_failure() is progress.workers[1]
    assert progress.exit_status() == 3


def test_causes_of_an_exception_belong_to_its_failure() -> None:
    progress = RunProgress(["a"])
    say(progress, 0, 1.0, TRACEBACK, "KeyError: handled, and logged")
    cause = [TRACEBACK, "OSError: no", "", "The above exception was the direct cause of the following exception:", ""]
    say(progress, 0, 2.0, *cause, TRACEBACK, "ValueError: so")
    progress.on_end(0, 1, 3.0)
    assert progress.workers[0].failed_at == 2.0
    assert progress.workers[0].failure() == [*cause, TRACEBACK, "ValueError: so"]


def test_a_failure_without_a_traceback_shows_the_last_lines() -> None:
    progress = RunProgress(["a"])
    for n in range(100):
        progress.on_line(0, f"step {n}", is_error=False, now=float(n))
    progress.on_end(0, 7, 100.0)
    assert progress.workers[0].failure()[-1] == "step 99"
    assert progress.exit_status() == 7


def test_the_others_are_ended_after_a_failure_first_gently() -> None:
    progress = RunProgress(["a", "b"])
    progress.on_end(0, 1, 10.0)
    assert progress.wake_at == 10.0 + MORE_FAILURES_SECONDS
    assert progress.on_time(10.0) is None
    assert progress.on_time(11.0) is Order.TERMINATE
    assert progress.wake_at == 11.0 + TERMINATE_SECONDS
    assert progress.on_time(13.0) is Order.KILL
    assert progress.on_time(15.0) is Order.GIVE_UP
    progress.on_end(1, -signal.SIGTERM, 15.0)
    assert progress.done
    assert not progress.workers[1].failed
    assert progress.exit_status() == 1


def test_a_lost_host_says_why() -> None:
    progress = RunProgress(["a", "b"])
    progress.on_line(0, "step 1", is_error=False, now=1.0)
    progress.on_host_lost(0, ["node1: no route"], 2.0)
    progress.on_end(0, 0, 2.1)  # too late
    first = progress.first_failure()
    assert first is progress.workers[0]
    assert first.failure() == ["step 1", "node1: no route"]
    assert progress.exit_status() == 255


def test_workers_that_end_well_let_the_others_go_on() -> None:
    progress = RunProgress(["a", "b"])
    progress.on_end(0, 0, 1.0)
    assert (progress.wake_at, progress.done) == (None, False)
    progress.on_end(1, 0, 2.0)
    assert (progress.done, progress.exit_status(), progress.first_failure()) == (True, 0, None)


def test_a_signal_ends_all_and_a_second_one_does_not_wait() -> None:
    progress = RunProgress(["a"])
    assert progress.on_signal(signal.SIGINT, 1.0) is Order.TERMINATE
    assert progress.on_signal(signal.SIGINT, 1.1) is Order.KILL
    progress.on_end(0, 1, 1.2)  # its own answer to SIGTERM is no failure
    assert progress.first_failure() is None
    assert progress.exit_status() == 128 + signal.SIGINT


@pytest.mark.parametrize("late", [False, True])
def test_what_ends_after_the_order_to_end_has_failed_only_if_it_said_so_before(late: bool) -> None:
    progress = RunProgress(["a", "b"])
    progress.on_end(0, 1, 1.0)
    if not late:
        say(progress, 1, 1.1, TRACEBACK, "ValueError: too")
    progress.on_time(2.0)
    if late:
        say(progress, 1, 2.1, TRACEBACK, "KeyboardInterrupt")
    progress.on_end(1, 1, 2.2)
    assert progress.workers[1].failed is not late


def test_a_run_that_has_served_its_purpose_has_not_failed() -> None:
    progress = RunProgress(["a", "b"])
    assert progress.on_enough(1.0) is Order.TERMINATE
    say(progress, 1, 1.1, TRACEBACK, "PeerLostError: lost worker 'a'")
    progress.on_end(0, -signal.SIGTERM, 1.1)
    progress.on_end(1, 1, 1.2)
    assert (progress.first_failure(), progress.exit_status()) == (None, 0)
    assert progress.on_enough(1.3) is None
