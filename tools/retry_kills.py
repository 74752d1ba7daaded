"""Kills workers of training runs whose steps are made with ``retry_step``, and compares each run with one process.

``python -m tools.kill_tests --retry-steps --count 300`` kills at least three hundred workers, at every stage of a step
and at random times. A new process takes the place of each. Losses, weights, buffers and the state of optimizers must
equal those of the run in one process, to the last bit.
"""

from __future__ import annotations

import collections
import dataclasses
import gc
import random
import signal
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from backhaul._options import Liveness, Options
from backhaul._rpc.api import rpc_sync
from backhaul.errors import BackhaulError
from tools.fleet import Fleet
from tools.retried_training import TrainingPlan, TrainingResult, draw_plan, train, train_plainly
from tools.retry_triggers import RESTORE_STAGES, RETRY_STAGES, arm_retry

AT_RANDOM = "at a random time"
_RUN_SECONDS = 120.0  # in which a run must end
_POLL_SECONDS = 0.002
_REPORT_SECONDS = 10.0  # between two lines about progress


@dataclasses.dataclass
class RetryVerdict:
    """What has happened.

    Attributes:
        killed: How many workers were killed at each stage.
        unreached: How often a stage was not reached.
        runs: How many runs there were.
        steps: How many steps they have.
        problems: What must not happen.
    """

    killed: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    unreached: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    runs: int = 0
    steps: int = 0
    problems: list[str] = dataclasses.field(default_factory=list)


class RetryKiller:
    """Kills workers of one fleet.

    Args:
        fleet: The fleet.
        seed: Determines runs, victims and stages.
        how: SIGKILL or SIGSTOP.
        verdict: Takes the results.
    """

    def __init__(self, fleet: Fleet, seed: int, how: signal.Signals, verdict: RetryVerdict) -> None:
        self._fleet = fleet
        self._draw = random.Random(seed)
        self._how = how
        self._verdict = verdict
        self._armed: dict[str, str] = {}  # worker -> stage
        self._next_stage = ""  # at which a worker that has taken the place of another dies
        self._stages: list[str] = []

    def run(self, steps: int = 6) -> None:
        """Make one run, in which at least one worker is to die."""
        plan = draw_plan(self._draw, self._fleet.names, steps)
        self._verdict.runs += 1
        self._verdict.steps += plan.steps
        self._armed.clear()
        deadly = set(self._draw.sample(range(1, plan.steps), 2))
        with ThreadPoolExecutor(1) as pool:
            going = pool.submit(self._fleet.worker.run, self._train, plan, deadly)
            self._supervise(going)
            self._judge(plan, going)
        for name, stage in self._armed.items():
            self._verdict.unreached[stage] += 1
            self._fleet.remove(name)  # it is patched
            self._fleet.replace(name)

    def _train(self, plan: TrainingPlan, deadly: set[int]) -> TrainingResult:
        def before(number: int) -> None:
            if number in deadly:
                self._arm(plan)

        return train(plan, before=before)

    def _arm(self, plan: TrainingPlan) -> None:
        """Let a worker die soon, mostly one; sometimes also what takes its place, or another while it is restored."""
        victims = self._draw.sample(sorted(set(plan.places)), 2 if len(set(plan.places)) > 1 else 1)
        self._arm_at(victims[0], self._take_stage())
        luck = self._draw.random()
        if luck < 0.15 and len(victims) > 1:
            self._arm_at(victims[1], self._draw.choice(list(RESTORE_STAGES)))
        elif luck < 0.3:
            self._next_stage = self._draw.choice(list(RESTORE_STAGES))

    def _take_stage(self) -> str:
        """Each stage as often as the others."""
        if not self._stages:
            self._stages = [*RETRY_STAGES, AT_RANDOM, AT_RANDOM]
            self._draw.shuffle(self._stages)
        return self._stages.pop()

    def _arm_at(self, name: str, stage: str) -> None:
        if name in self._armed:
            return
        try:
            if stage != AT_RANDOM:
                rpc_sync(name, arm_retry, (stage, self._how))
        except BackhaulError:
            return  # it has just died
        self._armed[name] = stage

    def _supervise(self, going: Future[TrainingResult]) -> None:
        """Replace workers that die, as what restarts processes does."""
        deadline = time.monotonic() + _RUN_SECONDS
        due: dict[str, float] = {}
        while not going.done() and time.monotonic() < deadline:
            for name, stage in list(self._armed.items()):
                if stage == AT_RANDOM:
                    due.setdefault(name, time.monotonic() + self._draw.uniform(0.0, 0.05))
                    if time.monotonic() < due[name]:
                        continue
                    self._fleet.signal(name, self._how)
                elif self._fleet.died(name) is None:
                    continue
                due.pop(name, None)
                self._verdict.killed[stage] += 1
                self._fleet.remove(name)
                self._fleet.replace(name)
                del self._armed[name]
                if self._next_stage:
                    following, self._next_stage = self._next_stage, ""
                    self._arm_at(name, following)
            time.sleep(_POLL_SECONDS)

    def _judge(self, plan: TrainingPlan, going: Future[TrainingResult]) -> None:
        try:
            found = going.result(_RUN_SECONDS)
        except Exception as error:
            self._verdict.problems.append(f"{plan}: {''.join(traceback.format_exception(error))}")
            error.__traceback__ = None
            return
        different = found.differences(train_plainly(plan))
        if different:
            self._verdict.problems.append(f"{plan}: {', '.join(different)}")

    def check_leftovers(self) -> None:
        """Nothing of the runs may be left."""
        gc.collect()
        left = self._fleet.leftovers(timeout=20.0)
        if left:
            self._verdict.problems.append("left behind: " + ", ".join(left))


def run_retry_kills(
    count: int,
    workers: int,
    seed: int,
    how: signal.Signals = signal.SIGKILL,
    report: Callable[[RetryVerdict], object] = lambda _: None,
) -> RetryVerdict:
    """Kill at least ``count`` workers."""
    options = Options(timeout=40.0, backward_timeout=50.0)
    if how == signal.SIGSTOP:
        liveness = Liveness(heartbeat_interval=0.2, suspect_after=0.6, lost_after=1.5)
        options = Options(timeout=40.0, backward_timeout=50.0, liveness=liveness)
    verdict = RetryVerdict()
    with Fleet(workers, options) as fleet:
        killer = RetryKiller(fleet, seed, how, verdict)
        while verdict.killed.total() < count and len(verdict.problems) < 10 and verdict.runs < count * 3:
            killer.run()
            report(verdict)
        killer.check_leftovers()
    return verdict


def kill_retried_steps(count: int, workers: int, seed: int, how: signal.Signals, write: Callable[[str], object]) -> int:
    """The command. Returns its exit status."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    began = reported = time.monotonic()
    known = 0

    def report(verdict: RetryVerdict) -> None:
        nonlocal reported, known
        for problem in verdict.problems[known:]:
            write("PROBLEM " + problem.rstrip().replace("\n", "\n  "))
        known = len(verdict.problems)
        if time.monotonic() > reported + _REPORT_SECONDS:
            reported = time.monotonic()
            write(f"{verdict.killed.total()} of {count}, {reported - began:.0f} s")

    verdict = run_retry_kills(count, workers, seed, how, report)
    report(verdict)
    for row in table_of(verdict):
        write(row)
    write(f"{time.monotonic() - began:.0f} s, {len(verdict.problems)} problems")
    return 1 if verdict.problems else 0


def table_of(verdict: RetryVerdict) -> list[str]:
    """For each stage, how often a worker was killed there."""
    names = [*RETRY_STAGES, *RESTORE_STAGES, AT_RANDOM]
    rows = [f"{'stage':<40} {'kills':>5} {'not reached':>11}"]
    rows += [f"{name:<40} {verdict.killed[name]:>5} {verdict.unreached[name]:>11}" for name in names]
    return [*rows, "", f"{verdict.killed.total()} workers killed in {verdict.runs} runs of {verdict.steps} steps"]
