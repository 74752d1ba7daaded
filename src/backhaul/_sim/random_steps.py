"""Random steps for workers of a simulation: the programs of ``oracle``, with calls made in every way there is.

A step has to end with the gradients of plain autograd, or with an error of Backhaul's. Some are made in contexts with
replay: those have to be right even if workers are lost, as long as others take their places in time.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from backhaul._autograd.api import Mode, backward, context, get_gradients
from backhaul._autograd.failure.replay import Replay
from backhaul._rpc.api import rpc_async, rpc_sync
from backhaul._rpc.futures import wait_all
from backhaul._rref.handle import RRef
from backhaul._rref.remote import remote
from backhaul._worker.worker import current_worker
from backhaul.errors import BackhaulError
from backhaul.testing.oracle import Body, Program, Result, State, compare, copies, make_program, run_body, run_locally

Tensors = list[torch.Tensor]
Stage = Literal["preparing", "running", "collecting"]
"""Where a step is. What replay is good for is the second: gradients that a worker had when it was lost are gone."""

_REPLAYED_CALL = 60.0  # seconds that calls have for which others may have to be made again


class LostStateError(BackhaulError):
    """This worker was not there when the step began: it has crashed and come back."""


@dataclass(frozen=True)
class RandomStep:
    """One step.

    Attributes:
        run: Names it.
        program: What it computes.
        places: The ids of the workers that stand for those of the program; the first is the driver.
        mode: Of backward.
        order: How often gradients are taken.
        deterministic: Of backward.
        seed: Of the ways that calls are made in.
        replay: Seconds to wait for one that takes the place of a lost worker; 0: the step is lost too.
    """

    run: int
    program: Program
    places: tuple[int, ...]
    mode: Mode
    order: int
    deterministic: bool
    seed: int
    replay: float = 0.0


def draw_trial(
    draw: random.Random, run: int, driver: int, workers: Sequence[int], *, length: int = 6, replay: bool = False
) -> RandomStep:
    """Draw a step that ``driver`` drives over some of ``workers``; it may be one with ``replay``."""
    others = [worker for worker in workers if worker != driver]
    places = (driver, *draw.sample(others, min(len(others), draw.randint(1, 3))))
    fast = draw.random() < 0.25
    program = make_program(
        draw.randrange, workers=len(places), length=length, depth=draw.randint(1, 3), thorough=fast, roots=2
    )
    order = 2 if not fast and draw.random() < 0.1 else 1
    deterministic, seed = draw.random() < 0.2, draw.getrandbits(32)
    patience = draw.choice((0.0, 2.0, 15.0)) if replay and not fast and order == 1 else 0.0
    return RandomStep(run, program, places, "fast" if fast else "exact", order, deterministic, seed, patience)


def run_trial(trial: RandomStep, enter: Callable[[Stage], None] = lambda stage: None) -> list[str]:
    """Run a step on the current worker, its driver; say where it differs from plain autograd. Stages are told."""
    wait_all([rpc_async(place, prepare, args=(trial,)) for place in trial.places])
    everyone = list(enumerate(trial.places))
    replay = Replay(restore=functools.partial(prepare, trial), timeout=trial.replay) if trial.replay else False
    enter("running")
    with context(replay=replay) as ctx:
        roots = serve(trial, 0, trial.program.body, [], 0)
        loss = [root.sum() for root in roots if root.requires_grad]
        for level in range(trial.order):
            if not loss:
                break
            more = level < trial.order - 1
            backward(ctx, loss, create_graph=more, mode=trial.mode, deterministic=trial.deterministic)
            if more:
                costs = [cost for _, place in everyone for cost in rpc_sync(place, penalise, args=(ctx.id, trial))]
                loss = [cost for cost in costs if cost.requires_grad]
        enter("collecting")
        result = Result()
        for worker, place in everyone:
            with torch.no_grad():
                grads, counts = rpc_sync(place, collect, args=(ctx.id, trial))
            result.grads.update({(worker, index): grad for index, grad in enumerate(grads)})
            result.counts.update({(worker, key): n for key, n in counts.items()})
    expected = run_locally(trial.program, order=trial.order)
    if trial.replay:  # hooks run again where a pass does
        expected.counts, result.counts = {}, {}
    return compare(expected, result)


# What workers do for each other.

_states: dict[tuple[str, int], State] = {}  # (incarnation, run) -> what the worker holds


def forget_states() -> None:
    """After a simulation: what steps that failed have left."""
    _states.clear()


def _state(trial: RandomStep) -> State:
    state = _states.get((current_worker().incarnation, trial.run))
    if state is None:
        raise LostStateError(f"nothing is known of step {trial.run}", worker=current_worker().name)
    return state


def prepare(trial: RandomStep) -> None:
    """Make this worker's parameters."""
    worker = current_worker()
    _states[worker.incarnation, trial.run] = State(trial.program, trial.places.index(worker.info.id))


def serve(trial: RandomStep, worker: int, body: Body, args: Tensors, path: int) -> Tensors:
    """Run a body here. ``path`` names the call among those of the step."""
    numbers = itertools.count(1)

    def call(to: int, inner: Body, given: Tensors) -> Tensors:
        return _call(trial, to, inner, given, path * 31 + next(numbers))

    return run_body(body, args, _state(trial), call)


def serve_referred(trial: RandomStep, worker: int, body: Body, args: RRef[Tensors], path: int) -> Tensors:
    """The same, with arguments that have to be fetched."""
    return serve(trial, worker, body, copies(args.to_here()), path)


def relay(value: RRef[Tensors]) -> Tensors:
    """Fetch a value from wherever it is."""
    return copies(value.to_here())


def relay_further(value: RRef[Tensors], place: int) -> RRef[Tensors]:
    """Let another worker fetch it, and keep what it got."""
    return remote(place, relay, args=(value,))


def _call(trial: RandomStep, to: int, body: Body, given: Tensors, path: int) -> Tensors:
    """Call ``serve`` on a worker, in one of the ways there are."""
    draw = random.Random(trial.seed * 1_000_003 + path)
    place, arguments = trial.places[to], (trial, to, body, given, path)
    if trial.replay:  # references are not made again
        if draw.random() < 0.7:
            return rpc_sync(place, serve, args=arguments, timeout=_REPLAYED_CALL)
        return rpc_async(place, serve, args=arguments, timeout=_REPLAYED_CALL).wait()
    way = draw.randrange(8)
    if way < 3:
        return rpc_sync(place, serve, args=arguments)
    if way == 3:
        return rpc_async(place, serve, args=arguments).wait()
    if way == 4:
        return copies(remote(place, serve, args=arguments).to_here())
    if way == 5:
        return rpc_sync(place, serve_referred, args=(trial, to, body, RRef(given), path))
    other = draw.choice(trial.places)
    made: RRef[Tensors] = remote(place, serve, args=arguments)
    if way == 6:
        return rpc_sync(other, relay, args=(made,))
    return copies(rpc_sync(other, relay_further, args=(made, draw.choice(trial.places))).to_here())


def penalise(context_id: int, trial: RandomStep) -> Tensors:
    """What the gradients of this worker's parameters cost."""
    grads = get_gradients(context_id) if _has(context_id) else {}
    return [torch.tanh(grads[p]).pow(2).sum() for p in _state(trial).parameters if p in grads]


def collect(context_id: int, trial: RandomStep) -> tuple[list[torch.Tensor | None], dict[str, int]]:
    """This worker's gradients and counts; forgets the step."""
    state = _state(trial)
    del _states[current_worker().incarnation, trial.run]
    grads: dict[torch.Tensor, Any] = get_gradients(context_id) if _has(context_id) else {}
    return [grads[p].detach() if p in grads else None for p in state.parameters], dict(state.counts)


def _has(context_id: int) -> bool:
    try:
        get_gradients(context_id)
    except LookupError:
        return False
    return True
