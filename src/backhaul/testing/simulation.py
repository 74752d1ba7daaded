"""Many random steps under random faults, in simulation; each seed is one run that can be repeated exactly.

``python -m backhaul.testing.simulation --seeds 0:200 --workers 8`` runs two hundred of them. For each step: it ends
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

from backhaul.errors import BackhaulError
from backhaul.rpc.node import Node
from backhaul.testing.simulated import Program, SimCluster
from backhaul.testing.trials import draw_trial, forget_states, run_trial
from backhaul.transport.sim import Weather
from backhaul.types import Options
from backhaul.worker import current_worker

_STEP_LIMIT = 150.0  # seconds of virtual time: more than all timeouts of a step together
_SETTLING = 60.0  # seconds of virtual time after the last fault until nothing may be left
_REFERENCES = "num_owner_rrefs", "num_forks", "num_user_rrefs"
_STUCK = 120.0  # seconds of real time after which a seed must be stuck outside of the scheduler

FAULTS = (
    "drop",
    "cut",
    "cut one way",
    "pause",
    "crash",
    "crash in silence",
    "restart",
    "join",
    "slow",
    "break",
    "repeat",
)
"""What can go wrong. ``slow``, ``break`` and ``repeat`` change the weather; ``repeat`` is a connection of which the
peer sees the first frame twice.
"""
UNREACHABLE = frozenset({"crash", "crash in silence", "cut", "cut one way", "pause"})
"""Faults under which workers cannot be told that something is over."""
HARMLESS = frozenset({"slow"})
"""Faults under which every step has to succeed."""


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
class Setting:
    """What one run is about.

    Attributes:
        seed: Where everything else comes from.
        workers: How many.
        steps: How many steps, over all drivers.
        faults: The kinds to draw from.
        checks: What is checked in the end.
        keep_trace: Whether to keep the trace.
    """

    seed: int
    workers: int = 8
    steps: int = 20
    faults: tuple[str, ...] = FAULTS
    checks: Checks = Checks()
    keep_trace: bool = False


@dataclasses.dataclass
class Verdict:
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


class Fate:
    """Draws faults and lets them happen.

    Args:
        cluster: What they strike.
        draw: Where they come from.
        kinds: Which there are.
        count: How many.
        gap: Seconds between two of them, on average.
    """

    def __init__(
        self, cluster: SimCluster, draw: random.Random, kinds: Sequence[str], *, count: int, gap: float, open_: bool
    ) -> None:
        self.happened: collections.Counter[str] = collections.Counter()
        self.over = False
        self._cluster = cluster
        self._draw = draw
        self._kinds = [kind for kind in kinds if kind != "join" or open_]
        self._count = count if self._kinds else 0
        self._gap = gap
        self._least = max(2, len(cluster.nodes) // 2)
        self._crashed: list[str] = []
        self._joined = 0

    def work(self) -> None:
        """To be run on a strand that belongs to no worker."""
        for _ in range(self._count):
            self._cluster.sleep(self._draw.expovariate(1 / self._gap))
            if self.over:
                break
            kind = self._draw.choice(self._kinds)
            if self._strike(kind):
                self.happened[kind] += 1
        self.over = True

    def _strike(self, kind: str) -> bool:
        cluster, draw = self._cluster, self._draw
        names = list(cluster.nodes)
        one, other = draw.sample(names, 2)
        seconds = draw.choice((0.01, 0.3, 2.0, 8.0))
        if kind == "drop":
            return cluster.drop(draw.choice((0.0, 0.001, 1.0)), draw.choice((0.0, 0.001, 1.0)))
        if kind in ("cut", "cut one way"):
            cluster.cut(one, other, seconds)
            if kind == "cut":
                cluster.cut(other, one, seconds)
        elif kind == "pause":
            cluster.pause(one, seconds)
        elif kind in ("crash", "crash in silence"):
            if len(names) <= self._least:
                return False
            cluster.crash(one, silent=kind == "crash in silence")
            self._crashed.append(one)
        elif kind == "restart":
            if not self._crashed:
                return False
            cluster.start(self._crashed.pop(draw.randrange(len(self._crashed))))
        elif kind == "join":
            self._joined += 1
            cluster.start(f"newcomer{self._joined}")
        else:
            self._change_weather(kind)
        return True

    def _change_weather(self, kind: str) -> None:
        weather, draw = self._cluster.network.weather, self._draw
        self._cluster.scheduler.trace.note(f"weather: {kind}")
        if kind == "slow":
            weather.slow = draw.choice((0.02, 0.2))
            weather.slowness = 0.02 / max(weather.delay, 0.0001)  # far below all timeouts
        elif kind == "break":
            weather.breaks = draw.choice((0.0, 0.002, 0.02))
        else:
            weather.duplicates = draw.choice((0.0, 0.5, 1.0))


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

    def __init__(self, setting: Setting, cluster: SimCluster, verdict: Verdict, draw: random.Random) -> None:
        self._setting = setting
        self._cluster = cluster
        self._verdict = verdict
        self._draw = draw
        self._taken = 0  # steps that have begun
        self._begun: dict[int, tuple[str, float]] = {}  # steps under way: driver, and since when

    @property
    def _calm(self) -> bool:
        """Whether no fault has happened under which a step may fail."""
        return set(self._verdict.faults) <= HARMLESS

    def run(self, fate: Fate, drivers: int) -> None:
        cluster = self._cluster
        cluster.spawn(functools.partial(self._guard, fate.work), "fate")
        programs: list[Program[None]] = []
        while self._taken < self._setting.steps or any(not program.ended for program in programs):
            programs = [program for program in programs if not program.ended]
            names = list(cluster.nodes)
            while len(programs) < drivers and self._taken < self._setting.steps:
                programs.append(cluster.run(self._draw.choice(names), self._drive))
            cluster.sleep(0.05 if self._cluster.scheduler.random.random() < 0.5 else 0.5)
            self._account()
            if self._verdict.problems:
                return
        fate.over = True
        cluster.calm()
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
            trial = draw_trial(draw, run, worker.info.id, known)
            self._cluster.scheduler.trace.note(f"step {run} on {worker.name}")
            try:
                differences = run_trial(trial)
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
            except Exception as error:
                self._end(run, type(error).__name__)
                self._complain(f"step {run} failed with an error that is not ours", error)
            else:
                self._end(run, "right" if not differences else "wrong")
                if differences:
                    self._verdict.problems.append(f"step {run} has wrong gradients: {'; '.join(differences)}")
            self._cluster.collect()

    def _end(self, run: int, how: str) -> None:
        self._begun.pop(run, None)
        self._verdict.outcomes[how] += 1
        self._cluster.scheduler.trace.note(f"step {run} ends: {how}")

    def _complain(self, what: str, error: BaseException) -> None:
        self._verdict.problems.append(f"{what}\n{''.join(traceback.format_exception(error))}")

    def _settle(self) -> None:
        """Nothing may be left."""
        cluster, faults, checks = self._cluster, self._verdict.faults, self._setting.checks
        for _ in range(4):  # what is freed on one worker may free something on another
            cluster.sleep(_SETTLING / 4)
            cluster.collect()
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
            # Nobody can wait for those that nobody has been told of.
            graceful = not faults["restart"] and not faults["join"] and not faults["crash in silence"]
            left_open = cluster.shutdown(graceful=graceful, timeout=60.0)
        except BackhaulError as error:
            self._complain("shutdown failed", error)
        else:
            self._verdict.problems += [f"after shutdown {text}" for text in left_open]


def run_seed(setting: Setting) -> Verdict:
    """Run one seed. On a thread of its own: torch numbers the nodes of a graph by thread."""
    verdict = Verdict(setting.seed)
    thread = threading.Thread(target=functools.partial(_run_seed, setting, verdict), name=f"seed {setting.seed}")
    thread.start()
    thread.join()
    return verdict


def _run_seed(setting: Setting, verdict: Verdict) -> None:
    draw = random.Random(setting.seed)
    open_ = "join" in setting.faults and draw.random() < 0.3
    weather = Weather(
        delay=draw.choice((0.0, 0.0001, 0.0005, 0.002)),
        capacity=draw.choice((float("inf"), float("inf"), 4096.0)),
        patience=4.0,
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
    )
    cluster = SimCluster(
        setting.workers,
        seed=draw.getrandbits(64),
        options=options,
        weather=weather,
        eagerness=draw.choice((0.0, 0.1, 0.5)),
        keep_trace=setting.keep_trace,
    )
    try:
        with _listening() as errors, cluster:
            fate = Fate(
                cluster,
                draw,
                setting.faults,
                count=draw.choice((0, 1, 3, 8, 20)),
                gap=draw.choice((0.005, 0.05, 0.5)),
                open_=open_,
            )
            verdict.faults = fate.happened
            run = _Run(setting, cluster, verdict, draw)
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
    parser = argparse.ArgumentParser(prog="python -m backhaul.testing.simulation", description=__doc__)
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
    setting = Setting(
        0,
        given.workers,
        given.steps,
        faults,
        Checks(left_by_lost=given.left_by_lost, references=given.references),
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
    text = f"python -m backhaul.testing.simulation --seeds {seed} --workers {given.workers} --steps {given.steps}"
    if given.faults != ",".join(FAULTS):
        text += f" --faults '{given.faults}'"
    text += "" if given.left_by_lost else " --no-left-by-lost"
    return text + ("" if given.references else " --no-references")


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # Without the interpreter's farewell, in which threads of torch may abort the process.
    os._exit(status)
