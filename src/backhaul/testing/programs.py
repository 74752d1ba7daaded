"""Random distributed programs, as plain data. Knows no worker: ``oracle`` runs them.

A program is a tree of bodies. The driver runs the outermost body; a call runs an inner body on another worker.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch

Choose = Callable[[int], int]
"""Draws a number from 0 to its argument minus 1: ``random.Random(seed).randrange``, or Hypothesis."""

_MAX_CALLS = 14  # of one program


@dataclass(frozen=True)
class Step:
    """One step of a body. Its outputs are appended to the values of the body.

    Attributes:
        kind: ``op``, ``call``, or ``hook``.
        name: The operation, or the number of the worker to call, as text.
        args: Indices of values.
        body: What a call runs.
        key: Identifies this step in counts.
    """

    kind: str
    name: str
    args: tuple[int, ...]
    key: int
    body: Body | None = None


@dataclass(frozen=True)
class Body:
    """A function. Its values are its arguments, then the parameters of its worker, then the outputs of the steps."""

    steps: tuple[Step, ...]
    results: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """A body that the driver (worker 0) runs. Its results are the roots of the backward pass.

    Attributes:
        workers: The number of workers.
        parameters: The number of parameters of each worker.
        hooked: Parameters with a tensor hook, as (worker, index).
        body: What the driver runs.
        seed: Determines the values of the parameters.
    """

    workers: int
    parameters: int
    hooked: tuple[tuple[int, int], ...]
    body: Body
    seed: int


class _ProgramWriter:
    """Draws the bodies of one program."""

    def __init__(
        self, choose: Choose, *, workers: int, parameters: int, length: int, depth: int, thorough: bool
    ) -> None:
        self.choose = choose
        self.thorough = thorough
        self.operations = sorted(OPERATIONS.keys() - ({"detach"} if thorough else set()))
        self.workers = workers
        self.parameters = parameters
        self.length = length
        self.depth = depth
        self.keys = itertools.count(1)
        self.calls = 0

    def body(self, arguments: int, depth: int, results: int) -> Body:
        values = arguments + self.parameters
        steps: list[Step] = []
        for _ in range(1 + self.choose(self.length)):
            step = self.step(values, depth)
            steps.append(step)
            values += len(step.body.results) if step.body is not None else 0 if step.kind == "hook" else 1
        if self.thorough:
            return self.use_everything(steps, arguments, values, results)
        # A result combines some late values, so that most of the body matters, but not all of it.
        picked = []
        made = values
        for _ in range(results):
            total = made - 1 - self.choose(min(made, 4))
            for _ in range(self.choose(4)):
                other = values - 1 - self.choose(min(values, 8))
                steps.append(Step("op", ("add", "mul")[self.choose(2)], (total, other), next(self.keys)))
                total = made
                made += 1
            picked.append(total)
        return Body(tuple(steps), tuple(picked))

    def use_everything(self, steps: list[Step], arguments: int, values: int, results: int) -> Body:
        """Add all unused values to the result, so that every value matters."""
        used = {index for step in steps for index in (step.args if step.kind == "call" else step.args[: _uses(step)])}
        loose = [i for i in range(values) if i not in used and not arguments <= i < arguments + self.parameters]
        total = loose[0] if loose else values - 1
        for index in loose[1:]:
            steps.append(Step("op", "add", (total, index), next(self.keys)))
            total = values
            values += 1
        return Body(tuple(steps), (total,) * results)

    def step(self, values: int, depth: int) -> Step:
        what = self.choose(10)
        if what < 4 and depth > 0 and self.calls < _MAX_CALLS:
            self.calls += 1
            args = tuple(self.value(values) for _ in range(1 + self.choose(2)))
            body = self.body(len(args), depth - 1, 1 + self.choose(2))
            return Step("call", str(self.choose(self.workers)), args, next(self.keys), body)
        if what == 4:
            return Step("hook", "hook", (self.value(values),), next(self.keys))
        name = self.operations[self.choose(len(self.operations))]
        return Step("op", name, (self.value(values), self.value(values)), next(self.keys))

    def value(self, values: int) -> int:
        """Choose mostly a recent value, because deep graphs find more errors than wide ones."""
        return values - 1 - self.choose(min(values, 5)) if self.choose(3) else self.choose(values)


def make_program(
    choose: Choose,
    *,
    workers: int = 3,
    parameters: int = 2,
    length: int = 8,
    depth: int = 3,
    roots: int = 2,
    thorough: bool = False,
) -> Program:
    """Draw a program.

    Args:
        choose: The source of random choices.
        workers: The maximum number of workers.
        parameters: The number of parameters of each worker.
        length: The maximum number of steps in a body.
        depth: How deep calls may nest.
        roots: The maximum number of roots.
        thorough: Whether every message takes part in the backward pass, as fast mode assumes.
    """
    writer = _ProgramWriter(
        choose, workers=workers, parameters=parameters, length=length, depth=depth, thorough=thorough
    )
    hooked = tuple((w, p) for w in range(workers) for p in range(parameters) if choose(4) == 0)
    body = writer.body(0, depth, 1 + choose(roots))
    return Program(workers, parameters, hooked, body, choose(1 << 16))


def _uses(step: Step) -> int:
    """How many arguments of a step affect its output."""
    return {"sin": 1, "square": 1, "hook": 0}.get(step.name, 2)


def _in_place(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.mul_(0.5).add_(b)


OPERATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "add": torch.add,
    "mul": lambda a, b: a * torch.tanh(b),
    "sin": lambda a, b: torch.sin(a),
    "roll": lambda a, b: torch.cat([a[1:], b[:1]]),
    "outer": lambda a, b: (a.unsqueeze(0) * b.unsqueeze(1)).mean(0),
    "detach": lambda a, b: a + b.detach(),
    "inplace": _in_place,
    "square": torch.add,  # a placeholder: the oracle runs a custom function instead
}
