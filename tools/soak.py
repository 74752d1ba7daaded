"""Runs mixed traffic over worker processes, kills one of them every few seconds, and measures what leaks over time.

``python -m tools.soak --minutes 10``. Several threads of the driver run steps, calls of all sizes and references. Each
operation must give the right result or raise an error of Backhaul. The tool samples memory, threads, descriptors and
shared memory of all workers. After a warm-up they must not grow.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import faulthandler
import functools
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
from pathlib import Path
from typing import Any

import torch

from backhaul._options import Options
from backhaul._rpc.api import rpc_async, rpc_sync
from backhaul._rref.remote import remote
from backhaul._sim.plain_steps import draw_plain_step, run_plain_step
from backhaul._sim.random_steps import draw_step, forget_states, run_step
from backhaul.errors import BackhaulError
from tools.fleet import DRIVER, Exam, Fleet

_SIZES = (1, 100, 10_000, 40_000, 300_000, 2_000_000)  # elements of four bytes: from inline buffers to slots of 8 MiB
_QUIET_SECONDS = 0.2  # without traffic before a sample is taken
_MAX_PROBLEMS = 20
_MEASURES = ("rss", "threads", "sockets", "descriptors", "shm_bytes", "segments")


@dataclasses.dataclass(frozen=True)
class SoakSetting:
    """The parameters of one run.

    Attributes:
        seconds: How long the run takes.
        workers: The number of processes besides the driver's.
        threads: The number of threads of the driver that make traffic.
        every: Seconds from one kill to the next, on average.
        seed: Determines the random choices. The times are not exact.
        sampled: Seconds from one sample to the next.
        growth: By how many bytes the median memory of the last third of the samples may exceed that of the first third.
    """

    seconds: float = 60.0
    workers: int = 3
    threads: int = 3
    every: float = 4.0
    seed: int = 0
    sampled: float = 5.0
    growth: int = 48 << 20


@dataclasses.dataclass
class SoakVerdict:
    """The result of a run. ``outcomes`` counts by (operation, how it ended)."""

    outcomes: collections.Counter[tuple[str, str]] = dataclasses.field(default_factory=collections.Counter)
    problems: list[str] = dataclasses.field(default_factory=list)
    samples: list[tuple[float, dict[str, Exam]]] = dataclasses.field(default_factory=list)
    kills: int = 0
    slowest: float = 0.0


# Functions that the workers run.


def scale(x: torch.Tensor, by: float) -> torch.Tensor:
    """A plain function."""
    return x * by


def nested(x: torch.Tensor, to: str) -> torch.Tensor:
    """A function that calls another worker."""
    return rpc_sync(to, scale, args=(x, 2.0)) + 1


class Soak:
    """One run."""

    def __init__(self, fleet: Fleet, setting: SoakSetting) -> None:
        self._fleet = fleet
        self._setting = setting
        self.verdict = SoakVerdict()
        self._lock = threading.Lock()  # guards the verdict
        self._runs = itertools.count()
        self._over = threading.Event()
        self._open = threading.Event()  # set while threads may make traffic
        self._open.set()
        self._idle = [threading.Event() for _ in range(setting.threads)]
        self._names = fleet.names

    def run(self) -> SoakVerdict:
        """Make traffic and kill workers until the time is over."""
        begun = time.monotonic()
        draw = random.Random(self._setting.seed)
        threads = [
            threading.Thread(target=self._traffic, args=(n,), name=f"soak-{n}", daemon=True)
            for n in range(self._setting.threads)
        ]
        for thread in threads:
            thread.start()
        sampled = begun
        next_kill = begun + self._setting.every
        end = begun + self._setting.seconds
        while (now := time.monotonic()) < end and len(self.verdict.problems) < _MAX_PROBLEMS:
            if now >= next_kill:
                self._kill(draw)
                next_kill = time.monotonic() + draw.uniform(0.5, 1.5) * self._setting.every
            if now >= sampled + self._setting.sampled:
                self._sample(begun)
                sampled = time.monotonic()
            time.sleep(0.05)
        self._over.set()
        self._open.set()
        for thread in threads:
            thread.join(120)
            if thread.is_alive():
                self._complain(f"{thread.name} is stuck")
        self._judge()
        return self.verdict

    def _kill(self, draw: random.Random) -> None:
        victim = draw.choice(self._names)
        self._fleet.signal(victim, signal.SIGKILL)
        time.sleep(draw.uniform(0.0, 0.3))  # the others run without it
        self._fleet.remove(victim)
        self._fleet.replace(victim)
        self.verdict.kills += 1

    def _sample(self, begun: float) -> None:
        """Stop the traffic, so that samples are comparable, and take a sample."""
        self._open.clear()
        for event in self._idle:
            event.wait(60)
        forget_states()
        for name in self._fleet.names:
            rpc_sync(name, forget_states)
        time.sleep(_QUIET_SECONDS)
        exams = self._fleet.exams(thorough=True)
        self.verdict.samples.append((time.monotonic() - begun, exams))
        for name, exam in exams.items():
            for what in ("num_pending_calls", "num_current_backward_passes"):
                if exam.left.get(what):
                    self._complain(f"{name} has {what} {exam.left[what]} although nothing runs")
        self._open.set()

    def _traffic(self, number: int) -> None:
        draw = random.Random(self._setting.seed * 1000 + number)
        operations: list[tuple[str, Callable[[random.Random], bool]]] = [
            ("step", self._step),
            ("plain step", self._plain_step),
            ("call", self._call),
            ("calls at once", self._calls),
            ("nested call", self._nested),
            ("reference", self._reference),
        ]
        with self._fleet.worker:
            while not self._over.is_set():
                if not self._open.is_set():
                    self._idle[number].set()
                    self._open.wait()
                    self._idle[number].clear()
                name, act = draw.choice(operations)
                begun = time.monotonic()
                how = self._try(name, functools.partial(act, draw))
                with self._lock:
                    self.verdict.outcomes[name, how] += 1
                    self.verdict.slowest = max(self.verdict.slowest, time.monotonic() - begun)
        self._idle[number].set()

    def _try(self, name: str, act: Callable[[], bool]) -> str:
        try:
            if act():
                return "right"
            self._complain(f"a {name} gave a wrong result")
            return "wrong"
        except BackhaulError as error:
            error.__traceback__ = None
            return type(error).__name__
        except Exception as error:
            self._complain(f"a {name} failed:\n{''.join(traceback.format_exception(error))}")
            error.__traceback__ = None
            return type(error).__name__

    def _complain(self, what: str) -> None:
        with self._lock:
            self.verdict.problems.append(what)

    # Operations. Each returns whether its result is right.

    def _step(self, draw: random.Random) -> bool:
        numbers = range(len(self._names) + 1)
        return not run_step(draw_step(draw, next(self._runs), 0, numbers, length=5))

    def _plain_step(self, draw: random.Random) -> bool:
        numbers = range(len(self._names) + 1)
        return not run_plain_step(draw_plain_step(draw, next(self._runs), 0, numbers, length=5))

    def _value(self, draw: random.Random) -> torch.Tensor:
        return torch.full((draw.choice(_SIZES),), draw.random())

    def _call(self, draw: random.Random) -> bool:
        x = self._value(draw)
        return torch.equal(rpc_sync(draw.choice(self._names), scale, args=(x, 3.0)), x * 3)

    def _calls(self, draw: random.Random) -> bool:
        values = [self._value(draw) for _ in range(draw.randint(2, 8))]
        futures = [rpc_async(draw.choice(self._names), scale, args=(x, 3.0)) for x in values]
        right = True
        failed: BaseException | None = None
        for x, future in zip(values, futures, strict=True):
            try:
                right &= torch.equal(future.wait(), x * 3)
            except BackhaulError as error:
                failed = error
        if right and failed is not None:
            raise failed
        return right

    def _nested(self, draw: random.Random) -> bool:
        x = self._value(draw)
        first, second = draw.choice(self._names), draw.choice([DRIVER, *self._names])
        return torch.equal(rpc_sync(first, nested, args=(x, second)), x * 2 + 1)

    def _reference(self, draw: random.Random) -> bool:
        x = self._value(draw)
        held: Any = remote(draw.choice(self._names), scale, args=(x, 5.0))
        return torch.equal(held.to_here(), x * 5)

    # Growth.

    def _judge(self) -> None:
        for what in ("rss", "threads", "sockets", "descriptors", "segments"):
            first, last = self.thirds(what)
            allowed = self._setting.growth if what == "rss" else 8
            if last - first > allowed:
                self._complain(f"{what} of the driver grew from {first:.0f} to {last:.0f}")

    def thirds(self, what: str) -> tuple[float, float]:
        """Medians of the first and last third of the driver's samples, without the warm-up."""
        values = [float(getattr(exams[DRIVER], what)) for _, exams in self.verdict.samples]
        values = values[len(values) // 5 :]
        if not values:
            return 0.0, 0.0
        third = max(len(values) // 3, 1)
        return statistics.median(values[:third]), statistics.median(values[-third:])


def run(setting: SoakSetting) -> tuple[SoakVerdict, Soak]:
    """Run a soak test."""
    options = Options(timeout=30.0, backward_timeout=40.0)
    with contextlib.ExitStack() as stack:
        fleet = stack.enter_context(Fleet(setting.workers, options))
        soak = Soak(fleet, setting)
        return soak.run(), soak


def table(verdict: SoakVerdict) -> list[str]:
    """The samples of the driver, and the maximum over all other workers, over time."""
    head = f"{'second':>7} {'driver: MiB':>12} {'threads':>8} {'sockets':>8} {'fds':>5} {'shm MiB':>8}"
    rows = [f"{head}   others at most: MiB, threads, sockets; values, contexts left"]
    step = max(len(verdict.samples) // 20, 1)
    for at, exams in verdict.samples[::step]:
        own = exams[DRIVER]
        others = [exam for name, exam in exams.items() if name != DRIVER]
        most = [max(getattr(exam, what) for exam in others) for what in ("rss", "threads", "sockets")]
        rows.append(
            f"{at:7.0f} {own.rss / (1 << 20):12.1f} {own.threads:8d} {own.sockets:8d} {own.descriptors:5d} "
            f"{own.shm_bytes / (1 << 20):8.1f}   {most[0] / (1 << 20):.1f}, {most[1]}, {most[2]}; "
            f"{sum(exam.left.get('num_owner_rrefs', 0) for exam in exams.values())}, "
            f"{sum(exam.left.get('num_autograd_contexts', 0) for exam in exams.values())}"
        )
    return rows


def plot(verdict: SoakVerdict) -> str:
    """An SVG of the driver's memory, threads and descriptors over time, each scaled to its maximum."""
    width, height = 720, 240
    last = max((at for at, _ in verdict.samples), default=1.0)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height + 40}" font-family="sans-serif">']
    for index, (what, colour) in enumerate(zip(_MEASURES, ("#c33", "#36c", "#393", "#b60", "#737"), strict=False)):
        values = [(at, float(getattr(exams[DRIVER], what))) for at, exams in verdict.samples]
        top = max((value for _, value in values), default=0.0) or 1.0
        points = " ".join(f"{at / last * width:.1f},{height - value / top * (height - 10):.1f}" for at, value in values)
        label = f"{what}, at most {top / (1 << 20):.0f} MiB" if what in ("rss", "shm_bytes") else f"{what}, {top:.0f}"
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(f'<text x="{5 + index * 145}" y="{height + 25}" font-size="12" fill="{colour}">{label}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--every", type=float, default=4.0, help="seconds from one kill to the next, on average")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out"), help="where the plot goes")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None, write: Callable[[str], object] = print) -> int:
    """Run the command. Returns its exit status."""
    given = _parse(arguments)
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    faulthandler.dump_traceback_later(given.minutes * 60 + 300, exit=True)
    seconds = given.minutes * 60
    sampled = max(seconds / 60, 2.0)
    verdict, soak = run(SoakSetting(seconds, given.workers, every=given.every, seed=given.seed, sampled=sampled))
    for row in table(verdict):
        write(row)
    for what in _MEASURES:
        first, last = soak.thirds(what)
        write(f"{what:<12} of the driver, first third {first:,.0f}, last third {last:,.0f}")
    ended = collections.Counter(how for _, how in verdict.outcomes.elements())
    write(f"{verdict.outcomes.total()} operations, {verdict.kills} kills, slowest operation {verdict.slowest:.2f} s")
    for (name, how), count in sorted(verdict.outcomes.items()):
        write(f"  {name}: {how} {count}")
    write("all: " + ", ".join(f"{how} {count}" for how, count in ended.most_common()))
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "soak.svg").write_text(plot(verdict))
    write(f"plot: {given.out / 'soak.svg'}")
    for problem in verdict.problems[:_MAX_PROBLEMS]:
        write("PROBLEM " + problem.rstrip().replace("\n", "\n  "))
    write(f"{len(verdict.problems)} problems")
    return 1 if verdict.problems else 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # Skip the shutdown of the interpreter, in which threads of torch may abort the process.
    os._exit(status)
