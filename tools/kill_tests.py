"""Worker processes killed or stopped at every stage of a step, and at random times; each step is accounted for.

``python -m tools.kill_tests --count 200`` kills two hundred. After each: the step had the gradients of plain
autograd or raised an error of Backhaul's, in time; the others go on with right steps, and nothing of it is left in
them; then another worker takes the place of the dead one, and the next step is right with it, too.
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
from typing import Literal

import torch

from backhaul._rpc.api import rpc_async, rpc_sync
from backhaul._sim.random_steps import RandomStep, draw_step, run_step
from backhaul._types import Options
from backhaul.errors import BackhaulError, BackwardTimeoutError, CallTimeoutError, PeerLostError, SerializationError
from tools.fleet import Exam, Fleet
from tools.triggers import STAGES, Stage, arm, takes_part

RANDOM = "at a random time"
_STUCK = 400.0  # seconds after which a kill must be stuck
_TRIES = 12  # steps in which a stage may come to pass
_REFERENCES = "num_owner_rrefs", "num_forks", "num_user_rrefs"


@dataclasses.dataclass(frozen=True)
class KillSetting:
    """What one run is about.

    Attributes:
        count: How many workers are killed.
        workers: How many processes there are besides the driver's.
        seed: Where programs, victims and times come from.
        how: SIGKILL or SIGSTOP. Who was stopped goes on later.
        stages: Which ones; see ``triggers``.
        limit: Seconds in which a step has to end.
        notice: What has to notice a worker that stopped: its silence (``heartbeat``), or only the timeouts of calls.
        references: Whether references that went under with a worker must be given up.
        left_by_lost: Whether contexts of a driver that was killed must be released. See ``simulation.Checks``.
        patience: Seconds after which nothing may be left.
        transport: Of the workers.
    """

    count: int = 40
    workers: int = 4
    seed: int = 0
    how: signal.Signals = signal.SIGKILL
    stages: tuple[str, ...] = (*(stage.name for stage in STAGES), RANDOM)
    limit: float = 60.0
    notice: str = "timeout"
    references: bool = True
    left_by_lost: bool = False
    patience: float = 20.0
    transport: Literal["auto", "tcp"] = "auto"

    def options(self) -> Options:
        """Those of the workers: times are long enough never to matter where a closed channel has to tell."""
        times: dict[str, float] = {"timeout": 40.0, "backward_timeout": 50.0}
        if self.how == signal.SIGSTOP and self.notice == "heartbeat":
            times |= {"heartbeat_interval": 0.2, "suspect_after": 0.6, "lost_after": 1.5}
        elif self.how == signal.SIGSTOP:
            times = {"timeout": 1.5, "backward_timeout": 3.0, "connect_timeout": 1.5}
        return Options(transport=self.transport, **times)  # type: ignore[arg-type]


@dataclasses.dataclass
class KillOutcome:
    """How the step of one kill ended.

    Attributes:
        stage: Where the worker was killed.
        how: ``right``, the name of an error, or ``driver killed``.
        about: The worker that the error names.
        victim: Who was killed.
        noticed: Seconds from the death to the end of the step.
        reached: Whether the stage came to pass.
    """

    stage: str
    how: str
    victim: str
    about: str | None = None
    noticed: float | None = None
    reached: bool = True


@dataclasses.dataclass
class KillVerdict:
    """What a run gave; ``problems`` is what must not be."""

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
        """Let everybody talk to everybody, so that channels and threads are there."""
        for _ in range(steps):
            self._must_be_right("warm-up")
        self._verdict.first = self._fleet.exams(thorough=True)

    def kill(self, name: str) -> None:
        """One worker at one stage, and all that has to hold after that."""
        stage = self._stages.get(name)
        victim = self._draw.choice(self._fleet.names)
        outcome = KillOutcome(name, "", victim)
        timer: threading.Timer | None = None
        if stage is not None:
            rpc_sync(victim, arm, args=(name, self._setting.how))
        else:
            timer = threading.Timer(self._draw.uniform(0.0, 0.05), self._strike, (victim,))
            timer.start()
        died = None
        for _ in range(_TRIES):
            begun = time.monotonic()
            self._step(self._trial(victim, stage), outcome)
            if timer is not None:
                timer.join()
            died = self._struck if stage is None else self._fleet.died(victim)
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

    def _strike(self, victim: str) -> None:
        self._struck = self._fleet.signal(victim, self._setting.how)

    _struck: float | None = None
    _ended = 0.0
    _drivers_died = False

    def _trial(self, victim: str, stage: Stage | None) -> RandomStep:
        """A step in which the victim has the part that the stage takes; every message of it matters to backward."""
        number = self._fleet.number(victim)
        role = "called" if stage is None else stage.role
        while True:
            trial = draw_step(self._draw, next(self._runs), number if role == "driver" else 0, self._numbers())
            if number not in trial.places:
                continue
            part = takes_part(trial.program.body, trial.places.index(number))
            if role == "driver" and part["calls"]:
                return trial
            if part["called"] and (part["calls"] or not (stage and stage.calls)):
                return trial

    def _numbers(self) -> list[int]:
        return [0, *(self._fleet.number(name) for name in self._fleet.names)]

    def _step(self, trial: RandomStep, outcome: KillOutcome) -> None:
        driver = trial.places[0]
        try:
            differences = run_step(trial) if driver == 0 else rpc_async(driver, run_step, args=(trial,)).wait()
        except BackhaulError as error:
            outcome.how, outcome.about = type(error).__name__, error.worker
            error.__traceback__ = None  # refers to all that the step held
        except Exception as error:
            outcome.how = type(error).__name__
            self._complain(outcome, "an error that is not ours:\n" + "".join(traceback.format_exception(error)))
            error.__traceback__ = None
        else:
            outcome.how = "wrong" if differences else "right"
            if differences:
                self._complain(outcome, f"wrong gradients: {'; '.join(differences)}")
        finally:
            self._ended = time.monotonic()
        self._verdict.steps[outcome.how] += 1

    def _judge(self, outcome: KillOutcome) -> None:
        """Who was killed is to be named, and by what it should be."""
        if outcome.how in ("right", "wrong") or not outcome.reached:
            if not outcome.reached and outcome.how != "right":
                self._complain(outcome, f"ended with {outcome.how} before anybody was killed")
            return
        if outcome.how == SerializationError.__name__:
            return  # a reference whose value was lost with its owner cannot be sent on
        kinds = {PeerLostError.__name__, "LostStateError", "ContextError", "UnknownContextError"}
        if self._setting.how == signal.SIGSTOP and self._setting.notice != "heartbeat":
            kinds |= {CallTimeoutError.__name__, BackwardTimeoutError.__name__}
        if outcome.how not in kinds:
            self._complain(outcome, f"{outcome.how} was not to be expected")
        elif self._setting.how == signal.SIGKILL and outcome.about != outcome.victim:
            self._complain(outcome, f"{outcome.how} is about {outcome.about}")

    def _aftermath(self, outcome: KillOutcome) -> None:
        """The others go on; nothing is left; another takes the place."""
        fleet, stopped = self._fleet, self._setting.how == signal.SIGSTOP
        others = [fleet.number(name) for name in fleet.names if name != outcome.victim]
        if not stopped:
            fleet.bury(outcome.victim)
        for _ in range(2):
            self._must_be_right(f"after '{outcome.stage}', without {outcome.victim}", others)
        if stopped:
            fleet.signal(outcome.victim, signal.SIGCONT)
            time.sleep(0.1)
        ignored: tuple[str, ...] = () if self._setting.references else _REFERENCES
        if self._drivers_died and not self._setting.left_by_lost:
            ignored += ("num_autograd_contexts",)
        left = fleet.leftovers(patience=self._setting.patience, ignored=ignored)
        if left:
            self._complain(outcome, "left behind: " + ", ".join(left))
        if stopped:  # it is patched, and knows that it was stopped once
            fleet.bury(outcome.victim)
        fleet.replace(outcome.victim)
        self._must_be_right(f"after '{outcome.stage}', with another {outcome.victim}")

    def _must_be_right(self, when: str, others: Sequence[int] | None = None) -> None:
        numbers = self._numbers() if others is None else [0, *others]
        trial = draw_step(self._draw, next(self._runs), 0, numbers)
        try:
            differences = run_step(trial)
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
        """What workers hold in the end against what they held in the beginning."""
        self._verdict.last = self._fleet.exams(thorough=True)
        peers = len(self._fleet.names)
        for name, exam in self._verdict.last.items():
            before = self._verdict.first[name]
            # Two channels where both ends opened one at once, and a second descriptor of one that had to wait.
            if exam.sockets > 2 + 3 * peers:
                self._verdict.problems.append(f"{name} has {exam.sockets} sockets for {peers} peers")
            if exam.descriptors > before.descriptors + 6:
                self._verdict.problems.append(f"{name} has {exam.descriptors} descriptors, had {before.descriptors}")
            if exam.threads > max(before.threads, 20):
                self._verdict.problems.append(f"{name} has {exam.threads} threads, had {before.threads}")
            if exam.segments > before.segments:
                self._verdict.problems.append(f"{exam.segments} files in /dev/shm, were {before.segments}")


def run(setting: KillSetting, tell: Callable[[list[str], int], object] = lambda *_: None) -> KillVerdict:
    """Kill as many as the setting says."""
    verdict = KillVerdict()
    with contextlib.ExitStack() as stack:
        fleet = stack.enter_context(Fleet(setting.workers, setting.options()))
        killer = Killer(fleet, setting, verdict)
        killer.warm_up()
        names = list(itertools.islice(itertools.cycle(setting.stages), setting.count))
        names.sort(key=lambda name: name.startswith("driver"))  # what they leave would be taken for others'
        for done, name in enumerate(names, 1):
            faulthandler.dump_traceback_later(_STUCK, exit=True)
            known = len(verdict.problems)
            killer.kill(name)
            tell(verdict.problems[known:], done)
        faulthandler.cancel_dump_traceback_later()
        known = len(verdict.problems)
        killer.compare()
        tell(verdict.problems[known:], setting.count)
    return verdict


# The command.


def table(outcomes: Sequence[KillOutcome]) -> list[str]:
    """For each stage: how often it was reached, how its steps ended, and how fast a death was noticed."""
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
    parser.add_argument("--notice", choices=["timeout", "heartbeat", "auto"], default="auto", help="who was stopped")
    parser.add_argument("--stages", default="", help="only those whose name contains this")
    parser.add_argument(
        "--references", action=argparse.BooleanOptionalAction, default=True, help="check references that went under"
    )
    parser.add_argument("--left-by-lost", action="store_true", help="also check contexts of drivers that were killed")
    parser.add_argument("--patience", type=float, default=20.0, help="seconds after which nothing may be left")
    parser.add_argument("--transport", choices=["auto", "tcp"], default="auto")
    return parser.parse_args(arguments)


def has_heartbeats() -> bool:
    """Whether workers notice silence."""
    return hasattr(Options(), "lost_after")


def main(arguments: Sequence[str] | None = None, write: Callable[[str], object] = print) -> int:
    """The command; returns its exit status."""
    given = _parse(arguments)
    notice = given.notice if given.notice != "auto" else "heartbeat" if has_heartbeats() else "timeout"
    chosen = tuple(name for name in KillSetting.stages if given.stages in name)
    if given.stop:  # who has taken or sent half of something out of turn cannot go on
        chosen = tuple(name for name in chosen if "half" not in name)
    setting = KillSetting(
        given.count,
        given.workers,
        given.seed,
        signal.SIGSTOP if given.stop else signal.SIGKILL,
        chosen,
        notice=notice,
        references=given.references,
        left_by_lost=given.left_by_lost,
        patience=given.patience,
        transport=given.transport,
    )
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    told = begun = time.monotonic()

    def tell(problems: list[str], done: int) -> None:
        nonlocal told
        for problem in problems:
            write("PROBLEM " + problem.rstrip().replace("\n", "\n  "))
        if time.monotonic() > told + 10:
            told = time.monotonic()
            write(f"{done} of {given.count}, {told - begun:.0f} s")

    verdict = run(setting, tell)
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
    # Without the interpreter's farewell, in which threads of torch may abort the process.
    os._exit(status)
