"""One run of a simulation in which a worker trains with ``retry_step`` while faults hit the others."""

from __future__ import annotations

import functools
import random
import traceback

import torch

from backhaul._options import Liveness, Options
from backhaul._recovery.random_state import RandomState
from backhaul._sim.cluster import SimCluster, SimProgram
from backhaul._sim.network import NetworkConditions
from backhaul.errors import RendezvousError
from tools.retried_training import TrainingResult, draw_plan, train, train_plainly
from tools.simulation.one_seed import SimulationSetting, SimulationVerdict, run_cluster, run_on_thread

TRAINER = "worker0"
RETRIED_FAULTS = ("replace", "replace in silence", "drop", "cut", "cut one way", "pause", "slow", "break")
"""The kinds of faults. Every worker that crashes is replaced, and the worker that trains does not crash."""

_LIMIT_SECONDS = 3000.0  # of virtual time, for a run
_SETTLE_SECONDS = 60.0  # of virtual time after a run; then nothing may be left


class _RetriedRun:
    """The faults of one run, and what becomes of it."""

    def __init__(self, cluster: SimCluster, setting: SimulationSetting, verdict: SimulationVerdict) -> None:
        self._cluster = cluster
        self._setting = setting
        self._verdict = verdict
        self._draw = random.Random(setting.seed)
        self._names = [f"worker{number}" for number in range(1, setting.workers)]
        self._away: set[str] = set()

    def run(self) -> None:
        """Train under faults, and compare."""
        plan = draw_plan(self._draw, self._names, self._setting.steps)
        count, gap = self._draw.choice((0, 3, 8, 16)), self._draw.choice((0.001, 0.005, 0.05))
        kinds = [kind for kind in RETRIED_FAULTS if kind in self._setting.faults or kind.startswith("replace")]
        begun: list[int] = []  # steps
        program = self._cluster.run(TRAINER, lambda: train(plan, wait=60.0, attempts=100, before=begun.append))
        began = self._cluster.scheduler.now
        while not program.ended and begun[-1:] < [1]:  # the first step takes the first snapshot
            self._cluster.sleep(0.001)
        while not program.ended and self._cluster.scheduler.now < began + _LIMIT_SECONDS:
            self._cluster.sleep(self._draw.expovariate(1 / gap) if count else 1.0)
            if count and not program.ended:
                count -= 1
                kind = self._draw.choice(kinds)
                if self._apply(kind):
                    self._verdict.faults[kind] += 1
        if not program.ended:
            self._verdict.problems.append(f"the run has not ended\n{self._cluster.scheduler.describe()}")
            return
        self._judge(program, train_plainly(plan))
        self._settle()

    def _judge(self, program: SimProgram[TrainingResult], wanted: TrainingResult) -> None:
        try:
            different = program.result().differences(wanted)
        except Exception as error:
            self._verdict.outcomes[type(error).__name__] += len(wanted.losses)
            self._verdict.problems.append("".join(traceback.format_exception(error)))
            program.error = None
            return
        self._verdict.outcomes["wrong" if different else "right"] += len(wanted.losses)
        if different:
            self._verdict.problems.append(f"not as in one process: {', '.join(different)}")

    def _apply(self, kind: str) -> bool:
        cluster, draw, present = self._cluster, self._draw, sorted(set(self._names) - self._away)
        seconds = draw.choice((0.01, 0.3, 2.0, 8.0))
        if kind == "drop":
            return cluster.drop(draw.choice((0.0, 0.001, 1.0)), draw.choice((0.0, 0.001, 1.0)))
        if kind in ("slow", "break"):
            conditions = cluster.network.conditions
            if kind == "slow":
                conditions.slow, conditions.slowness = 0.02, 0.02 / max(conditions.delay, 0.0001)
            else:
                conditions.breaks = draw.choice((0.0, 0.002))
            return True
        if not present:
            return False
        name = draw.choice(present)
        if kind.startswith("cut"):
            cluster.cut(name, TRAINER, seconds)
            if kind == "cut":
                cluster.cut(TRAINER, name, seconds)
        elif kind == "pause":
            cluster.pause(name, seconds)
        else:
            cluster.crash(name, silent=kind == "replace in silence")
            self._away.add(name)
            cluster.spawn(functools.partial(self._bring_back, name, seconds), "faults")
        return True

    def _bring_back(self, name: str, seconds: float) -> None:
        while True:
            self._cluster.sleep(seconds)
            try:
                self._cluster.start(name)
            except RendezvousError:  # it reaches no member
                continue
            self._away.discard(name)
            return

    def _settle(self) -> None:
        """Check that nothing is left."""
        self._cluster.end_faults()
        for _ in range(6):
            self._cluster.sleep(_SETTLE_SECONDS / 6)
            self._cluster.collect()
            if not (self._away or self._cluster.leftovers()):
                return
        left = ", ".join(f"{name} {what} {count}" for (name, what), count in self._cluster.leftovers().items())
        self._verdict.problems.append(f"left behind: {left}; away: {sorted(self._away)}")


@functools.cache
def _warm_up() -> None:
    """Make all that is made once in a process, such as caches of torch: it changes when objects die."""
    for seed in range(4):
        run_on_thread(SimulationSetting(seed, 4, 3), _run)


def run_retried_seed(setting: SimulationSetting) -> SimulationVerdict:
    """Run one seed."""
    _warm_up()
    return run_on_thread(setting, _run)


def _run(setting: SimulationSetting, verdict: SimulationVerdict) -> None:
    draw, before = random.Random(f"cluster {setting.seed}"), RandomState.now()
    torch.manual_seed(setting.seed)  # snapshots have the random numbers of the process
    random.seed(setting.seed)
    options = Options(
        timeout=5.0,
        connect_timeout=1.5,
        backward_timeout=10.0,
        threads=draw.choice((1, 2, 16)),
        rendezvous_timeout=20.0,
        liveness=Liveness(heartbeat_interval=0.5, suspect_after=1.0, lost_after=3.0),
    )
    cluster = SimCluster(
        setting.workers,
        seed=draw.getrandbits(64),
        options=options,
        conditions=NetworkConditions(delay=draw.choice((0.0, 0.0001, 0.002)), silence_seconds=4.0),
        yield_probability=draw.choice((0.0, 0.1, 0.5)),
        keep_trace=setting.keep_trace,
    )
    run_cluster(cluster, verdict, lambda: _RetriedRun(cluster, setting, verdict).run(), before.put_back)
