"""A gradient oracle: random distributed programs, each run once over workers and once in one process, compared.

``make_program`` draws a program: parameters on several workers, operations, calls that nest and come back, unused
results, in-place changes, shared weights and sub-graphs, hooks, custom functions that are not linear, several
roots. ``run_locally`` is plain autograd; ``run_distributed`` runs the same program through calls and ``backward``;
``compare`` says where they differ: gradients of every parameter of every worker, how often each hook fired, how
often each custom backward ran.

    >>> import random, backhaul as bh
    >>> program = make_program(random.Random(7).randrange, workers=3)
    >>> with bh.cluster(3):
    ...     compare(run_locally(program), run_distributed(program))
    []
"""

from __future__ import annotations

import collections
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from backhaul._autograd.api import Mode, backward, context, get_gradients
from backhaul._rpc.api import get_worker_info, rpc_async, rpc_sync
from backhaul._worker.worker import current_worker

Choose = Callable[[int], int]
"""Draws a number from 0 to below its argument: ``random.Random(seed).randrange``, or Hypothesis."""

_WIDTH = 3  # every value is a vector of this many float64


@dataclass(frozen=True)
class Step:
    """One thing a body does; its outputs are appended to the body's values.

    Attributes:
        kind: ``op``, ``call``, or ``hook``.
        name: Operation, or worker number as text.
        args: Indices of values.
        body: Of a call.
        key: Names this step in counts.
    """

    kind: str
    name: str
    args: tuple[int, ...]
    key: int
    body: Body | None = None


@dataclass(frozen=True)
class Body:
    """A function: its values are its arguments, then its worker's parameters, then what the steps make."""

    steps: tuple[Step, ...]
    results: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """A body that the driver (worker 0) runs; its results are the roots.

    Attributes:
        workers: How many.
        parameters: How many each worker has.
        hooked: Parameters with a tensor hook, as (worker, index).
        body: What runs.
        seed: Of the parameters' values.
    """

    workers: int
    parameters: int
    hooked: tuple[tuple[int, int], ...]
    body: Body
    seed: int


@dataclass
class Result:
    """What a run gave: gradients (or None) by (worker, parameter), and counts by (worker, what)."""

    grads: dict[tuple[int, int], torch.Tensor | None] = field(default_factory=dict)
    counts: dict[tuple[int, str], int] = field(default_factory=dict)


# Drawing.


class _Author:
    def __init__(
        self, choose: Choose, *, workers: int, parameters: int, length: int, depth: int, thorough: bool
    ) -> None:
        self.choose = choose
        self.thorough = thorough
        self.operations = sorted(_OPERATIONS.keys() - ({"detach"} if thorough else set()))
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
        # A result brings some late values together, so that much of the body matters; not all of it will.
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
        """Let every value matter: add those that nobody uses to the result."""
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
        if what < 4 and depth > 0 and self.calls < 14:
            self.calls += 1
            args = tuple(self.value(values) for _ in range(1 + self.choose(2)))
            body = self.body(len(args), depth - 1, 1 + self.choose(2))
            return Step("call", str(self.choose(self.workers)), args, next(self.keys), body)
        if what == 4:
            return Step("hook", "hook", (self.value(values),), next(self.keys))
        name = self.operations[self.choose(len(self.operations))]
        return Step("op", name, (self.value(values), self.value(values)), next(self.keys))

    def value(self, values: int) -> int:
        """Mostly a recent value: deep graphs are more telling than wide ones."""
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
        choose: Where the choices come from.
        workers: How many workers, at most.
        parameters: How many parameters each has.
        length: Steps of a body, at most.
        depth: How deep calls nest.
        roots: How many roots, at most.
        thorough: Whether every message takes part in the backward pass, as fast mode assumes.
    """
    author = _Author(choose, workers=workers, parameters=parameters, length=length, depth=depth, thorough=thorough)
    hooked = tuple((w, p) for w in range(workers) for p in range(parameters) if choose(4) == 0)
    body = author.body(0, depth, 1 + choose(roots))
    return Program(workers, parameters, hooked, body, choose(1 << 16))


# Running.


class _Square(torch.autograd.Function):
    """Squares; its backward is not linear in the gradient, so it notices partial sums."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, state: State, key: str) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.state, ctx.key = state, key
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        ctx.state.count(ctx.key)
        return 2 * x * grad + 0.1 * torch.tanh(grad), None, None


def _uses(step: Step) -> int:
    """How many of its arguments matter to a step."""
    return {"sin": 1, "square": 1, "hook": 0}.get(step.name, 2)


def _in_place(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.mul_(0.5).add_(b)


_OPERATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "add": torch.add,
    "mul": lambda a, b: a * torch.tanh(b),
    "sin": lambda a, b: torch.sin(a),
    "roll": lambda a, b: torch.cat([a[1:], b[:1]]),
    "outer": lambda a, b: (a.unsqueeze(0) * b.unsqueeze(1)).mean(0),
    "detach": lambda a, b: a + b.detach(),
    "inplace": _in_place,
    "square": torch.add,  # stands for _Square; see run_body
}


class State:
    """What one worker holds during a run. Thread-safe."""

    def __init__(self, program: Program, worker: int) -> None:
        self.worker = worker
        self.counts: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()  # guards counts
        make = torch.Generator().manual_seed(program.seed * 64 + worker)
        self.parameters = [
            torch.randn(_WIDTH, dtype=torch.float64, generator=make).requires_grad_() for _ in range(program.parameters)
        ]
        for index, parameter in enumerate(self.parameters):
            if (worker, index) in program.hooked:
                parameter.register_hook(self.hook(f"parameter {index}"))

    def count(self, key: str) -> None:
        """Note that something happened."""
        with self._lock:
            self.counts[key] += 1

    def hook(self, key: str) -> Callable[[torch.Tensor], torch.Tensor]:
        """A tensor hook that is not linear either."""

        def run(grad: torch.Tensor) -> torch.Tensor:
            self.count(key)
            return grad + 0.1 * torch.sin(grad)

        return run


Call = Callable[[int, Body, list[torch.Tensor]], list[torch.Tensor]]


def run_body(body: Body, args: Sequence[torch.Tensor], state: State, call: Call) -> list[torch.Tensor]:
    """Interpret a body on one worker."""
    values = [*args, *state.parameters]
    used: set[int] = set()  # ids of tensors: changing these in place would spoil what somebody saved
    for step in body.steps:
        given = [values[index] for index in step.args]
        if step.name == "inplace" and (id(given[0]) in used or given[0] is given[1] or given[0].is_leaf):
            given[0] = given[0] * 1
        used.update(map(id, given))
        if step.kind == "hook":
            if given[0].requires_grad and not given[0].is_leaf:
                given[0].register_hook(state.hook(f"hook {step.key}"))
        elif step.kind == "call":
            assert step.body is not None
            values.extend(call(int(step.name), step.body, given))
        elif step.name == "square":
            values.append(_Square.apply(given[0], state, f"square {step.key}"))  # type: ignore[no-untyped-call]
        else:
            made = _OPERATIONS[step.name](*given)
            values.append(made)
    return [values[index] for index in body.results]


def copies(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """As a message does it: what is one tensor stays one."""
    made: dict[int, torch.Tensor] = {}
    return [made.setdefault(id(value), value.clone()) for value in values]


def run_locally(program: Program, *, order: int = 1, retain: bool = False) -> Result:
    """Plain autograd in one process; calls copy their arguments and results, as calls do."""
    states = [State(program, worker) for worker in range(program.workers)]

    def call(worker: int, body: Body, args: list[torch.Tensor]) -> list[torch.Tensor]:
        return copies(run_body(body, copies(args), states[worker], call))

    roots = run_body(program.body, [], states[0], call)
    loss = [root.sum() for root in roots if root.requires_grad]
    parameters = [p for state in states for p in state.parameters]
    for level in range(order):
        if not loss:
            break
        torch.autograd.backward(loss, create_graph=level < order - 1)
        grads = [p.grad for p in parameters]
        penalties = [torch.tanh(g).pow(2).sum() for g in grads if g is not None]
        loss = [p for p in penalties if p.requires_grad]
    result = Result()
    for state in states:
        for index, parameter in enumerate(state.parameters):
            result.grads[state.worker, index] = parameter.grad.detach() if parameter.grad is not None else None
            parameter.grad = None  # one that was recorded refers to its parameter: the two would stay for ever
        result.counts.update({(state.worker, key): n for key, n in state.counts.items()})
    return result


_states: dict[tuple[str, int], State] = {}  # (worker's name and incarnation, run) -> its state
_runs = itertools.count()


def _state(run: int) -> State:
    return _states[current_worker().name + current_worker().incarnation, run]


def prepare(program: Program, run: int) -> None:
    """Make this worker's parameters."""
    worker = current_worker()
    _states[worker.name + worker.incarnation, run] = State(program, worker.info.id)


def serve(run: int, body: Body, args: list[torch.Tensor]) -> list[torch.Tensor]:
    """Run a body here."""
    return run_body(body, args, _state(run), lambda worker, b, a: rpc_sync(worker, serve, args=(run, b, a)))


def penalise(context_id: int, run: int) -> list[torch.Tensor]:
    """What the gradients of this worker's parameters cost."""
    grads = get_gradients(context_id)
    return [torch.tanh(grads[p]).pow(2).sum() for p in _state(run).parameters if p in grads]


def collect(context_id: int | None, run: int) -> tuple[list[torch.Tensor | None], dict[str, int]]:
    """This worker's gradients and counts; forgets the run."""
    worker = current_worker()
    state = _states.pop((worker.name + worker.incarnation, run))
    if context_id is None:
        return [None] * len(state.parameters), dict(state.counts)
    grads = get_gradients(context_id) if _has_context(context_id) else {}
    return [grads[p].detach() if p in grads else None for p in state.parameters], dict(state.counts)


def _has_context(context_id: int) -> bool:
    try:
        get_gradients(context_id)
    except LookupError:
        return False
    return True


def run_distributed(program: Program, *, order: int = 1, mode: Mode = "exact", **options: Any) -> Result:
    """The same over the workers of the current cluster, driven by the current one, which must have id 0."""
    run = next(_runs)
    if get_worker_info().id != 0:
        raise ValueError("the driver of a program is worker 0")
    everyone = range(program.workers)
    for future in [rpc_async(worker, prepare, args=(program, run)) for worker in everyone]:
        future.wait()
    with context() as ctx:
        roots = serve(run, program.body, [])
        loss = [root.sum() for root in roots if root.requires_grad]
        for level in range(order):
            if not loss:
                break
            backward(ctx, loss, create_graph=level < order - 1, mode=mode, **options)
            if level < order - 1:
                penalties = [p for worker in everyone for p in _penalties(ctx, worker, run)]
                loss = [p for p in penalties if p.requires_grad]
        result = Result()
        for worker in everyone:
            with torch.no_grad():
                grads, counts = rpc_sync(worker, collect, args=(int(ctx), run))
            result.grads.update({(worker, index): grad for index, grad in enumerate(grads)})
            result.counts.update({(worker, key): n for key, n in counts.items()})
    return result


def _penalties(ctx: int, worker: int, run: int) -> list[torch.Tensor]:
    return rpc_sync(worker, penalise, args=(int(ctx), run))


def compare(expected: Result, found: Result, *, tolerance: float = 1e-9) -> list[str]:
    """Say where two results differ; empty if they do not."""
    differences = []
    for key, grad in expected.grads.items():
        other = found.grads.get(key)
        where = f"parameter {key[1]} of worker {key[0]}"
        if grad is None or other is None:
            if grad is not None or other is not None:
                differences.append(f"{where}: expected {grad}, found {other}")
        elif not torch.allclose(grad, other, rtol=tolerance, atol=tolerance):
            differences.append(f"{where}: expected {grad.tolist()}, found {other.tolist()}")
    for what in sorted(expected.counts.keys() | found.counts.keys()):
        if expected.counts.get(what, 0) != found.counts.get(what, 0):
            differences.append(
                f"{what[1]} on worker {what[0]}: expected {expected.counts.get(what, 0)} times, "
                f"found {found.counts.get(what, 0)}"
            )
    return differences
