"""A gradient oracle: it runs a random program over workers and in one process, and compares the gradients.

``make_program`` (``programs``) draws a program: parameters on several workers, operations, nested calls, calls back to
the caller, unused results, in-place changes, shared weights and sub-graphs, hooks, non-linear custom functions, several
roots. ``run_locally`` is autograd in one process. ``run_distributed`` runs the same program in a context, and
``run_plain`` runs it without one, with ``torch.autograd.backward``.
``compare`` lists the differences: gradients of every parameter of every worker, how often each hook fired, how often
each custom backward ran.

    >>> import random, backhaul as bh
    >>> from backhaul.testing.programs import make_program
    >>> program = make_program(random.Random(7).randrange, workers=3)
    >>> with bh.cluster(3):
    ...     compare(run_locally(program), run_distributed(program))
    ...     compare(run_locally(program), run_plain(program))
    []
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
from backhaul.testing.programs import OPERATIONS, Body, Program

_WIDTH = 3  # every value is a float64 vector of this length


@dataclass
class Result:
    """The result of a run: gradients (or None) by (worker, parameter), and counts by (worker, event)."""

    grads: dict[tuple[int, int], torch.Tensor | None] = field(default_factory=dict)
    counts: dict[tuple[int, str], int] = field(default_factory=dict)


class _Square(torch.autograd.Function):
    """The square. Its backward is not linear in the gradient, so partial sums give a wrong result."""

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

    def take_gradients(self) -> list[torch.Tensor | None]:
        """Return the gradients of all parameters, and set ``.grad`` to None. A recorded gradient refers to its
        parameter, so both would never be freed.
        """
        found = [None if parameter.grad is None else parameter.grad.detach() for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        return found

    def count(self, key: str) -> None:
        """Count an event."""
        with self._lock:
            self.counts[key] += 1

    def hook(self, key: str) -> Callable[[torch.Tensor], torch.Tensor]:
        """A tensor hook that is not linear in the gradient, either."""

        def run(grad: torch.Tensor) -> torch.Tensor:
            self.count(key)
            return grad + 0.1 * torch.sin(grad)

        return run


Call = Callable[[int, Body, list[torch.Tensor]], list[torch.Tensor]]


def run_body(body: Body, args: Sequence[torch.Tensor], state: State, call: Call) -> list[torch.Tensor]:
    """Interpret a body on one worker."""
    values = [*args, *state.parameters]
    used: set[int] = set()  # ids of tensors that other operations may have saved, so that they must not change in place
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
            made = OPERATIONS[step.name](*given)
            values.append(made)
    return [values[index] for index in body.results]


def copies(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors as a message does. A tensor that occurs twice is copied once."""
    made: dict[int, torch.Tensor] = {}
    return [made.setdefault(id(value), value.clone()) for value in values]


def run_locally(program: Program, *, order: int = 1, retain: bool = False) -> Result:
    """Run a program with plain autograd in one process. Calls copy their arguments and results, as remote calls do."""
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
        result.grads.update({(state.worker, index): grad for index, grad in enumerate(state.take_gradients())})
        result.counts.update({(state.worker, key): n for key, n in state.counts.items()})
    return result


_states: dict[tuple[str, int], State] = {}  # (worker's name and incarnation, run) -> its state
_runs = itertools.count()


def _state(run: int) -> State:
    return _states[current_worker().name + current_worker().incarnation, run]


def prepare(program: Program, run: int) -> None:
    """Create this worker's parameters."""
    worker = current_worker()
    _states[worker.name + worker.incarnation, run] = State(program, worker.info.id)


def serve(run: int, body: Body, args: list[torch.Tensor]) -> list[torch.Tensor]:
    """Run a body on this worker."""
    return run_body(body, args, _state(run), lambda worker, b, a: rpc_sync(worker, serve, args=(run, b, a)))


def penalize(context_id: int | None, run: int) -> list[torch.Tensor]:
    """A loss computed from the gradients of this worker's parameters. They are in ``.grad`` if there is no context."""
    grads = _gradients(context_id, _state(run))
    return [torch.tanh(grads[p]).pow(2).sum() for p in _state(run).parameters if p in grads]


def _gradients(context_id: int | None, state: State) -> dict[torch.Tensor, torch.Tensor]:
    if context_id is None:
        return {p: p.grad for p in state.parameters if p.grad is not None}
    return get_gradients(context_id) if _has_context(context_id) else {}


def collect(context_id: int | None, run: int) -> tuple[list[torch.Tensor | None], dict[str, int]]:
    """Return this worker's gradients and counts, and drop the state of the run."""
    worker = current_worker()
    state = _states.pop((worker.name + worker.incarnation, run))
    grads = _gradients(context_id, state)
    found = [grads[p].detach() if p in grads else None for p in state.parameters]
    state.take_gradients()
    return found, dict(state.counts)


def _has_context(context_id: int) -> bool:
    try:
        get_gradients(context_id)
    except LookupError:
        return False
    return True


def run_distributed(program: Program, *, order: int = 1, mode: Mode = "exact", **options: Any) -> Result:
    """Run a program over the workers of the current cluster. The current worker drives it and must have id 0."""
    with context() as ctx:
        return _run(
            program,
            order,
            int(ctx),
            lambda loss, create: backward(ctx, loss, create_graph=create, mode=mode, **options),
        )


def run_plain(program: Program, *, order: int = 1) -> Result:
    """As ``run_distributed``, outside contexts: ``torch.autograd.backward`` runs over all workers."""
    return _run(program, order, None, lambda loss, create: torch.autograd.backward(loss, create_graph=create))


def _run(
    program: Program, order: int, context_id: int | None, run_backward: Callable[[list[torch.Tensor], bool], None]
) -> Result:
    run = next(_runs)
    if get_worker_info().id != 0:
        raise ValueError(f"worker 0 must drive the program, but this is worker {get_worker_info().id}")
    everyone = range(program.workers)
    for future in [rpc_async(worker, prepare, args=(program, run)) for worker in everyone]:
        future.wait()
    roots = serve(run, program.body, [])
    loss = [root.sum() for root in roots if root.requires_grad]
    del roots
    for level in range(order):
        if not loss:
            break
        run_backward(loss, level < order - 1)
        if level < order - 1:
            penalties = [p for worker in everyone for p in rpc_sync(worker, penalize, args=(context_id, run))]
            loss = [p for p in penalties if p.requires_grad]
            del penalties
    result = Result()
    for worker in everyone:
        with torch.no_grad():
            grads, counts = rpc_sync(worker, collect, args=(context_id, run))
        result.grads.update({(worker, index): grad for index, grad in enumerate(grads)})
        result.counts.update({(worker, key): n for key, n in counts.items()})
    return result


def compare(expected: Result, found: Result, *, tolerance: float = 1e-9) -> list[str]:
    """List the differences of two results. Empty if there are none."""
    differences = []
    for key, grad in expected.grads.items():
        other = found.grads.get(key)
        where = f"parameter {key[1]} of worker {key[0]}"
        if grad is None or other is None:
            if grad is not None or other is not None:
                differences.append(f"{where}: expected {grad}, found {other}")
        elif not torch.allclose(grad, other, rtol=tolerance, atol=tolerance, equal_nan=True):
            differences.append(f"{where}: expected {grad.tolist()}, found {other.tolist()}")
    for what in sorted(expected.counts.keys() | found.counts.keys()):
        if expected.counts.get(what, 0) != found.counts.get(what, 0):
            differences.append(
                f"{what[1]} on worker {what[0]}: expected {expected.counts.get(what, 0)} times, "
                f"found {found.counts.get(what, 0)}"
            )
    return differences
