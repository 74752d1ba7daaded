"""One seed of a simulation: its parameters, its verdict, and how a cluster runs for it."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import gc
import logging
import threading
import traceback
from collections.abc import Callable, Iterator

from backhaul._autograd.forward import functions
from backhaul._sim.cluster import SimCluster
from backhaul._sim.faults import FAULTS


@dataclasses.dataclass(frozen=True)
class Checks:
    """The optional checks after a run.

    Attributes:
        left_by_lost: No context, pass or call is left of workers that are gone, or that could not be reached when a
            context was released.
        references: No reference to a value is left, even if messages were lost.
    """

    left_by_lost: bool = True
    references: bool = True


@dataclasses.dataclass(frozen=True)
class SimulationSetting:
    """The parameters of one run.

    Attributes:
        seed: Determines all random choices.
        workers: The number of workers at the start.
        steps: The number of steps, over all drivers.
        faults: The kinds of faults to draw from.
        checks: The optional checks at the end.
        replay: Whether some steps run in contexts with replay.
        plain: The share of steps that run outside contexts.
        keep_trace: Whether to keep the lines of the trace.
    """

    seed: int
    workers: int = 8
    steps: int = 20
    faults: tuple[str, ...] = FAULTS
    checks: Checks = Checks()
    replay: bool = True
    plain: float = 0.5
    keep_trace: bool = False


@dataclasses.dataclass
class SimulationVerdict:
    """The result of one run.

    Attributes:
        seed: The seed of the run.
        digest: The hash of all events. Two runs with the same digest were the same.
        outcomes: How many steps ended ``right``, with which error, or with ``driver crashed``.
        faults: How many faults of each kind hit the cluster.
        problems: What must not happen. Empty if the run passed.
        errors: The errors that steps raised, with their tracebacks.
        switches: How often another task ran.
        frames: How many frames were sent.
        virtual: Seconds of virtual time.
        trace: The lines of the trace, if they were kept.
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


class _ErrorCollector(logging.Handler):
    """Collects what is logged as an error. Backhaul logs only unexpected events as errors."""

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
def collected_errors() -> Iterator[list[str]]:
    """What is logged as an error inside the block."""
    log, handler = logging.getLogger("backhaul"), _ErrorCollector()
    level, propagate = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.ERROR)
    log.propagate = False
    try:
        yield handler.found
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagate


def run_on_thread(
    setting: SimulationSetting, run: Callable[[SimulationSetting, SimulationVerdict], None]
) -> SimulationVerdict:
    """Run one seed on a new thread, because torch numbers the nodes of a graph by thread."""
    verdict = SimulationVerdict(setting.seed)
    thread = threading.Thread(target=functools.partial(run, setting, verdict), name=f"seed {setting.seed}")
    thread.start()
    thread.join()
    return verdict


def run_cluster(
    cluster: SimCluster, verdict: SimulationVerdict, work: Callable[[], None], put_back: Callable[[], None]
) -> None:
    """Call ``work`` while a cluster runs, and fill in the verdict. Whatever is raised, or logged as an error, is a
    problem. ``put_back``: restores what the run has changed in this process.
    """
    try:
        with collected_errors() as errors, cluster:
            work()
        verdict.problems += [f"logged: {text}" for text in errors]
    except BaseException as error:
        verdict.problems.append("".join(traceback.format_exception(error)))
    finally:
        put_back()
        gc.collect()  # what crashed workers held
        functions.live.clear()  # message ids of another seed may be the same
    scheduler = cluster.scheduler
    verdict.digest = scheduler.trace.digest
    verdict.switches, verdict.frames, verdict.virtual = scheduler.switches, cluster.network.sent, scheduler.now
    verdict.trace = scheduler.trace.lines or []
