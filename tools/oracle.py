"""Runs random programs over workers, with ``torch.autograd.backward``, and compares them with plain autograd.

``python -m tools.oracle --programs 3000 --order 1 --processes``. Each seed gives one program, see
``backhaul.testing.oracle``. Gradients of all parameters of all workers must be equal, hooks and custom backward
functions must run as often, and no worker may keep anything in the end.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from backhaul._autograd.torch_engine.hooks import node_hooks
from backhaul._launch.embedded import cluster
from backhaul._launch.processes import launch
from backhaul._options import Options
from backhaul._rpc.api import get_debug_info, get_worker_info, rpc_sync
from backhaul._worker.worker import Worker, current_worker
from backhaul.testing.oracle import Result, compare, run_distributed, run_locally, run_plain
from backhaul.testing.programs import Program, make_program

FLAVORS: Sequence[dict[str, Any]] = (
    {},  # most results of such a program are not used
    {"length": 20, "depth": 2, "roots": 4},
    {"length": 12, "thorough": True},  # all of it is used, so most workers get gradients
)
"""How programs are drawn; the seed selects one."""

_PASS_SECONDS = 60.0  # a pass that takes longer is stuck
_FREED_SECONDS = 30.0  # after the last program all records must be gone within this time
_SWITCH_SECONDS = 1e-5  # threads switch this often, so that messages arrive in many orders


@dataclasses.dataclass(frozen=True)
class OracleSetting:
    """The parameters of one run.

    Attributes:
        programs: The number of programs.
        order: The order of differentiation.
        workers: Numbers of workers. Each program runs with one of them.
        first: The first seed.
        processes: Whether each worker is a process of its own.
        contexts: Whether to run in contexts, not outside them.
        threads: How many programs run at once.
        node_hooks: Whether every worker assumes that nodes may have hooks. Then passes take other paths, which are
            slower.
        seconds: Start no program after this time.
    """

    programs: int = 300
    order: int = 1
    workers: Sequence[int] = (2, 3, 4)
    first: int = 0
    processes: bool = False
    contexts: bool = False
    threads: int = 1
    node_hooks: bool = False
    seconds: float = 3600.0


@dataclasses.dataclass
class OracleVerdict:
    """The result of a run.

    Attributes:
        compared: The number of programs that were compared.
        reached: How many of them had gradients on more than one worker.
        differences: What differed, by (workers, seed). An error of a program counts as a difference.
        left: The records that workers kept in the end, by (workers, name).
    """

    compared: int = 0
    reached: int = 0
    differences: dict[tuple[int, int], list[str]] = dataclasses.field(default_factory=dict)
    left: dict[tuple[int, str], int] = dataclasses.field(default_factory=dict)

    def add(self, other: OracleVerdict) -> None:
        """Add the result of another part of the run."""
        self.compared += other.compared
        self.reached += other.reached
        self.differences |= other.differences
        self.left |= other.left


def program_of(seed: int, workers: int) -> Program:
    """The program of a seed."""
    return make_program(random.Random(seed).randrange, workers=workers, **FLAVORS[seed % len(FLAVORS)])


def run(setting: OracleSetting) -> OracleVerdict:
    """Run all programs, with one cluster for each number of workers."""
    verdict = OracleVerdict()
    until = time.monotonic() + setting.seconds
    options = Options(backward_timeout=_PASS_SECONDS)
    for place, workers in enumerate(setting.workers):
        seeds = range(setting.first + place, setting.first + setting.programs, len(setting.workers))
        left = until - time.monotonic()
        drive = functools.partial(_drive, setting, workers, seeds)
        if setting.processes:
            limit = left + 2 * _PASS_SECONDS
            results = launch(drive, workers, args=(left,), options=options, timeout=limit, start_method="forkserver")
            verdict.add(results[0] or OracleVerdict())
        else:
            with cluster(workers, options=options):
                verdict.add(drive(left) or OracleVerdict())
    return verdict


def _drive(setting: OracleSetting, workers: int, seeds: Sequence[int], seconds: float) -> OracleVerdict | None:
    """On worker 0: run the programs of these seeds. All other workers only serve."""
    torch.set_num_threads(1)
    node_hooks.possible = node_hooks.possible or setting.node_hooks
    warnings.filterwarnings("ignore", message="Using backward")  # plain autograd, with create_graph
    if get_worker_info().id != 0:
        return None
    worker, verdict, lock = current_worker(), OracleVerdict(), threading.Lock()
    until, waiting = time.monotonic() + seconds, iter(seeds)

    def work() -> None:
        with worker:
            while time.monotonic() < until:
                with lock:
                    seed = next(waiting, None)
                if seed is None:
                    return
                reached, differences = _compare(setting, program_of(seed, workers))
                with lock:
                    verdict.compared += 1
                    verdict.reached += reached
                    if differences:
                        verdict.differences[workers, seed] = differences

    threads = [threading.Thread(target=work, name=f"oracle-{n}") for n in range(setting.threads)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    verdict.left = {(workers, name): count for name, count in _left_on(worker, workers).items()}
    return verdict


def _compare(setting: OracleSetting, program: Program) -> tuple[bool, list[str]]:
    expected = run_locally(program, order=setting.order)
    reached = len({worker for (worker, _), grad in expected.grads.items() if grad is not None}) > 1
    over_workers: Callable[..., Result] = run_distributed if setting.contexts else run_plain
    try:
        return reached, compare(expected, over_workers(program, order=setting.order))
    except Exception as error:
        return reached, [f"{type(error).__name__}: {error}"]


def _left_on(worker: Worker, workers: int) -> dict[str, int]:
    """The records that are left on the workers. Notices of dropped graphs are asynchronous, so wait for them."""
    until = time.monotonic() + _FREED_SECONDS
    while True:
        found = {f"worker{number}": rpc_sync(number, records_here) for number in range(workers)}
        found = {name: count for name, count in found.items() if count}
        if not found or time.monotonic() > until:
            return found


def records_here() -> int:
    """How many records of messages outside contexts this worker has, once garbage is collected."""
    gc.collect()
    return int(get_debug_info()["num_plain_records"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run programs and print what differs. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.oracle", description=__doc__)
    parser.add_argument("--programs", type=int, default=300, help="the number of programs")
    parser.add_argument("--order", type=int, default=1, help="the order of differentiation")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 3, 4], help="numbers of workers")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", action="store_true", help="make each worker a process")
    parser.add_argument("--contexts", action="store_true", help="run in contexts, with backhaul.backward")
    parser.add_argument("--threads", type=int, default=1, help="how many programs run at once")
    parser.add_argument("--node-hooks", action="store_true", help="assume that nodes may have hooks")
    parser.add_argument("--minutes", type=float, default=60.0, help="start no program after this time")
    given = parser.parse_args(arguments)
    setting = OracleSetting(
        programs=given.programs,
        order=given.order,
        workers=tuple(given.workers),
        first=given.first,
        processes=given.processes,
        contexts=given.contexts,
        threads=given.threads,
        node_hooks=given.node_hooks,
        seconds=given.minutes * 60,
    )
    begun = time.monotonic()
    verdict = run(setting)
    place = "processes" if setting.processes else "one process"
    print(
        f"{verdict.compared} of {setting.programs} programs of order {setting.order} from seed {setting.first}, "
        f"{setting.threads} at once, over {' '.join(map(str, setting.workers))} workers in {place}, "
        f"{'hooks of nodes possible, ' if setting.node_hooks else ''}"
        f"{verdict.reached} with gradients on several workers: {len(verdict.differences)} differ "
        f"({time.monotonic() - begun:.0f} s)"
    )
    for (workers, seed), differences in sorted(verdict.differences.items()):
        again = f"--programs 1 --order {setting.order} --workers {workers} --first {seed}"
        print(f"seed {seed}, {workers} workers (again: {again}):", *differences, sep="\n  ")
    for (workers, name), count in sorted(verdict.left.items()):
        print(f"{name} of {workers} keeps {count} records")
    return int(bool(verdict.differences or verdict.left or not verdict.compared))


if __name__ == "__main__":
    sys.exit(main())
