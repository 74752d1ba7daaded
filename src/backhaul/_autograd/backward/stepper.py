"""Runs a group that waits in a circle: some of its sources cannot arrive before recv nodes of the group are answered.

The stepper runs the nodes on the way to recv nodes one by one, each when all its gradients have arrived. When the last
source has arrived, nothing is missing any more, and one call of the engine does the rest. Every node runs once, with
its complete input, so hooks and custom functions behave as in one process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

import torch
from torch.autograd.graph import GradientEdge

from backhaul._autograd.backward.groups import Fired, RecvEnd
from backhaul._autograd.backward.node_inputs import NodeInputs
from backhaul._autograd.backward.node_runner import NodeRunner
from backhaul._autograd.forward.functions import Grads, recv_of
from backhaul._autograd.ids import ROOTS, MessageId
from backhaul._autograd.torch_engine.graph_task import GraphTask
from backhaul._autograd.torch_engine.run import Node
from backhaul._devices import seam

Compute = Callable[[Sequence[GradientEdge], Sequence[torch.Tensor], Sequence[RecvEnd]], list[Fired]]
"""Runs the engine from edges with seeds to the group's leaves and to recv nodes; returns the answers."""


class _Answers:
    """The messages that a group answers, and the gradients that have arrived for them."""

    def __init__(self, ends: Iterable[RecvEnd], reached: Container[Node]) -> None:
        self._unanswered: dict[MessageId, RecvEnd] = {}
        self._end_of: dict[Node, tuple[RecvEnd, int]] = {}
        self._arrived: dict[MessageId, dict[int, torch.Tensor | None]] = {}
        for end in ends:
            here = RecvEnd(end.recv, {index: node for index, node in end.nodes.items() if node in reached})
            self._unanswered[end.recv.message] = here
            self._end_of.update((node, (here, index)) for index, node in here.nodes.items())

    def add(self, node: Node, grad: torch.Tensor | None) -> list[Fired]:
        """A recv node has its gradient. Returns the answer if it was the last of its message."""
        if node not in self._end_of:
            return []
        end, index = self._end_of[node]
        found = self._arrived.setdefault(end.recv.message, {})
        found[index] = grad
        if len(found) < len(end.nodes):
            return []
        del self._unanswered[end.recv.message]
        seam.streams.adopt(found)
        return [(end.recv, end.answer(found))]

    def rest(self, ran: Callable[[Node], bool]) -> list[RecvEnd]:
        """The messages without an answer, with the nodes that have not run."""
        seam.streams.adopt([self._arrived.get(message) for message in self._unanswered])
        return [
            RecvEnd(end.recv, {index: node for index, node in end.nodes.items() if not ran(node)})
            for end in self._unanswered.values()
        ]

    def merged(self, fired: Fired) -> Fired:
        """An answer with the gradients that had arrived before."""
        recv, grads = fired
        earlier = self._arrived.get(recv.message, {})
        return recv, [earlier.get(index, grad) for index, grad in enumerate(grads)]


# Over the limit because each attribute is a part of one state that a step reads and changes as a whole.
class Stepper:
    """Thread-safe: a thread that feeds a source while another thread runs nodes leaves the source to that thread.

    Args:
        sources: The edges of every source that takes part.
        ends: The messages to answer.
        compute: See ``Compute``.
        task: What multi-grad hooks are told about the pass.
        runner: Runs single nodes.
        create: Whether the pass records itself (``create_graph``).
        foreign: Recv nodes of other contexts. ``compute`` refuses gradients for them.
        in_turn: Whether the order of the nodes must not depend on the order in which sources arrive. Then the sources
            take their turns in the reverse of the order in which the worker sent them. A gradient depends only on
            messages that were sent after it, so this cannot wait for ever.

    Attributes:
        produced: The messages that have been answered, and the worker that each answer goes to.
    """

    def __init__(
        self,
        sources: Mapping[MessageId, Sequence[GradientEdge]],
        ends: Iterable[RecvEnd],
        compute: Compute,
        task: GraphTask,
        runner: NodeRunner,
        *,
        create: bool,
        foreign: Container[Node] = (),
        in_turn: bool = False,
    ) -> None:
        self._compute = compute
        self._task = task
        self._runner = runner
        self._create = create
        self._lock = threading.Lock()  # guards _running and _fed; the running thread owns the rest
        self._running = False
        self._fed: list[tuple[MessageId, Grads]] = []
        self._missing = set(sources)
        self._turns = sorted(sources, key=lambda source: (source == ROOTS, source)) if in_turn else None
        self._early: dict[MessageId, Grads] = {}  # fed before their turn
        self.produced: dict[int, int] = {}
        self._inputs = NodeInputs(sources, foreign)
        self._answers = _Answers(ends, self._inputs)

    def feed(self, arrived: Mapping[MessageId, Grads]) -> tuple[list[Fired], bool]:
        """Take sources and run what they make possible. Returns the answers, and whether the group is done."""
        with self._lock:
            self._fed.extend(arrived.items())
            if self._running:
                return [], False
            self._running = True
        fired: list[Fired] = []
        try:
            with torch.set_grad_enabled(self._create), self._task:
                over = self._run_fed(fired)
        except BaseException:
            self._running = False
            raise
        return fired, over

    def _run_fed(self, fired: list[Fired]) -> bool:
        """Run until no thread has fed another source. Adds answers to ``fired``; returns whether the group is done."""
        while True:
            with self._lock:
                fed, self._fed = self._fed, []
                if not fed:
                    seam.streams.depart()  # the thread that feeds the next source continues from here
                    self._running = False
                    return False
            seam.streams.arrive()  # other threads may have fed the sources
            for source, grads in fed if self._turns is None else self._take_turns(fed):
                self._inputs.enter(source, grads)
                self._missing.discard(source)
            made = self._step()
            if over := not self._missing:
                made += self._finish()
            self.produced.update((recv.message, recv.sender) for recv, _ in made)
            fired += made
            if over:
                return True

    def _take_turns(self, fed: Iterable[tuple[MessageId, Grads]]) -> Iterator[tuple[MessageId, Grads]]:
        """The sources whose turn it is."""
        assert self._turns is not None
        self._early.update(fed)
        while self._turns and self._turns[-1] in self._early:
            source = self._turns.pop()
            yield source, self._early.pop(source)

    def _step(self) -> list[Fired]:
        """Run every node that is ready."""
        fired: list[Fired] = []
        for node, sums in self._inputs.ready():
            if recv_of(node) is not None:
                grad = sums.get(0)
                fired += self._answers.add(node, None if grad is None else self._runner.pass_recv(node, grad))
            else:
                self._inputs.pass_on(node, self._runner.run(node, sums) if sums else ())
        return fired

    def _finish(self) -> list[Fired]:
        """Everything has arrived: run the rest of the group in one call."""
        edges, seeds = self._inputs.rest()
        fired = self._compute(edges, seeds, self._answers.rest(self._inputs.ran))
        return [self._answers.merged(each) for each in fired]
