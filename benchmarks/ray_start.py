"""Measures how long workers take to start on Ray, and what Backhaul adds to Ray's own start.

Each round starts three sets of actors in a placement group, one set after the other, and waits until all have answered:
actors that do nothing; actors that import torch, as those of any training do; and a cluster of ``bh.ray.start``.

    python benchmarks/ray_start.py
    python benchmarks/ray_start.py --workers 2 --rounds 5
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import ray
from rich.console import Console
from rich.table import Table

import backhaul as bh

SHARE = {"CPU": 0.1}  # so that all actors fit on any machine
END_SECONDS = 60.0


class PlainActor:
    """An actor that imports one module, or none."""

    def __init__(self, module: str | None) -> None:
        if module is not None:
            __import__(module)

    def process(self) -> tuple[int, float]:
        return process()


def process() -> tuple[int, float]:
    """The id of this process, and the processor time that it has taken so far."""
    return os.getpid(), time.process_time()


def await_end(answers: list[tuple[int, float]]) -> float:
    """Wait until the processes of a set are gone, so that they take no time from the next set. Returns the median of
    their processor times.
    """
    deadline = time.monotonic() + END_SECONDS
    while any(os.path.exists(f"/proc/{number}") for number, _ in answers):
        if time.monotonic() > deadline:
            raise TimeoutError(f"actors did not end within {END_SECONDS:g} s: {answers}")
        time.sleep(0.05)
    return statistics.median(seconds for _, seconds in answers)


def start_actors(workers: int, module: str | None) -> tuple[float, float]:
    """Start plain actors as ``bh.ray.start`` does. Returns the seconds until all have answered, and
    those of processor time that one has taken.
    """
    began = time.perf_counter()
    group = ray.util.placement_group([SHARE] * workers, strategy="SPREAD")
    ray.get(group.ready())
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
    kind: Any = ray.remote(PlainActor)
    actors = [
        kind.options(num_cpus=SHARE["CPU"], scheduling_strategy=strategy(group, number)).remote(module)
        for number in range(workers)
    ]
    answers = ray.get([actor.process.remote() for actor in actors])
    took = time.perf_counter() - began
    for actor in actors:
        ray.kill(actor)
    ray.util.remove_placement_group(group)
    return took, await_end(answers)


def start_cluster(workers: int) -> tuple[float, float]:
    """Start a Backhaul cluster. Returns what ``start_actors`` does."""
    began = time.perf_counter()
    with bh.ray.start(workers, resources=SHARE) as cluster:
        answers = cluster.run(process)
        took = time.perf_counter() - began
    return took, await_end(answers)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=8, help="actors of a set (default 8)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default 5)")
    options = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
    ray.init(include_dashboard=False, logging_level="error")
    sets: dict[str, Callable[[], tuple[float, float]]] = {
        "actors of Ray that do nothing": lambda: start_actors(options.workers, None),
        "actors of Ray that import torch": lambda: start_actors(options.workers, "torch"),
        "bh.ray.start": lambda: start_cluster(options.workers),
    }
    start_actors(options.workers, "backhaul")  # files are in the page cache from now on
    times: dict[str, list[tuple[float, float]]] = {what: [] for what in sets}
    for _ in range(options.rounds):
        for what, start in sets.items():
            times[what].append(start())
    table = Table(title=f"Start of {options.workers} workers on {os.cpu_count()} cores, {options.rounds} rounds")
    for column in ("what", "median", "least", "most", "processor time of an actor"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for what, measured in times.items():
        took, processor = zip(*measured, strict=True)
        shown = (statistics.median(took), min(took), max(took), statistics.median(processor))
        table.add_row(what, *(f"{value:.2f} s" for value in shown))
    Console().print(table)
    _, with_torch, ours = times.values()
    added = [mine - theirs for (mine, _), (theirs, _) in zip(ours, with_torch, strict=True)]
    print(f"Backhaul adds to actors that import torch: {statistics.median(added):.2f} s (median over rounds)")


if __name__ == "__main__":
    main()
