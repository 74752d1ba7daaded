"""Random training steps: the programs of ``oracle``, with calls made in every way that the API offers.

A step must end with the gradients of plain autograd, or with an error of Backhaul. Some steps run in contexts with
replay. Those must end with the right gradients even if workers are lost, if other workers replace them in time.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from backhaul._autograd.api import Mode, backward, context, get_gradients
from backhaul._autograd.failure.replay import Replay
from backhaul._rpc.api import rpc_async, rpc_sync
from backhaul._rpc.several_futures import wait_all
from backhaul._rref.handle import RRef
from backhaul._rref.remote import remote
from backhaul._worker.worker import current_worker
from backhaul.errors import BackhaulError
from backhaul.testing.oracle import Result, State, compare, copies, run_body, run_locally
from backhaul.testing.programs import Body, Program, make_program

Tensors = list[torch.Tensor]
Stage = Literal["preparing", "running", "collecting"]
"""Where a step is. Replay helps only in the second stage: the gradients that a lost worker had are gone."""

_REPLAYED_CALL_SECONDS = 60.0  # the timeout of a call that may have to wait until other calls are replayed


class LostStateError(BackhaulError):
    """This worker has no state of the step, because it crashed and came back after the step began."""


@dataclass(frozen=True)
class RandomStep:
    """One step.

    Attributes:
        run: The number of the step.
        program: What the step computes.
        places: The ids of the workers that play those of the program. The first is the driver.
        mode: The mode of backward.
        order: The order of the derivatives.
        deterministic: Whether backward is deterministic.
        seed: Determines how each call is made.
        replay: Seconds to wait for the replacement of a lost worker; 0: the step fails.
    """

    run: int
    program: Program
    places: tuple[int, ...]
    mode: Mode
    order: int
    deterministic: bool
    seed: int
    replay: float = 0.0


def draw_step(
    draw: random.Random, run: int, driver: int, workers: Sequence[int], *, length: int = 6, replay: bool = False
) -> RandomStep:
    """Draw a step that ``driver`` drives over some of ``workers``. With ``replay``, some steps use replay."""
    others = [worker for worker in workers if worker != driver]
    places = (driver, *draw.sample(others, min(len(others), draw.randint(1, 3))))
    fast = draw.random() < 0.25
    program = make_program(
        draw.randrange, workers=len(places), length=length, depth=draw.randint(1, 3), thorough=fast, roots=2
    )
    order = 2 if not fast and draw.random() < 0.1 else 1
    deterministic, seed = draw.random() < 0.2, draw.getrandbits(32)
    replay_seconds = draw.choice((0.0, 2.0, 15.0)) if replay and not fast and order == 1 else 0.0
    return RandomStep(run, program, places, "fast" if fast else "exact", order, deterministic, seed, replay_seconds)


def run_step(step: RandomStep, enter: Callable[[Stage], None] = lambda stage: None) -> list[str]:
    """Run a step on the current worker, its driver. Returns its differences from plain autograd.

    ``enter`` is called at the beginning of each stage after the first.
    """
    wait_all([rpc_async(place, prepare, args=(step,)) for place in step.places])
    everyone = list(enumerate(step.places))
    replay = Replay(restore=functools.partial(prepare, step), timeout=step.replay) if step.replay else False
    enter("running")
    with context(replay=replay) as ctx:
        roots = serve(step, 0, step.program.body, [], 0)
        loss = [root.sum() for root in roots if root.requires_grad]
        for level in range(step.order):
            if not loss:
                break
            more = level < step.order - 1
            backward(ctx, loss, create_graph=more, mode=step.mode, deterministic=step.deterministic)
            if more:
                costs = [cost for _, place in everyone for cost in rpc_sync(place, penalize, args=(ctx.id, step))]
                loss = [cost for cost in costs if cost.requires_grad]
        enter("collecting")
        result = Result()
        for worker, place in everyone:
            with torch.no_grad():
                grads, counts = rpc_sync(place, collect, args=(ctx.id, step))
            result.grads.update({(worker, index): grad for index, grad in enumerate(grads)})
            result.counts.update({(worker, key): n for key, n in counts.items()})
    expected = run_locally(step.program, order=step.order)
    if step.replay:  # a repeated pass runs its hooks again
        expected.counts, result.counts = {}, {}
    return compare(expected, result)


# What workers call on each other.

_states: dict[tuple[str, int], State] = {}  # (incarnation, run) -> what the worker holds


def forget_states() -> None:
    """Drop what failed steps have left. Call it after a simulation."""
    states = list(_states.values())
    _states.clear()
    for state in states:
        state.take_gradients()


def state_of(step: RandomStep) -> State:
    """The state of a step on this worker."""
    state = _states.get((current_worker().incarnation, step.run))
    if state is None:
        raise LostStateError(f"this worker has no state of step {step.run}", worker=current_worker().name)
    return state


def prepare(step: RandomStep) -> None:
    """Create this worker's parameters."""
    worker = current_worker()
    _states[worker.incarnation, step.run] = State(step.program, step.places.index(worker.info.id))


def serve(step: RandomStep, worker: int, body: Body, args: Tensors, path: int) -> Tensors:
    """Run a body on this worker. ``path`` identifies the call among all calls of the step."""
    numbers = itertools.count(1)

    def call(to: int, inner: Body, given: Tensors) -> Tensors:
        return _call(step, to, inner, given, path * 31 + next(numbers))

    return run_body(body, args, state_of(step), call)


def serve_referred(step: RandomStep, worker: int, body: Body, args: RRef[Tensors], path: int) -> Tensors:
    """As ``serve``, with arguments that are fetched from their owner."""
    return serve(step, worker, body, copies(args.to_here()), path)


def relay(value: RRef[Tensors]) -> Tensors:
    """Fetch a value from its owner."""
    return copies(value.to_here())


def relay_further(value: RRef[Tensors], place: int) -> RRef[Tensors]:
    """Let another worker fetch a value and own the copy."""
    return remote(place, relay, args=(value,))


def _call(step: RandomStep, to: int, body: Body, given: Tensors, path: int) -> Tensors:
    """Call ``serve`` on a worker in one of the ways that the API offers."""
    draw = random.Random(step.seed * 1_000_003 + path)
    place, arguments = step.places[to], (step, to, body, given, path)
    if step.replay:  # replay does not repeat the creation of references
        if draw.random() < 0.7:
            return rpc_sync(place, serve, args=arguments, timeout=_REPLAYED_CALL_SECONDS)
        return rpc_async(place, serve, args=arguments, timeout=_REPLAYED_CALL_SECONDS).wait()
    way = draw.randrange(8)
    if way < 3:
        return rpc_sync(place, serve, args=arguments)
    if way == 3:
        return rpc_async(place, serve, args=arguments).wait()
    if way == 4:
        return copies(remote(place, serve, args=arguments).to_here())
    if way == 5:
        # A reference to a parameter is to the parameter, also under ``no_grad``. Other ways send copies, which then
        # need no gradient.
        referred = given if torch.is_grad_enabled() else copies(given)
        return rpc_sync(place, serve_referred, args=(step, to, body, RRef(referred), path))
    other = draw.choice(step.places)
    made: RRef[Tensors] = remote(place, serve, args=arguments)
    if way == 6:
        return rpc_sync(other, relay, args=(made,))
    return copies(rpc_sync(other, relay_further, args=(made, draw.choice(step.places))).to_here())


def penalize(context_id: int | None, step: RandomStep) -> Tensors:
    """A loss computed from the gradients of this worker's parameters. They are in ``.grad`` if there is no context."""
    state = state_of(step)
    grads = _gradients(context_id, state)
    return [torch.tanh(grads[p]).pow(2).sum() for p in state.parameters if p in grads]


def collect(context_id: int | None, step: RandomStep) -> tuple[list[torch.Tensor | None], dict[str, int]]:
    """Return this worker's gradients and counts, and drop the state of the step."""
    state = state_of(step)
    del _states[current_worker().incarnation, step.run]
    grads = _gradients(context_id, state)
    found = [grads[p].detach() if p in grads else None for p in state.parameters]
    state.take_gradients()
    return found, dict(state.counts)


def _gradients(context_id: int | None, state: State) -> dict[torch.Tensor, torch.Tensor]:
    if context_id is None:
        return {p: p.grad for p in state.parameters if p.grad is not None}
    return get_gradients(context_id) if _has(context_id) else {}


def _has(context_id: int) -> bool:
    try:
        get_gradients(context_id)
    except LookupError:
        return False
    return True
