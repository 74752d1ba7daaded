"""Random training steps outside contexts: several graphs live at the same time, and a script says what becomes of them.

A step is a script. It makes graphs, goes back through them once or several times, and drops them. ``run_plain_step``
runs the script over workers and with plain autograd in one process, and lists the differences.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from backhaul._autograd.backward.engine import Engine
from backhaul._autograd.forward import functions
from backhaul._autograd.forward.functions import PlainRecv
from backhaul._rpc.api import rpc_async, rpc_sync
from backhaul._rpc.node import Node
from backhaul._rpc.several_futures import wait_all
from backhaul._sim.random_steps import (
    RandomStep,
    Tensors,
    collect,
    draw_step,
    penalize,
    prepare,
    serve,
    state_of,
)
from backhaul._worker.worker import current_worker
from backhaul.testing.oracle import Result, State, compare, copies, run_body
from backhaul.testing.programs import Body

Kind = Literal["forward", "values", "drop", "backward", "grad", "inputs", "penalize", "clear", "wait"]
"""What an action does:

- ``forward`` makes a graph: it runs the program. Its losses are the sums of the results that require grad.
- ``values`` runs the program under ``no_grad``. Nothing is recorded, and the results are compared.
- ``drop`` forgets a graph.
- ``backward`` goes back through graphs with ``torch.autograd.backward``, ``inputs`` as far as the driver's parameters.
- ``grad`` is ``torch.autograd.grad`` for the driver's parameters. With ``create``, the gradients make another graph.
- ``penalize`` makes a graph from the gradients of all workers.
- ``clear`` takes the gradients of all workers, and sets ``.grad`` to None.
- ``wait`` lets time pass.
"""

_SECONDS = (0.01, 0.3, 2.0, 6.0)  # that a step waits; some are longer than it takes to find a worker lost

_MAX_ORDER = 3  # of derivatives: the graph grows with each


@dataclass(frozen=True)
class Action:
    """One action of a step.

    Attributes:
        kind: What it does.
        graphs: The graphs that it uses, by number.
        made: The number of the graph that it makes.
        retain: Whether the graphs can be used again.
        create: Whether the gradients are recorded.
        seconds: How long it waits.
    """

    kind: Kind
    graphs: tuple[int, ...] = ()
    made: int = -1
    retain: bool = False
    create: bool = False
    seconds: float = 0.0


@dataclass(frozen=True)
class PlainStep:
    """A step outside contexts: ``step`` says what a forward computes and where."""

    step: RandomStep
    actions: tuple[Action, ...]


class _ScriptWriter:
    """Draws the actions of one step."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._made = 0
        self.actions: list[Action] = []

    def write(self) -> tuple[Action, ...]:
        draw = self._draw
        kept: list[int] = []
        for _ in range(draw.choice((1, 1, 2, 3))):
            if draw.random() < 0.1:
                self.actions.append(Action("values"))
            kept.append(self._make("forward"))
            if draw.random() < 0.6:
                self._use(kept.pop())
            elif draw.random() < 0.2:
                self.actions.append(Action("wait", seconds=draw.choice(_SECONDS)))
        draw.shuffle(kept)
        while kept:
            if len(kept) > 1 and draw.random() < 0.3:
                self.actions.append(Action("backward", (kept.pop(), kept.pop())))
            else:
                self._use(kept.pop())
        return tuple(self.actions)

    def _make(self, kind: Kind, graphs: tuple[int, ...] = (), *, retain: bool = False, create: bool = False) -> int:
        number, self._made = self._made, self._made + 1
        self.actions.append(Action(kind, graphs, number, retain, create))
        return number

    def _use(self, graph: int, order: int = 1) -> None:
        """Go back through a graph, or drop it. ``order``: of the derivatives that the pass computes."""
        draw, actions = self._draw, self.actions
        while draw.random() < 0.3:  # the graph can be used again
            actions.append(Action(draw.choice(("backward", "backward", "grad", "inputs")), (graph,), retain=True))
        way = draw.randrange(10 if order < _MAX_ORDER else 8)
        if way < 4:
            actions.append(Action("backward", (graph,)))
        elif way < 6:
            actions.append(Action("drop", (graph,)))
        elif way == 6:
            actions.append(Action("grad", (graph,)))
        elif way == 7:
            actions.append(Action("inputs", (graph,)))
        else:
            if way == 8:
                actions.append(Action("backward", (graph,), retain=True, create=True))
                made = self._make("penalize")
            else:
                made = self._make("grad", (graph,), retain=True, create=True)
            if draw.random() < 0.5:
                actions.append(Action("drop", (graph,)))
            self._use(made, order + 1)
            if way == 8:  # the graph of the gradients may be freed now, so no pass may go back through them
                actions.append(Action("clear"))


def draw_plain_step(
    draw: random.Random, run: int, driver: int, workers: Sequence[int], *, length: int = 6
) -> PlainStep:
    """Draw a step that ``driver`` drives over some of ``workers``."""
    step = draw_step(draw, run, driver, workers, length=length)
    return PlainStep(step, _ScriptWriter(draw).write())


def plain_step(step: RandomStep) -> PlainStep:
    """A step outside contexts that does what ``step`` does in one."""
    return PlainStep(step, (Action("forward", made=0), Action("backward", (0,))))


def run_plain_step(step: PlainStep) -> list[str]:
    """Run a step on the current worker, its driver. Returns its differences from plain autograd."""
    everyone = _Workers(step.step)
    seen = _run_script(step.actions, everyone)
    found = everyone.result()
    del everyone
    alone = _OneProcess(step.step)
    expected_seen = _run_script(step.actions, alone)
    for result, tensors in ((found, seen), (alone_result := alone.result(), expected_seen)):
        result.grads.update({(-1, number): tensor for number, tensor in enumerate(tensors)})
    if any(action.kind in ("grad", "inputs") for action in step.actions):
        alone_result.counts, found.counts = {}, {}
    return compare(alone_result, found)


class _Executor(Protocol):
    """Runs the program of a step. ``parameters`` are those of the driver."""

    parameters: Tensors

    def forward(self) -> Tensors:
        """Run the program."""

    def penalize(self) -> Tensors:
        """A loss computed from the gradients of all workers."""

    def clear(self) -> list[torch.Tensor | None]:
        """Take the gradients of all workers."""

    def wait(self, seconds: float) -> None:
        """Let time pass."""


def _run_script(actions: Sequence[Action], on: _Executor) -> list[torch.Tensor | None]:
    """Run all actions. Returns the gradients and values that the script got."""
    graphs: dict[int, Tensors] = {}
    seen: list[torch.Tensor | None] = []
    for action in actions:
        kind, made = action.kind, None
        losses = [loss for graph in action.graphs for loss in graphs[graph]]
        if kind == "forward":
            made = [root.sum() for root in on.forward() if root.requires_grad]
        elif kind == "values":
            with torch.no_grad():
                seen += on.forward()
        elif kind == "penalize":
            made = [loss for loss in on.penalize() if loss.requires_grad]
        elif kind == "clear":
            seen += on.clear()
        elif kind == "wait":
            on.wait(action.seconds)
        elif kind == "grad":
            grads = _gradients_of(losses, on.parameters, action)
            seen += [None if grad is None else grad.detach().clone() for grad in grads]
            made = [torch.tanh(grad).pow(2).sum() for grad in grads if grad is not None and grad.requires_grad]
            del grads
        elif kind != "drop" and losses:
            inputs = on.parameters if kind == "inputs" else None
            torch.autograd.backward(losses, retain_graph=action.retain, create_graph=action.create, inputs=inputs)
        del losses
        if made is not None and action.made >= 0:
            graphs[action.made] = made
        if not action.retain:
            for graph in action.graphs:
                del graphs[graph]
        del made
    return seen


def _gradients_of(losses: Tensors, inputs: Tensors, action: Action) -> Sequence[torch.Tensor | None]:
    if not losses:
        return ()
    return torch.autograd.grad(
        losses, inputs, retain_graph=action.retain, create_graph=action.create, allow_unused=True
    )


class _OneProcess:
    """Runs a step in one process. Calls copy their arguments and results, as remote calls do."""

    def __init__(self, step: RandomStep) -> None:
        self._program = step.program
        self._states = [State(step.program, worker) for worker in range(step.program.workers)]
        self.parameters = self._states[0].parameters

    def forward(self) -> Tensors:
        return run_body(self._program.body, [], self._states[0], self._call)

    def _call(self, worker: int, body: Body, args: Tensors) -> Tensors:
        given = copies(args)
        with torch.enable_grad():  # a remote function runs with gradients even if its caller wants none
            results = run_body(body, given, self._states[worker], self._call)
        return copies(results)

    def penalize(self) -> Tensors:
        grads = [p.grad for state in self._states for p in state.parameters]
        return [torch.tanh(grad).pow(2).sum() for grad in grads if grad is not None]

    def clear(self) -> list[torch.Tensor | None]:
        return [grad for state in self._states for grad in state.take_gradients()]

    def wait(self, seconds: float) -> None:
        """One process waits for nothing."""

    def result(self) -> Result:
        """The gradients and counts of all workers."""
        result = Result()
        for state in self._states:
            result.grads.update({(state.worker, index): grad for index, grad in enumerate(state.take_gradients())})
            result.counts.update({(state.worker, key): n for key, n in state.counts.items()})
        return result


def clear(step: RandomStep) -> list[torch.Tensor | None]:
    """Take the gradients of this worker."""
    return state_of(step).take_gradients()


class _Workers:
    """Runs a step over workers."""

    def __init__(self, step: RandomStep) -> None:
        self._step = step
        wait_all([rpc_async(place, prepare, args=(step,)) for place in step.places])
        self.parameters = state_of(step).parameters

    def forward(self) -> Tensors:
        return serve(self._step, 0, self._step.program.body, [], 0)

    def penalize(self) -> Tensors:
        return [cost for place in self._step.places for cost in rpc_sync(place, penalize, args=(None, self._step))]

    def clear(self) -> list[torch.Tensor | None]:
        with torch.no_grad():
            return [grad for place in self._step.places for grad in rpc_sync(place, clear, args=(self._step,))]

    def wait(self, seconds: float) -> None:
        """Wait in the time of the worker, which may be virtual."""
        current_worker().runtime.one_shot().wait(seconds)

    def result(self) -> Result:
        """The gradients and counts of all workers."""
        result = Result()
        for worker, place in enumerate(self._step.places):
            with torch.no_grad():
                grads, counts = rpc_sync(place, collect, args=(None, self._step))
            result.grads.update({(worker, index): grad for index, grad in enumerate(grads)})
            result.counts.update({(worker, key): n for key, n in counts.items()})
        return result


# What is left.


def plain_leftovers(nodes: Iterable[Node]) -> list[str]:
    """What workers of this process still hold of graphs outside contexts, as text. Empty once all graphs are gone.

    A share of a pass stays until its driver starts another pass, but it must hold nothing.
    """
    found = []
    ends = [each for each in gc.get_objects() if type(each) is PlainRecv] if functions.live else []
    for node in nodes:
        graph = node.worker.part(Engine).container.plain
        members = {peer.record.id for peer in node.peers if not peer.gone} | {node.worker.info.id}
        for what, count in (
            ("receiving ends", sum(map(graph.received, ends))),  # not those of workers that have crashed
            ("records", len(graph.sends)),
            ("records to walk", len(graph.pending)),
            ("indexed records", len(graph.sources)),
            ("busy passes", sum(share.busy for share in graph.runs.values())),
            ("passes that hold graphs", sum(share.holding for share in graph.runs.values())),
            ("passes of workers that are gone", sum(driver not in members for driver, _ in graph.runs)),
            ("aborted passes of workers that are gone", sum(driver not in members for driver, _ in graph.aborted)),
        ):
            if count:
                found.append(f"{node.worker.name} has {count} {what}")
    return found
