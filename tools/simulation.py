"""Many random steps under random faults, in simulation; each seed is one run that can be repeated exactly.

``python -m tools.simulation --seeds 0:200 --workers 8`` runs two hundred of them. For each step: it ends
with the gradients of plain autograd, or raises an error of Backhaul's in time. Afterwards nothing is left: no context,
no pass, no call, no reference, no thread, no channel.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import faulthandler
import functools
import logging
import os
import random
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence

import torch

from backhaul._rpc.node import Node
from backhaul._sim.cluster import SimCluster, SimProgram
from backhaul._sim.faults import FAULTS, HARMLESS, SURVIVED, UNREACHABLE, SimulatedFaults
from backhaul._sim.network import NetworkConditions
from backhaul._sim.random_steps import RandomStep, Stage, draw_step, forget_states, run_step
from backhaul._types import Options
from backhaul._worker.worker import current_worker
from backhaul.errors import BackhaulError

_STEP_LIMIT = 150.0  # seconds of virtual time: more than all timeouts of a step together
_SETTLING = 60.0  # seconds of virtual time after the last fault until nothing may be left
_ROUNDS = 12  # of collecting garbage, while something is left
_LEEWAY = 0.5  # seconds before the end of its time from which on one that comes may not be noticed
_REFERENCES = "num_owner_rrefs", "num_forks", "num_user_rrefs"
_STUCK = 60.0  # seconds of real time after which a seed must be stuck outside of the scheduler


@dataclasses.dataclass(frozen=True)
class Checks:
    """What is checked after a run besides what always is.

    Attributes:
        left_by_lost: No context, pass or call is left of workers that are gone, or could not be reached when a context
            was released.
        references: Nothing refers to a value any more, even if messages were lost.
    """

    left_by_lost: bool = True
    references: bool = True


@dataclasses.dataclass(frozen=True)
class SimulationSetting:
    """What one run is about.

    Attributes:
        seed: Where everything else comes from.
        workers: How many.
        steps: How many steps, over all drivers.
        faults: The kinds to draw from.
        checks: What is checked in the end.
        replay: Whether some steps are made in contexts with replay.
        keep_trace: Whether to keep the trace.
    """

    seed: int
    workers: int = 8
    steps: int = 20
    faults: tuple[str, ...] = FAULTS
    checks: Checks = Checks()
    replay: bool = True
    keep_trace: bool = False


@dataclasses.dataclass
class SimulationVerdict:
    """What one run gave.

    Attributes:
        seed: Of the run.
        digest: Names the run, event by event.
        outcomes: How many steps ended how: ``right``, the name of an error, or ``driver crashed``.
        faults: How many faults there were of which kind.
        problems: What must not be.
        errors: What steps raised.
        switches: How often one thread went on after another.
        frames: How many were sent.
        virtual: Seconds that passed in the simulation.
        trace: Everything, if it was kept.
    """

    seed: int
    digest: str = ""
    outcomes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    faults: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    problems: list[str] = dataclasses.field(default_factory=list)
    errors: list[str] = dataclasses.field(default_factory=list)
    switches: int = 0
    frames: int = 0
    virtual: float = 0.0
    trace: list[str] = dataclasses.field(default_factory=list)


class _Errors(logging.Handler):
    """Collects what is logged as an error: Backhaul logs so only what it did not expect."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info is not None and record.exc_info[1] is not None:
            error = record.exc_info[1]
            if type(error).__name__ == "Killed":
                return
            text += "\n" + "".join(traceback.format_exception(error))
        self.found.append(text)


@contextlib.contextmanager
def _listening() -> Iterator[list[str]]:
    log, handler = logging.getLogger("backhaul"), _Errors()
    level, spread = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.ERROR)
    log.propagate = False
    try:
        yield handler.found
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = spread


class _Run:
    """One seed."""

    def __init__(
        self, setting: SimulationSetting, cluster: SimCluster, verdict: SimulationVerdict, draw: random.Random
    ) -> None:
        self._setting = setting
        self._cluster = cluster
        self._verdict = verdict
        self._draw = draw
        self._programs: list[SimProgram[None]] = []
        self._taken = 0  # steps that have begun
        self._begun: dict[int, tuple[str, float]] = {}  # steps under way: driver, and since when

    @property
    def _calm(self) -> bool:
        """Whether no fault has happened under which a step may fail."""
        return set(self._verdict.faults) <= HARMLESS

    def driving(self) -> set[str]:
        """The workers that run programs."""
        return {program.worker for program in self._programs if not program.ended}

    def run(self, fate: SimulatedFaults, drivers: int) -> None:
        cluster = self._cluster
        cluster.spawn(functools.partial(self._guard, fate.work), "faults")
        while self._taken < self._setting.steps or fate.busy or self.driving():
            self._programs = [program for program in self._programs if not program.ended]
            names = list(cluster.nodes)
            while len(self._programs) < drivers and self._taken < self._setting.steps:
                self._programs.append(cluster.run(self._draw.choice(names), self._drive))
            cluster.sleep(0.05 if self._cluster.scheduler.random.random() < 0.5 else 0.5)
            self._account()
            for error in fate.failures:
                self._complain("a worker could not join or leave", error)
            if self._verdict.problems:
                return
        fate.over = True
        cluster.end_faults()
        self._settle()

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._complain("the simulation itself failed", error)

    def _account(self) -> None:
        """Notice steps whose driver is gone, and those that take too long."""
        now = self._cluster.scheduler.now
        for run, (incarnation, since) in list(self._begun.items()):
            if incarnation not in {node.worker.incarnation for node in self._cluster.nodes.values()}:
                del self._begun[run]
                self._verdict.outcomes["driver crashed"] += 1
            elif now > since + _STEP_LIMIT:
                where = self._cluster.scheduler.describe()
                self._verdict.problems.append(f"step {run} is not over after {now - since:.1f} s\n{where}")

    def _drive(self) -> None:
        """What a driver does: one step after the other."""
        worker = current_worker()
        while self._taken < self._setting.steps and not self._verdict.problems:
            run, self._taken = self._taken, self._taken + 1
            self._begun[run] = worker.incarnation, self._cluster.scheduler.now
            draw = random.Random(self._setting.seed * 1_000_003 + run)
            known = [peer.record.id for peer in worker.part(Node).peers]
            trial = draw_step(draw, run, worker.info.id, known, replay=self._setting.replay)
            what = "step with replay" if trial.replay else "step"
            self._cluster.scheduler.trace.note(f"{what} {run} on {worker.name}")
            stages: dict[Stage, float] = {"preparing": self._cluster.scheduler.now}
            try:
                differences = run_step(trial, functools.partial(self._note_stage, stages))
            except BackhaulError as error:
                # As text: the error itself refers to all frames it went through, and so to what they held.
                self._verdict.errors.append("".join(traceback.format_exception(error)))
                kind = type(error).__name__
                del error
                self._end(run, kind)
                if self._calm:
                    self._verdict.problems.append(
                        f"step {run} failed although nothing went wrong\n{self._verdict.errors[-1]}"
                    )
                elif trial.replay and self._had_to_survive(trial, stages):
                    self._verdict.problems.append(
                        f"step {run} failed although it could be repeated\n{self._verdict.errors[-1]}"
                    )
            except Exception as error:
                self._end(run, type(error).__name__)
                self._complain(f"step {run} failed with an error that is not ours", error)
            else:
                self._end(run, ("right, with replay" if trial.replay else "right") if not differences else "wrong")
                if differences:
                    self._verdict.problems.append(f"step {run} has wrong gradients: {'; '.join(differences)}")
            self._cluster.collect()

    def _note_stage(self, stages: dict[Stage, float], stage: Stage) -> None:
        stages[stage] = self._cluster.scheduler.now

    def _had_to_survive(self, trial: RandomStep, stages: dict[Stage, float]) -> bool:
        """Whether replay was possible for a step that has failed: all who were lost were replaced in time."""
        if not set(self._verdict.faults) <= SURVIVED or "collecting" in stages or "running" not in stages:
            return False
        cluster, names = self._cluster, {peer.record.id: peer.info.name for peer in current_worker().part(Node).peers}
        places = [names[place] for place in trial.places if place in names]
        before, since = stages["preparing"], stages["running"]
        within = min(trial.replay, current_worker().options.timeout) - _LEEWAY  # no call waits longer than it may
        return all(
            cluster.longest_absence(name, since) < within
            and not any(who == name and before <= when <= since for when, who, _ in cluster.history)
            for name in places
        )

    def _end(self, run: int, how: str) -> None:
        self._begun.pop(run, None)
        self._verdict.outcomes[how] += 1
        self._cluster.scheduler.trace.note(f"step {run} ends: {how}")

    def _complain(self, what: str, error: BaseException) -> None:
        self._verdict.problems.append(f"{what}\n{''.join(traceback.format_exception(error))}")

    def _settle(self) -> None:
        """Nothing may be left."""
        cluster, faults, checks = self._cluster, self._verdict.faults, self._setting.checks
        for _ in range(_ROUNDS):  # what is freed on one worker may free something on another
            cluster.sleep(_SETTLING / 4)
            cluster.collect()
            if not cluster.leftovers():
                break
        cluster.sleep(1.0)
        ignored: list[str] = []
        if not checks.left_by_lost and not UNREACHABLE.isdisjoint(faults):
            ignored += ["num_autograd_contexts", *_REFERENCES]
            if faults["crash in silence"]:
                ignored.append("num_pending_calls")  # those without a timeout
        elif not checks.references and not self._calm:
            ignored += _REFERENCES
        left = {key: count for key, count in cluster.leftovers().items() if key[1] not in ignored}
        if left:
            self._verdict.problems.append(
                "left behind: " + ", ".join(f"{name} {what} {count}" for (name, what), count in left.items())
            )
        try:
            # One that is silent may yet answer, and is waited for.
            left_open = cluster.shutdown(graceful=not faults["crash in silence"], timeout=60.0)
        except BackhaulError as error:
            self._complain("shutdown failed", error)
        else:
            self._verdict.problems += [f"after shutdown {text}" for text in left_open]


def run_seed(setting: SimulationSetting) -> SimulationVerdict:
    """Run one seed. On a thread of its own: torch numbers the nodes of a graph by thread."""
    verdict = SimulationVerdict(setting.seed)
    thread = threading.Thread(target=functools.partial(_run_seed, setting, verdict), name=f"seed {setting.seed}")
    thread.start()
    thread.join()
    return verdict


def _run_seed(setting: SimulationSetting, verdict: SimulationVerdict) -> None:
    draw = random.Random(setting.seed)
    conditions = NetworkConditions(
        delay=draw.choice((0.0, 0.0001, 0.0005, 0.002)),
        capacity=draw.choice((float("inf"), float("inf"), 4096.0)),
        silence_seconds=4.0,
    )
    options = Options(
        timeout=3.0,
        connect_timeout=1.5,
        backward_timeout=8.0,
        threads=draw.choice((1, 2, 16)),
        shutdown_timeout=60.0,
        heartbeat_interval=1.0,
        suspect_after=2.0,
        lost_after=5.0,
        rendezvous_timeout=20.0,
    )
    cluster = SimCluster(
        setting.workers,
        seed=draw.getrandbits(64),
        options=options,
        conditions=conditions,
        yield_probability=draw.choice((0.0, 0.1, 0.5)),
        keep_trace=setting.keep_trace,
    )
    try:
        with _listening() as errors, cluster:
            run = _Run(setting, cluster, verdict, draw)
            fate = SimulatedFaults(
                cluster,
                draw,
                setting.faults,
                count=draw.choice((0, 1, 3, 8, 20)),
                gap=draw.choice((0.005, 0.05, 0.5)),
                driving=run.driving,
            )
            verdict.faults = fate.happened
            run.run(fate, draw.choice((1, 1, 2, 3)))
        verdict.problems += [f"logged: {text}" for text in errors]
    except BaseException as error:
        verdict.problems.append("".join(traceback.format_exception(error)))
    finally:
        forget_states()
    scheduler = cluster.scheduler
    verdict.digest = scheduler.trace.digest
    verdict.switches, verdict.frames, verdict.virtual = scheduler.switches, cluster.network.sent, scheduler.now
    verdict.trace = scheduler.trace.lines or []


# The command.


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.simulation", description=__doc__)
    parser.add_argument("--seeds", default="0:20", help="one seed, or first:last+1 (default 0:20)")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20, help="of each seed")
    parser.add_argument("--faults", default=",".join(FAULTS), help="the kinds to draw from, or 'none'")
    parser.add_argument(
        "--left-by-lost",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="check what lost workers leave behind",
    )
    parser.add_argument(
        "--references",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="check references where messages were lost",
    )
    parser.add_argument(
        "--replay", action=argparse.BooleanOptionalAction, default=True, help="make some steps in contexts with replay"
    )
    parser.add_argument("--errors", help="show errors that steps raised and in which this expression is found")
    parser.add_argument("--twice", action="store_true", help="run each seed twice, and compare")
    parser.add_argument("--trace", help="write what happened to this file; for one seed")
    parser.add_argument("--keep-going", type=int, default=10, help="stop after so many seeds that failed")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None, write: Callable[[str], object] = print) -> int:
    """The command; returns its exit status."""
    given = _parse(arguments)
    first, _, last = given.seeds.partition(":")
    seeds = range(int(first), int(last) if last else int(first) + 1)
    faults = () if given.faults == "none" else tuple(given.faults.split(","))
    if unknown := set(faults) - set(FAULTS):
        raise SystemExit(f"unknown faults {', '.join(sorted(unknown))}; there are {', '.join(FAULTS)}")
    setting = SimulationSetting(
        0,
        given.workers,
        given.steps,
        faults,
        Checks(left_by_lost=given.left_by_lost, references=given.references),
        given.replay,
        keep_trace=given.trace is not None,
    )
    torch.set_num_threads(1)
    outcomes: collections.Counter[str] = collections.Counter()
    struck: collections.Counter[str] = collections.Counter()
    failed: list[int] = []
    switches = frames = 0
    begun = told = time.monotonic()
    for done, seed in enumerate(seeds, 1):
        faulthandler.dump_traceback_later(_STUCK, exit=True)
        verdict = run_seed(dataclasses.replace(setting, seed=seed))
        if given.twice:
            again = run_seed(dataclasses.replace(setting, seed=seed))
            if again.digest != verdict.digest:
                verdict.problems.append(f"two runs of it differ: {verdict.digest} and {again.digest}")
        faulthandler.cancel_dump_traceback_later()
        if given.trace is not None:
            with open(given.trace, "w") as file:
                file.write("\n".join(verdict.trace))
        outcomes += verdict.outcomes
        struck += verdict.faults
        switches += verdict.switches
        frames += verdict.frames
        for error in verdict.errors:
            if given.errors is not None and re.search(given.errors, error):
                write(f"seed {seed}: {error}")
        if verdict.problems:
            failed.append(seed)
            write(f"seed {seed} FAILED ({verdict.digest})")
            for problem in verdict.problems[:5]:
                write("  " + problem.rstrip().replace("\n", "\n  "))
            write(f"  again: {_command(given, seed)}")
        now = time.monotonic()
        if now > told + 5 or len(seeds) == 1:
            told = now
            write(f"{done} of {len(seeds)} seeds, {outcomes.total()} steps, {now - begun:.0f} s, {len(failed)} failed")
        if len(failed) >= given.keep_going:
            break
    spent = time.monotonic() - begun
    write(
        f"{outcomes.total()} steps in {spent:.1f} s ({outcomes.total() / spent:.1f} a second), {frames} frames, "
        f"{switches} switches"
    )
    write("steps:  " + ", ".join(f"{how} {count}" for how, count in outcomes.most_common()))
    write("faults: " + (", ".join(f"{kind} {count}" for kind, count in struck.most_common()) or "none"))
    for seed in failed:
        write(f"failed: {_command(given, seed)}")
    return 1 if failed else 0


def _command(given: argparse.Namespace, seed: int) -> str:
    text = f"python -m tools.simulation --seeds {seed} --workers {given.workers} --steps {given.steps}"
    if given.faults != ",".join(FAULTS):
        text += f" --faults '{given.faults}'"
    text += "" if given.left_by_lost else " --no-left-by-lost"
    text += "" if given.replay else " --no-replay"
    return text + ("" if given.references else " --no-references")


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # Without the interpreter's farewell, in which threads of torch may abort the process.
    os._exit(status)
