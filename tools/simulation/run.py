"""One run of a simulation: drivers run random steps while faults hit the cluster."""

from __future__ import annotations

import functools
import random
import traceback
from collections.abc import Callable

from backhaul._options import Liveness, Options
from backhaul._rpc.node import Node
from backhaul._sim.cluster import SimCluster, SimProgram
from backhaul._sim.faults import HARMLESS, SURVIVED, UNREACHABLE, SimulatedFaults
from backhaul._sim.network import NetworkConditions
from backhaul._sim.plain_steps import draw_plain_step, plain_leftovers, run_plain_step
from backhaul._sim.random_steps import RandomStep, Stage, draw_step, forget_states, run_step
from backhaul._worker.worker import current_worker
from backhaul.errors import BackhaulError
from tools.simulation.one_seed import SimulationSetting, SimulationVerdict, run_cluster, run_on_thread

_STEP_LIMIT_SECONDS = 150.0  # of virtual time: more than the sum of all timeouts of a step
_SETTLE_SECONDS = 60.0  # of virtual time after the last fault; then nothing may be left
_MAX_COLLECTIONS = 12  # garbage collections while something is left
_LEEWAY_SECONDS = 0.5  # a worker that joins this late before a deadline may come too late
_REFERENCES = "num_owner_rrefs", "num_forks", "num_user_rrefs"


class _Run:
    """The run of one seed."""

    def __init__(
        self, setting: SimulationSetting, cluster: SimCluster, verdict: SimulationVerdict, draw: random.Random
    ) -> None:
        self._setting = setting
        self._cluster = cluster
        self._verdict = verdict
        self._draw = draw
        self._programs: list[SimProgram[None]] = []
        self._taken = 0  # steps that have begun
        self._begun: dict[int, tuple[str, float]] = {}  # steps under way: the driver's incarnation, and the start time

    @property
    def _is_unharmed(self) -> bool:
        """Whether no fault has happened that may make a step fail."""
        return set(self._verdict.faults) <= HARMLESS

    def driving(self) -> set[str]:
        """The workers that run programs."""
        return {program.worker for program in self._programs if not program.ended}

    def run(self, faults: SimulatedFaults, drivers: int) -> None:
        """Run all steps with ``drivers`` drivers at a time, then check what is left."""
        cluster = self._cluster
        cluster.spawn(functools.partial(self._guard, faults.work), "faults")
        while self._taken < self._setting.steps or faults.busy or self.driving():
            self._programs = [program for program in self._programs if not program.ended]
            names = list(cluster.nodes)
            while len(self._programs) < drivers and self._taken < self._setting.steps:
                self._programs.append(cluster.run(self._draw.choice(names), self._drive))
            cluster.sleep(0.05 if self._cluster.scheduler.random.random() < 0.5 else 0.5)
            self._account()
            for error in faults.failures:
                self._complain("a worker could not join or leave", error)
            if self._verdict.problems:
                return
        faults.over = True
        cluster.end_faults()
        self._settle()

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._complain("the simulation itself failed", error)

    def _account(self) -> None:
        """Account for steps whose driver has crashed, and report steps that take too long."""
        now = self._cluster.scheduler.now
        for run, (incarnation, since) in list(self._begun.items()):
            if incarnation not in {node.worker.incarnation for node in self._cluster.nodes.values()}:
                del self._begun[run]
                self._verdict.outcomes["driver crashed"] += 1
            elif now > since + _STEP_LIMIT_SECONDS:
                where = self._cluster.scheduler.describe()
                self._verdict.problems.append(f"step {run} has not ended after {now - since:.1f} s\n{where}")

    def _drive(self) -> None:
        """Run one step after the other on the current worker."""
        worker = current_worker()
        while self._taken < self._setting.steps and not self._verdict.problems:
            run, self._taken = self._taken, self._taken + 1
            self._begun[run] = worker.incarnation, self._cluster.scheduler.now
            draw = random.Random(self._setting.seed * 1_000_003 + run)
            known = [peer.record.id for peer in worker.part(Node).peers]
            if random.Random(f"plain {self._setting.seed} {run}").random() < self._setting.plain:
                self._run_plain(draw, run, known)
                continue
            step = draw_step(draw, run, worker.info.id, known, replay=self._setting.replay)
            what = "step with replay" if step.replay else "step"
            self._cluster.scheduler.trace.note(f"{what} {run} on {worker.name}")
            stages: dict[Stage, float] = {"preparing": self._cluster.scheduler.now}
            try:
                differences = run_step(step, functools.partial(self._note_stage, stages))
            except BackhaulError as error:
                # Keep text only: the error refers to its frames, and so to everything that they hold.
                self._verdict.errors.append("".join(traceback.format_exception(error)))
                kind = type(error).__name__
                del error
                self._end(run, kind)
                if self._is_unharmed:
                    self._verdict.problems.append(
                        f"step {run} failed although no harmful fault happened\n{self._verdict.errors[-1]}"
                    )
                elif step.replay and self._could_replay(step, stages):
                    self._verdict.problems.append(
                        f"step {run} failed although replay was possible\n{self._verdict.errors[-1]}"
                    )
            except Exception as error:
                self._end(run, type(error).__name__)
                self._complain(f"step {run} failed with an error that is not a BackhaulError", error)
            else:
                self._end(run, ("right, with replay" if step.replay else "right") if not differences else "wrong")
                if differences:
                    self._verdict.problems.append(f"step {run} has wrong gradients: {'; '.join(differences)}")
            self._cluster.collect()

    def _run_plain(self, draw: random.Random, run: int, known: list[int]) -> None:
        """Run a step outside contexts."""
        worker = current_worker()
        self._cluster.scheduler.trace.note(f"plain step {run} on {worker.name}")
        try:
            differences = run_plain_step(draw_plain_step(draw, run, worker.info.id, known))
        except BackhaulError as error:
            self._verdict.errors.append("".join(traceback.format_exception(error)))
            kind = type(error).__name__
            del error
            self._end(run, f"plain {kind}")
            if self._is_unharmed:
                self._verdict.problems.append(
                    f"plain step {run} failed although no harmful fault happened\n{self._verdict.errors[-1]}"
                )
        except Exception as error:
            self._end(run, f"plain {type(error).__name__}")
            self._complain(f"plain step {run} failed with an error that is not a BackhaulError", error)
        else:
            self._end(run, "plain wrong" if differences else "plain right")
            if differences:
                self._verdict.problems.append(f"plain step {run} has wrong gradients: {'; '.join(differences)}")
        self._cluster.collect()

    def _note_stage(self, stages: dict[Stage, float], stage: Stage) -> None:
        stages[stage] = self._cluster.scheduler.now

    def _could_replay(self, step: RandomStep, stages: dict[Stage, float]) -> bool:
        """Whether replay was possible for a failed step: all lost workers were replaced in time."""
        if not set(self._verdict.faults) <= SURVIVED or "collecting" in stages or "running" not in stages:
            return False
        history, now = self._cluster.history, self._cluster.scheduler.now
        names = {peer.record.id: peer.info.name for peer in current_worker().part(Node).peers}
        places = [names[place] for place in step.places if place in names]
        before, since = stages["preparing"], stages["running"]
        # A call waits no longer than its timeout.
        within = min(step.replay, current_worker().options.timeout) - _LEEWAY_SECONDS
        return all(
            history.longest_absence(name, since, now) < within and not history.changed(name, before, since)
            for name in places
        )

    def _end(self, run: int, how: str) -> None:
        self._begun.pop(run, None)
        self._verdict.outcomes[how] += 1
        self._cluster.scheduler.trace.note(f"step {run} ends: {how}")

    def _complain(self, what: str, error: BaseException) -> None:
        self._verdict.problems.append(f"{what}\n{''.join(traceback.format_exception(error))}")

    def _settle(self) -> None:
        """Wait until the workers are idle, check that nothing is left, and shut them down."""
        cluster, faults, checks = self._cluster, self._verdict.faults, self._setting.checks
        for _ in range(_MAX_COLLECTIONS):  # what is freed on one worker may free something on another
            cluster.sleep(_SETTLE_SECONDS / 4)
            forget_states()
            cluster.collect()
            if not (cluster.leftovers() or plain_leftovers(cluster.nodes.values())):
                break
        cluster.sleep(1.0)
        ignored: list[str] = []
        if not checks.left_by_lost and not UNREACHABLE.isdisjoint(faults):
            ignored += ["num_autograd_contexts", *_REFERENCES]
            if faults["crash in silence"]:
                ignored.append("num_pending_calls")  # calls without a timeout
        elif not checks.references and not self._is_unharmed:
            ignored += _REFERENCES
        left = {key: count for key, count in cluster.leftovers().items() if key[1] not in ignored}
        if left:
            self._verdict.problems.append(
                "left behind: " + ", ".join(f"{name} {what} {count}" for (name, what), count in left.items())
            )
        self._verdict.problems += [f"left behind: {text}" for text in plain_leftovers(cluster.nodes.values())]
        try:
            # A graceful shutdown would wait for a silent worker, which may still answer.
            left_open = cluster.shutdown(graceful=not faults["crash in silence"], timeout=60.0)
        except BackhaulError as error:
            self._complain("shutdown failed", error)
        else:
            self._verdict.problems += [f"after shutdown {text}" for text in left_open]


def run_seed(setting: SimulationSetting) -> SimulationVerdict:
    """Run one seed."""
    return run_on_thread(setting, _run_seed)


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
        rendezvous_timeout=20.0,
        liveness=Liveness(heartbeat_interval=1.0, suspect_after=2.0, lost_after=5.0),
    )
    cluster = SimCluster(
        setting.workers,
        seed=draw.getrandbits(64),
        options=options,
        conditions=conditions,
        yield_probability=draw.choice((0.0, 0.1, 0.5)),
        keep_trace=setting.keep_trace,
    )

    def steps() -> None:
        run = _Run(setting, cluster, verdict, draw)
        faults = SimulatedFaults(
            cluster,
            draw,
            setting.faults,
            count=draw.choice((0, 1, 3, 8, 20)),
            gap=draw.choice((0.005, 0.05, 0.5)),
            driving=run.driving,
        )
        verdict.faults = faults.happened
        run.run(faults, draw.choice((1, 1, 2, 3)))

    run_cluster(cluster, verdict, steps, forget_states)
