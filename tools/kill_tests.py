"""Kills or stops worker processes at every stage of a step, and at random times, and checks each step.

``python -m tools.kill_tests --count 200`` kills two hundred workers. After each kill the tool checks: the step had the
gradients of plain autograd, or raised an error of Backhaul in time. The other workers run right steps, and nothing of
the failed step is left in them. Then a new worker replaces the dead one, and the next step with it is right too.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import faulthandler
import gc
import itertools
import os
import random
import signal
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence

import torch

from backhaul._rpc.api import rpc_async, rpc_sync
from backhaul._sim.plain_steps import PlainStep, draw_plain_step, plain_step, run_plain_step
from backhaul._sim.random_steps import RandomStep, draw_step, run_step
from backhaul.errors import BackhaulError, BackwardTimeoutError, CallTimeoutError, PeerLostError, SerializationError
from tools.fleet import Exam, Fleet
from tools.kill_setting import KillSetting
from tools.retry_kills import kill_retried_steps
from tools.triggers import STAGES, Stage, arm, takes_part

_STUCK_SECONDS = 400.0  # a kill that takes longer hangs
_MAX_STEPS = 12  # in which a stage must be reached
_REPORT_SECONDS = 10.0  # between two lines about progress
_REFERENCES = "num_owner_rrefs", "num_forks", "num_user_rrefs"


@dataclasses.dataclass
class KillOutcome:
    """How the step of one kill ended.

    Attributes:
        stage: The stage at which the worker was killed.
        how: ``right``, ``wrong``, or the name of an error.
        about: The worker that the error names.
        victim: The worker that was killed.
        noticed: Seconds from the death to the end of the step.
        reached: Whether the step reached the stage.
    """

    stage: str
    how: str
    victim: str
    about: str | None = None
    noticed: float | None = None
    reached: bool = True


@dataclasses.dataclass
class KillVerdict:
    """The result of a run. ``problems`` has what must not happen."""

    outcomes: list[KillOutcome] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)
    steps: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    first: dict[str, Exam] = dataclasses.field(default_factory=dict)
    last: dict[str, Exam] = dataclasses.field(default_factory=dict)


class Killer:
    """Kills one worker after another of a fleet."""

    def __init__(self, fleet: Fleet, setting: KillSetting, verdict: KillVerdict) -> None:
        self._fleet = fleet
        self._setting = setting
        self._verdict = verdict
        self._draw = random.Random(setting.seed)
        self._runs = itertools.count()
        self._stages = {stage.name: stage for stage in STAGES}

    def warm_up(self, steps: int = 12) -> None:
        """Run steps until all workers have called each other, so that channels and threads exist."""
        for _ in range(steps):
            self._must_be_right("warm-up")
        self._verdict.first = self._fleet.exams(thorough=True)

    def kill(self, name: str) -> None:
        """Kill one worker at one stage, and check everything that must hold afterwards."""
        stage = self._stages.get(name)
        victim = self._draw.choice(self._fleet.names)
        outcome = KillOutcome(name, "", victim)
        timer: threading.Timer | None = None
        if stage is not None:
            rpc_sync(victim, arm, args=(name, self._setting.how))
        else:
            timer = threading.Timer(self._draw.uniform(0.0, 0.05), self._kill_now, (victim,))
            timer.start()
        died = None
        for _ in range(_MAX_STEPS):
            begun = time.monotonic()
            self._run_step(self._draw_step(victim, stage), outcome)
            if timer is not None:
                timer.join()
            died = self._killed_at if stage is None else self._fleet.died(victim)
            over = time.monotonic()
            if died is not None or outcome.how != "right":
                break
        self._drivers_died |= stage is not None and stage.role == "driver"
        if died is None:
            outcome.reached = False
            died = self._fleet.signal(victim, self._setting.how)
        elif outcome.how not in ("right", "wrong"):
            outcome.noticed = max(self._ended - died, 0.0)
        if over - begun > self._setting.limit:
            self._complain(outcome, f"the step took {over - begun:.1f} s")
        self._judge(outcome)
        self._verdict.outcomes.append(outcome)
        self._aftermath(outcome)

    def _kill_now(self, victim: str) -> None:
        self._killed_at = self._fleet.signal(victim, self._setting.how)

    _killed_at: float | None = None
    _ended = 0.0
    _drivers_died = False

    def _draw_step(self, victim: str, stage: Stage | None) -> RandomStep:
        """Draw a step in which the victim has the role that the stage needs."""
        number = self._fleet.number(victim)
        role = "called" if stage is None else stage.role
        while True:
            step = draw_step(self._draw, next(self._runs), number if role == "driver" else 0, self._numbers())
            if number not in step.places:
                continue
            part = takes_part(step.program.body, step.places.index(number))
            if role == "driver" and part["calls"]:
                return step
            if part["called"] and (part["calls"] or not (stage and stage.calls)):
                return step

    def _numbers(self) -> list[int]:
        return [0, *(self._fleet.number(name) for name in self._fleet.names)]

    def _run_step(self, step: RandomStep, outcome: KillOutcome) -> None:
        driver = step.places[0]
        run: Callable[..., list[str]] = run_step
        given: RandomStep | PlainStep = step
        if self._draw.random() < 0.3:  # no context, so stages of contexts may not be reached
            run, given = run_plain_step, plain_step(step)
        try:
            differences = run(given) if driver == 0 else rpc_async(driver, run, args=(given,)).wait()
        except BackhaulError as error:
            outcome.how, outcome.about = type(error).__name__, error.worker
            error.__traceback__ = None  # it refers to everything that the step held
        except Exception as error:
            outcome.how = type(error).__name__
            text = "".join(traceback.format_exception(error))
            self._complain(outcome, f"an error that is not a BackhaulError:\n{text}")
            error.__traceback__ = None
        else:
            outcome.how = "wrong" if differences else "right"
            if differences:
                self._complain(outcome, f"wrong gradients: {'; '.join(differences)}")
        finally:
            self._ended = time.monotonic()
        self._verdict.steps[outcome.how] += 1

    def _judge(self, outcome: KillOutcome) -> None:
        """Check that the step ended with the right kind of error, which names the killed worker."""
        if outcome.how in ("right", "wrong") or not outcome.reached:
            if not outcome.reached and outcome.how != "right":
                self._complain(outcome, f"ended with {outcome.how} before a worker was killed")
            return
        if outcome.how == SerializationError.__name__:
            return  # a reference whose value was lost with its owner cannot be sent on
        kinds = {PeerLostError.__name__, "LostStateError", "ContextError", "UnknownContextError"}
        if self._setting.how == signal.SIGSTOP and self._setting.notice != "heartbeat":
            kinds |= {CallTimeoutError.__name__, BackwardTimeoutError.__name__}
        if outcome.how not in kinds:
            self._complain(outcome, f"{outcome.how} is not an expected error")
        elif self._setting.how == signal.SIGKILL and outcome.about != outcome.victim:
            self._complain(outcome, f"{outcome.how} names {outcome.about}, which was not killed")

    def _aftermath(self, outcome: KillOutcome) -> None:
        """Check that the others run right steps, that nothing is left, and that a new worker can take the place."""
        fleet, stopped = self._fleet, self._setting.how == signal.SIGSTOP
        others = [fleet.number(name) for name in fleet.names if name != outcome.victim]
        if not stopped:
            fleet.remove(outcome.victim)
        for _ in range(2):
            self._must_be_right(f"after '{outcome.stage}', without {outcome.victim}", others)
        if stopped:
            fleet.signal(outcome.victim, signal.SIGCONT)
            time.sleep(0.1)
        ignored: tuple[str, ...] = () if self._setting.references else _REFERENCES
        if self._drivers_died and not self._setting.left_by_lost:
            ignored += ("num_autograd_contexts",)
        left = fleet.leftovers(timeout=self._setting.settle_seconds, ignored=ignored)
        if left:
            self._complain(outcome, "left behind: " + ", ".join(left))
        if stopped:  # its process is patched and stops only once
            fleet.remove(outcome.victim)
        fleet.replace(outcome.victim)
        self._must_be_right(f"after '{outcome.stage}', with another {outcome.victim}")

    def _must_be_right(self, when: str, others: Sequence[int] | None = None) -> None:
        numbers = self._numbers() if others is None else [0, *others]
        step = draw_step(self._draw, next(self._runs), 0, numbers)
        plain = draw_plain_step(self._draw, next(self._runs), 0, numbers)
        try:
            differences = run_step(step) + run_plain_step(plain)
        except Exception as error:
            self._verdict.steps[type(error).__name__] += 1
            self._verdict.problems.append(f"{when}: a step failed:\n{''.join(traceback.format_exception(error))}")
            error.__traceback__ = None
            return
        self._verdict.steps["wrong" if differences else "right"] += 1
        if differences:
            self._verdict.problems.append(f"{when}: wrong gradients: {'; '.join(differences)}")

    def _complain(self, outcome: KillOutcome, what: str) -> None:
        self._verdict.problems.append(f"{outcome.victim} killed, {outcome.stage}: {what}")

    def compare(self) -> None:
        """Compare what the workers hold at the end with what they held after the warm-up."""
        self._verdict.last = self._fleet.exams(thorough=True)
        peers = len(self._fleet.names)
        for name, exam in self._verdict.last.items():
            before = self._verdict.first[name]
            # Two channels if both ends connected at once, and a second descriptor of a channel that had to wait.
            if exam.sockets > 2 + 3 * peers:
                self._verdict.problems.append(f"{name} has {exam.sockets} sockets for {peers} peers")
            if exam.descriptors > before.descriptors + 6:
                self._verdict.problems.append(f"{name} has {exam.descriptors} descriptors, had {before.descriptors}")
            if exam.threads > max(before.threads, 20):
                self._verdict.problems.append(f"{name} has {exam.threads} threads, had {before.threads}")
            if exam.segments > before.segments:
                self._verdict.problems.append(f"{exam.segments} files in /dev/shm, were {before.segments}")


def run(setting: KillSetting, report: Callable[[list[str], int], object] = lambda *_: None) -> KillVerdict:
    """Kill as many workers as the setting says."""
    verdict = KillVerdict()
    with contextlib.ExitStack() as stack:
        fleet = stack.enter_context(Fleet(setting.workers, setting.options()))
        killer = Killer(fleet, setting, verdict)
        killer.warm_up()
        names = list(itertools.islice(itertools.cycle(setting.stages), setting.count))
        names.sort(
            key=lambda name: name.startswith("driver")
        )  # last, because what they leave would count against others
        for done, name in enumerate(names, 1):
            faulthandler.dump_traceback_later(_STUCK_SECONDS, exit=True)
            known = len(verdict.problems)
            killer.kill(name)
            report(verdict.problems[known:], done)
        faulthandler.cancel_dump_traceback_later()
        known = len(verdict.problems)
        killer.compare()
        report(verdict.problems[known:], setting.count)
    return verdict


# The command.


def table(outcomes: Sequence[KillOutcome]) -> list[str]:
    """For each stage: how often it was reached, how its steps ended, and how soon a death was noticed."""
    rows = [f"{'stage':<38} {'kills':>5} {'reached':>7}  {'noticed after, ms (median, worst)':<34} ended"]
    for stage in dict.fromkeys(outcome.stage for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.stage == stage]
        times = sorted(outcome.noticed * 1e3 for outcome in mine if outcome.noticed is not None)
        fast = f"{statistics.median(times):9.1f} {times[-1]:9.1f}" if times else f"{'-':>9} {'-':>9}"
        ended = collections.Counter(outcome.how for outcome in mine)
        text = ", ".join(f"{how} {count}" for how, count in ended.most_common())
        rows.append(f"{stage:<38} {len(mine):>5} {sum(o.reached for o in mine):>7}  {fast:<34} {text}")
    return rows


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.kill_tests", description=__doc__)
    parser.add_argument("--count", type=int, default=40, help="how many workers to kill")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stop", action="store_true", help="stop workers (SIGSTOP) instead of killing them")
    parser.add_argument(
        "--notice", choices=["timeout", "heartbeat"], default="heartbeat", help="how stopped workers are noticed"
    )
    parser.add_argument("--retry-steps", action="store_true", help="make steps with retry_step; see retry_kills.py")
    parser.add_argument("--stages", default="", help="only stages whose name contains this text")
    parser.add_argument(
        "--references",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="check references that were lost with a worker",
    )
    parser.add_argument("--left-by-lost", action="store_true", help="also check contexts of killed drivers")
    parser.add_argument("--settle-seconds", type=float, default=20.0, help="seconds after which nothing may be left")
    parser.add_argument("--transport", choices=["auto", "tcp"], default="auto")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None, write: Callable[[str], object] = print) -> int:
    """Run the command. Returns its exit status."""
    given = _parse(arguments)
    if given.retry_steps:
        how = signal.SIGSTOP if given.stop else signal.SIGKILL
        return kill_retried_steps(given.count, given.workers, given.seed, how, write)
    chosen = tuple(name for name in KillSetting.stages if given.stages in name)
    if given.stop:  # a worker that has read or sent half a frame outside its channel cannot continue
        chosen = tuple(name for name in chosen if "half" not in name)
    setting = KillSetting(
        given.count,
        given.workers,
        given.seed,
        signal.SIGSTOP if given.stop else signal.SIGKILL,
        chosen,
        notice=given.notice,
        references=given.references,
        left_by_lost=given.left_by_lost,
        settle_seconds=given.settle_seconds,
        transport=given.transport,
    )
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    reported = begun = time.monotonic()

    def report(problems: list[str], done: int) -> None:
        nonlocal reported
        for problem in problems:
            write("PROBLEM " + problem.rstrip().replace("\n", "\n  "))
        if time.monotonic() > reported + _REPORT_SECONDS:
            reported = time.monotonic()
            write(f"{done} of {given.count}, {reported - begun:.0f} s")

    verdict = run(setting, report)
    for row in table(verdict.outcomes):
        write(row)
    write("")
    spent = time.monotonic() - begun
    ended = ", ".join(f"{how} {count}" for how, count in verdict.steps.most_common())
    what = "stopped" if given.stop else "killed"
    write(f"{len(verdict.outcomes)} workers {what} in {spent:.0f} s; {verdict.steps.total()} steps: {ended}")
    for name, exam in verdict.last.items():
        write(
            f"in the end {name}: {exam.threads} threads, {exam.sockets} sockets, {exam.descriptors} other descriptors"
        )
    write(f"{len(verdict.problems)} problems")
    return 1 if verdict.problems else 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # Skip the shutdown of the interpreter, in which threads of torch may abort the process.
    os._exit(status)
