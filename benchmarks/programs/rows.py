"""The programs as suites of the harness: each has workers of its own, and one row."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from harness import PLAIN, Row, Suite

from programs import api, processes

TITLES = {
    "rnn": "RNN split over two workers, step",
    "ddp": "DDP with a remote embedding table, step",
    "cartpole": "CartPole actors, move",
    "parameter_server": "parameter server, step of three trainers",
    "pipeline": "pipeline of two stages, step",
    "transformer": "transformer split over three workers, step",
}
STEPS_PER_CALL = 5  # the driver of some programs starts trainers, which is no part of a step
CHECKED_STEPS = 10


class Program:
    """One program on one system, from the first row to the last."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._driver: Any = None

    def start(self) -> Callable[[], Any]:
        """Build the model; return what makes some steps."""
        self._driver = processes.driver_of(self._name)
        return functools.partial(self._driver.run, STEPS_PER_CALL)

    def losses(self) -> list[float]:
        """Of the first steps."""
        losses: list[float] = self._driver.run(CHECKED_STEPS)
        return losses

    def end(self) -> None:
        """Let go of all that the program has on its workers."""
        processes.close(self._driver)
        self._driver = None


def rows(name: str, system: str) -> list[Row]:
    """One row, on the systems that the program is written for."""
    if system == PLAIN and not hasattr(processes.program(name), "PlainDriver"):
        return []
    program = Program(name)
    return [Row(TITLES[name], program.start, per=STEPS_PER_CALL, check=program.losses, end=program.end)]


def join(_: str, name: str, rank: int, count: int, meet: str) -> Callable[[], None]:
    """Become a worker of the system that this process is for."""
    return api.join(name, rank, count, meet)


def suites() -> list[Suite]:
    """All programs."""
    return [
        Suite(processes.program(name).WORKERS, functools.partial(rows, name), join, threads=1)
        for name in processes.NAMES
    ]
