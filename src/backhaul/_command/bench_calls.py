"""What ``backhaul bench`` measures, for any system: calls and gradients between two processes of this host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

CALLEE = "callee"
TOGETHER = 100
"""How many calls the row ``together`` makes at once."""

_WARM_UP = 0.25  # the part of the time that is not measured
_LEAST_TIMES = 5


@dataclass(frozen=True, slots=True)
class BenchedSystem:
    """One system: its functions under the names that both systems share.

    Attributes:
        call: Makes a call and waits: ``(to, function, args=...)``.
        submit: Makes a call; returns a future.
        wait: Waits for several futures.
        gradient: Makes a call of ``scale`` and the backward through it; returns the gradient of its argument.
        stop: Ends this worker.
    """

    call: Callable[..., Any]
    submit: Callable[..., Any]
    wait: Callable[[list[Any]], Any]
    gradient: Callable[[torch.Tensor], torch.Tensor]
    stop: Callable[[], None]


def echo(value: torch.Tensor) -> torch.Tensor:
    """Send it back."""
    return value


def scale(value: torch.Tensor) -> torch.Tensor:
    """Something with a gradient."""
    return value * 3.0


def measure(system: BenchedSystem, row: str, seconds: float) -> float:
    """The median time of one operation, in seconds. Measures for so many seconds.

    Raises:
        RuntimeError: The system computed something else than expected.
    """
    run, operations = _operation(system, row)
    warm = time.perf_counter() + seconds * _WARM_UP
    while time.perf_counter() < warm:
        run()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < _LEAST_TIMES:
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times) / operations


def _operation(system: BenchedSystem, row: str) -> tuple[Callable[[], object], int]:
    """What is done again and again, and how many operations that are."""
    if row == "gradient":
        x = torch.ones(16, requires_grad=True)
        if system.gradient(x).tolist() != [3.0] * 16:
            raise RuntimeError("the gradient is wrong")
        return lambda: system.gradient(x), 1
    x = torch.ones(1 << 18 if row == "large" else 16)
    if not torch.equal(system.call(CALLEE, echo, args=(x,)), x):
        raise RuntimeError("the callee answered something else")
    if row == "together":
        return lambda: system.wait([system.submit(CALLEE, echo, args=(x,)) for _ in range(TOGETHER)]), TOGETHER
    return lambda: system.call(CALLEE, echo, args=(x,)), 1
