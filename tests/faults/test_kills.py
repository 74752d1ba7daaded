"""Worker processes that are killed or stopped: a sample of ``make kills``, and what it has found."""

from __future__ import annotations

import signal

import pytest

from backhaul._autograd.backward.pass_ledger import PassLedger
from backhaul._autograd.backward.report_buffer import ReportBuffer
from backhaul._autograd.ids import ContextId
from backhaul._autograd.messages import PassSpec, PassTally
from backhaul._runtime.runtime import Runtime
from backhaul._wire.callables import resolve
from tools.kill_setting import RANDOM, KillSetting
from tools.kill_tests import KillOutcome, run, table
from tools.triggers import STAGES

SAMPLE = (
    "request half read",
    "reply: half",
    "backward: gradients not read",
    "backward: gradients sent: after",
    "backward: report: before",
    "driver: first gradients: half",
    RANDOM,
)

pytestmark = pytest.mark.filterwarnings("ignore:Using backward:UserWarning")


def test_functions_that_stages_look_for_in_frames_exist() -> None:
    """A stage that waits for a function which was renamed is never reached, and kills nobody."""
    texts = [text for stage in STAGES for text in getattr(stage.arm, "args", ()) if isinstance(text, bytes)]
    functions = [text.decode() for text in texts if text.startswith(b"backhaul.")]
    assert len(functions) >= 6
    for function in functions:
        assert callable(resolve(function))


@pytest.mark.timeout(240)
def test_workers_that_are_killed() -> None:
    verdict = run(KillSetting(len(SAMPLE), stages=SAMPLE, seed=1))
    assert verdict.problems == []
    assert [outcome.stage for outcome in verdict.outcomes if outcome.reached]
    assert len(table(verdict.outcomes)) == 1 + len(SAMPLE)


@pytest.mark.timeout(240)
def test_a_worker_that_is_stopped_and_goes_on() -> None:
    """Without heartbeats it is the timeout of a call that tells."""
    verdict = run(KillSetting(1, stages=("handler begins",), how=signal.SIGSTOP))
    assert verdict.problems == []
    assert isinstance(verdict.outcomes[0], KillOutcome)


def ledger() -> PassLedger:
    return PassLedger(PassSpec(ContextId(1), 0, 1), Runtime())


def test_a_worker_that_reported_what_it_had_not_sent_yet_takes_the_pass_with_it() -> None:
    """Message 8 is on the account of worker 3, but worker 2 died before it was sent."""
    passing = ledger()
    assert passing.account((0,), {7: 2}) is None
    assert passing.account((7,), {8: 3}) is None
    assert not passing.lose(4, "four", "never took part")
    assert passing.lose(2, "two", "gone")


def test_a_worker_lost_before_its_report_came_by_another_way() -> None:
    passing = ledger()
    assert not passing.lose(2, "two", "gone")
    loss = passing.account((0,), {7: 2})
    assert loss is not None
    assert (loss.worker, loss.messages) == ("two", (7,))


def test_a_worker_that_is_lost_when_all_is_done_harms_nobody() -> None:
    passing = ledger()
    passing.account((0,), {7: 2})
    passing.account((7,), {})
    assert not passing.lose(2, "two", "gone")


def test_what_a_group_that_is_not_done_has_produced_is_reported() -> None:
    """The driver has to know where its gradients went, should a worker there be lost."""
    buffer = ReportBuffer()
    buffer.begin()
    buffer.add((), {7: 2})
    tally, _ = buffer.end()
    assert tally == PassTally((), {7: 2})
