"""Systems side by side: rows that are measured on all of them in one run, alternating.

A row gets a wall time and the processor time of all processes of its system. What is measured is in the suites. What
becomes of the numbers is in ``report``.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
import math
import multiprocessing
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any, NamedTuple

import torch
from processor_time import group_members, processor_seconds

_KEY = b"a conductor and its sides"
_ROUND_TIMEOUT_SECONDS = 300

OURS, PLAIN, THEIRS = SYSTEM_NAMES = ("backhaul", "plain", "reference")
"""``PLAIN`` is Backhaul too, with ``loss.backward()`` instead of a context."""


class Cost(NamedTuple):
    """What one call or one step costs."""

    wall: float  # seconds
    processor: float  # seconds of all processes of the system
    all_wall: tuple[float, ...] = ()  # of each call, if the row asks for it


Numbers = dict[str, dict[str, Cost]]
"""By row, then by system. A system may lack a row."""


@dataclass(frozen=True)
class Row:
    """One thing to measure, on one of the systems."""

    name: str
    make: Callable[[], Callable[[], Any]]  # runs in the first worker of the system, when the row's turn comes
    per: int = 1  # how many calls or steps one call of it contains
    before: Callable[[], Any] | None = None  # other work before each call, which is not counted
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext  # open while the row is measured
    check: Callable[[], Any] | None = None  # after ``make``: numbers that must be the same on all systems
    end: Callable[[], Any] | None = None  # after the last round
    tail: bool = False  # whether the slowest calls are of interest


@dataclass(frozen=True)
class Suite:
    """Rows that are measured on the same workers."""

    workers: Sequence[str]
    rows: Callable[[str], list[Row]]  # of a system
    join: Callable[[str, str, int, int, str], Callable[[], None]]  # becomes a worker; returns what ends it
    threads: int = 0  # of torch in each worker; 0: the processors divided by the workers
    devices: bool = False  # processes that use a CUDA device cannot be forked


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    rounds: int
    round_seconds: float
    warm_seconds: float  # before each round: everything was stopped


FULL, QUICK = Effort(7, 0.2, 0.15), Effort(3, 0.08, 0.06)


# A worker.


def work(suite: Suite, system: str, rank: int, meet: str, conductor: connection.Connection) -> None:
    """The life of a worker; the first one measures what the conductor asks for."""
    count = len(suite.workers)
    torch.set_num_threads(suite.threads or max(1, (os.cpu_count() or 1) // count))  # as ``bh.launch`` does
    logging.getLogger("backhaul").setLevel(logging.ERROR)  # processes that were stopped suspect each other
    try:
        end = suite.join(system, suite.workers[rank], rank, count, meet)
        if rank == 0:
            serve({row.name: row for row in suite.rows(system)}, conductor)
        end()
    except BaseException:
        if rank == 0:
            conductor.send(traceback.format_exc())
        raise


def serve(rows: dict[str, Row], conductor: connection.Connection) -> None:
    """Measure until the conductor has had enough."""
    ready: tuple[Row, Callable[[], Any]] | None = None
    conductor.send(None)
    while (wanted := conductor.recv()) is not None:
        name, effort = wanted
        if ready is not None and ready[0].name == name:
            conductor.send(measure(*ready, effort))
            continue
        finish(ready)
        row = rows[name]
        ready = row, row.make()
        conductor.send(row.check() if row.check else None)
    finish(ready)


def finish(ready: tuple[Row, Callable[[], Any]] | None) -> None:
    """End a row."""
    if ready is not None and ready[0].end:
        ready[0].end()


def measure(row: Row, call: Callable[[], Any], effort: Effort) -> tuple[list[float], float]:
    """One round: the seconds of each call, and the processor time of one."""
    processes = group_members(os.getpgrp())
    with row.around():
        warm = time.perf_counter() + effort.warm_seconds
        while True:
            if row.before:
                row.before()
            call()
            if time.perf_counter() >= warm:
                break
        times, used = (measure_cold if row.before else measure_hot)(row, call, effort, processes)
    return [each / row.per for each in times], used / len(times) / row.per


def measure_hot(row: Row, call: Callable[[], Any], effort: Effort, processes: list[int]) -> tuple[list[float], float]:
    """Calls in a row."""
    times: list[float] = []
    before = processor_seconds(processes)
    now = time.perf_counter()
    until = now + effort.round_seconds
    while now < until:
        start = now
        call()
        now = time.perf_counter()
        times.append(now - start)
    return times, processor_seconds(processes) - before


def measure_cold(row: Row, call: Callable[[], Any], effort: Effort, processes: list[int]) -> tuple[list[float], float]:
    """Other work before each call, which does not count."""
    assert row.before is not None
    times: list[float] = []
    used = 0.0
    until = time.perf_counter() + 2 * effort.round_seconds
    while time.perf_counter() < until:
        row.before()
        before = processor_seconds(processes)
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
        used += processor_seconds(processes) - before
    return times, used


# A system.


def lead(suites: Sequence[Suite], system: str, address: str) -> None:
    """The head of a system's processes: starts the workers of the suite that the conductor names, one after the other.

    It has no threads, so that it can fork workers that need not import anything.
    """
    importlib.import_module("torch._dynamo")  # optimizers import it at first use, which takes each worker seconds
    with connection.Client(address, "AF_UNIX", authkey=_KEY) as conductor, tempfile.TemporaryDirectory() as folder:
        conductor.send(None)
        while (number := conductor.recv()) is not None:
            suite = suites[number]
            meet = f"file://{folder}/{time.monotonic_ns()}"
            context = multiprocessing.get_context("spawn" if suite.devices else "fork")
            workers: list[Any] = [
                context.Process(target=work, args=(suite, system, rank, meet, conductor))
                for rank in range(len(suite.workers))
            ]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            conductor.send([worker.exitcode for worker in workers])


class Side:
    """A system's processes, and the connection to the one that answers: its head, or the first worker of a suite."""

    def __init__(self, system: str) -> None:
        self.system = system
        self._folder = tempfile.TemporaryDirectory()
        address = f"{self._folder.name}/conductor"
        with connection.Listener(address, "AF_UNIX", authkey=_KEY) as listener:
            command = [sys.executable, *sys.argv, "--side", system, "--at", address]
            environment = {**os.environ, "BENCHMARK_SYSTEM": system}  # for ``programs.api``
            self._head = subprocess.Popen(command, start_new_session=True, env=environment)
            try:
                self._first = listener.accept()
                self._receive()
            except BaseException:  # an interrupt reaches this process alone
                self._kill()
                raise

    def _receive(self) -> Any:
        if not self._first.poll(_ROUND_TIMEOUT_SECONDS):
            raise TimeoutError(f"{self.system} has not answered for {_ROUND_TIMEOUT_SECONDS} s")
        answer = self._first.recv()
        if isinstance(answer, str):
            raise RuntimeError(f"{self.system}: {answer}")
        return answer

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """All processes run inside this; they are stopped before and after."""
        os.killpg(self._head.pid, signal.SIGCONT)
        yield
        os.killpg(self._head.pid, signal.SIGSTOP)

    def ask(self, question: Any) -> Any:
        """Send it and return the answer."""
        with self._running():
            self._first.send(question)
            answer = self._receive()
        return answer

    def __enter__(self) -> Side:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        """End all processes; after an error at once."""
        try:
            if kind is None:
                os.killpg(self._head.pid, signal.SIGCONT)
                self._first.send(None)
                self._head.wait(60)
        finally:
            self._kill()
            self._first.close()
            self._folder.cleanup()

    def _kill(self) -> None:
        """End all processes at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._head.pid, signal.SIGKILL)


# The conductor.


def conduct(
    suites: Sequence[Suite],
    effort: Effort,
    *,
    wanted: Callable[[str], bool] = lambda name: True,
    systems: Sequence[str] = SYSTEM_NAMES,
) -> Numbers:
    """Measure each wanted row on all systems that have it, alternating; medians over all calls.

    Each system has processes of its own: threads of the reference poll without end, also when it has nothing to do, and
    would take the processors from the system that is measured beside it. So the processes of the others are stopped.
    """
    chosen = [[row.name for row in suite.rows(OURS) if wanted(row.name)] for suite in suites]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # else processes that are stopped would stay
    numbers: Numbers = {}
    with contextlib.ExitStack() as stack:
        sides = []
        for system in systems:
            offered = {row.name for suite in suites for row in suite.rows(system)}
            if not offered.isdisjoint(itertools.chain(*chosen)):
                sides.append(stack.enter_context(Side(system)))
        for number, (suite, names) in enumerate(zip(suites, chosen, strict=True)):
            having = {side: {row.name: row for row in suite.rows(side.system)} for side in sides}
            started: list[Side] = []
            for name in names:
                alternating = [side for side in sides if name in having[side]]
                for side in alternating:
                    if side not in started:  # not earlier: workers that are stopped for long lose each other
                        side.ask(number)
                        started.append(side)
                numbers[name] = alternate(name, alternating, effort, having[alternating[0]][name].tail)
            for side in started:
                if any(codes := side.ask(None)):
                    raise RuntimeError(f"workers of {side.system} ended with {codes}: {suite.workers}")
    return numbers


def alternate(name: str, sides: Sequence[Side], effort: Effort, tail: bool) -> dict[str, Cost]:
    """Measure a row in rounds: some calls on one system, some on the next."""
    results = {side.system: side.ask((name, effort)) for side in sides}
    if not same(list(results.values())):
        raise RuntimeError(f"{name}: the systems do not compute the same: {results}")
    walls: dict[str, list[float]] = {side.system: [] for side in sides}
    used: dict[str, list[float]] = {side.system: [] for side in sides}
    for _ in range(effort.rounds):
        for side in sides:
            times, processor = side.ask((name, effort))
            walls[side.system] += times
            used[side.system].append(processor)
    return {
        system: Cost(statistics.median(times), statistics.median(used[system]), tuple(times) if tail else ())
        for system, times in walls.items()
    }


def same(results: Sequence[Any]) -> bool:
    """Whether all systems computed the same numbers; sums in another order differ in the last digits."""
    first, *rest = results
    if first is None:
        return all(each is None for each in rest)
    return all(
        len(each) == len(first) and all(map(lambda a, b: math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-5), first, each))
        for each in rest
    )


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
