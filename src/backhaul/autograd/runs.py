"""One worker's share of one pass: what has arrived, what may run, and the running itself.

A group of one source runs when that source arrives; a group of several when all that take part have arrived; a
group that waits in a circle node by node, see ``stepper``. Every message that a group reaches is answered exactly
once, with gradients or with none.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from backhaul.autograd.context import Context
from backhaul.autograd.functions import ROOTS, End, Grads, MessageId, Recv, edge_of
from backhaul.autograd.groups import Fired, Group, Grouping, RecvEnd, nodes_behind, reaches
from backhaul.autograd.leaves import Leaves
from backhaul.autograd.messages import PassSpec, Tally
from backhaul.autograd.native import Node, Task, Watch, new_task_number, renumber
from backhaul.autograd.passes import Summary
from backhaul.autograd.stepper import Stepper


@dataclass(frozen=True, slots=True)
class Outcome:
    """A group has run, or gone some way.

    Attributes:
        tally: The messages it consumed, and all it produced with the workers they go to; None if it is not done.
        fired: Gradients to send.
    """

    tally: Tally | None
    fired: Sequence[Fired]


@dataclass(frozen=True, slots=True)
class Orders:
    """What the driver's plan says about one worker.

    Attributes:
        active: Sources that take part.
        circular: Those of them whose group waits in a circle.
        useful: Recv nodes that lead to the inputs, where inputs were given.
    """

    active: frozenset[int]
    circular: frozenset[int]
    useful: frozenset[int] | None = None


LARGE = 64  # nodes of a group from which on it may pay to send before all of it has run

Send = Callable[["Run", Recv, Grads], None]


class _Early(contextlib.AbstractContextManager[None]):
    """Sends the gradients of a message as soon as they are there, while the rest of the group still runs."""

    def __init__(self, run: Run, ends: Iterable[RecvEnd]) -> None:
        self._run = run
        self._ends = {node: (end, index) for end in ends for index, node in end.nodes.items()}
        self._found: dict[MessageId, dict[int, torch.Tensor | None]] = {}
        self._sent: set[MessageId] = set()
        self._watch = Watch(self._ends, self._seen)

    def _seen(self, node: Node, grad: torch.Tensor | None) -> None:
        end, index = self._ends[node]
        found = self._found.setdefault(end.recv.message, {})
        found[index] = grad
        if len(found) == len(end.nodes):
            self._sent.add(end.recv.message)
            self._run.send(end.recv, end.answer(found))

    def left(self, recv: Recv) -> bool:
        """Whether the gradients of a message have not been sent."""
        return recv.message not in self._sent

    def __exit__(self, *args: object) -> None:
        self._watch.__exit__(*args)


class Run:
    """Thread-safe.

    Args:
        spec: The pass.
        context: Its context on this worker.
        send: Sends gradients before the group they come from has run to its end; not called unless that may pay.
        roots: Where the pass starts, on its driver.
        inputs: What it is restricted to, on its driver.
    """

    def __init__(
        self,
        spec: PassSpec,
        context: Context,
        send: Send | None = None,
        *,
        roots: Sequence[GradientEdge] | None = None,
        inputs: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self.spec = spec
        self.context = context
        self.failed = False
        self._send = send
        self.aborted = False
        self.deadline: float | None = None  # where it is known: on the driver
        self.sent_to: set[int] = set()  # workers that gradients went to
        self.entrusted: dict[int, list[Tally]] = {}  # worker -> what it was to pass on to the driver
        self.asked = False  # whether orders have been asked for
        self._inputs = inputs
        with context.lock:
            records = [r for r in context.sends.values() if r.born_in != (spec.driver, spec.number)]
        sources: dict[MessageId, Sequence[End]] = {r.message: r.ends for r in records}
        self._places = {r.message: r.order for r in records}
        self._uncertain = {r.message for r in records if r.born_in is not None or r.failed}
        if roots is not None:
            sources = {ROOTS: roots, **sources}
        self._leaves = Leaves(context, spec, inputs)
        self.grouping = Grouping(sources, self._leaves.join)
        self._task_number = new_task_number()
        self._reach: dict[MessageId, frozenset[MessageId]] | None = None
        self._lock = threading.Lock()  # guards what follows, and asked
        self._orders: Orders | None = None
        self._waiting: dict[MessageId, Grads] = {}  # arrived, but their groups have not run
        self._steppers: dict[int, Stepper] = {}

    def send(self, recv: Recv, grads: Grads) -> None:
        """Send gradients at once."""
        assert self._send is not None
        self._send(self, recv, grads)

    @property
    def waiting(self) -> list[MessageId]:
        """Sources that have come and whose group has not run."""
        with self._lock:
            return sorted(self._waiting)

    def knows(self, source: MessageId) -> bool:
        """Whether ``source`` is one of this worker."""
        return source in self.grouping.ends

    @property
    def reach(self) -> Mapping[MessageId, frozenset[MessageId]]:
        """For each source the recv nodes it reaches."""
        if self._reach is None:
            self._reach = self.grouping.reach()
        return self._reach

    def summary(self) -> Summary:
        """What the driver needs to make a plan."""
        groups = self.grouping.groups
        return Summary(
            tuple({source: self.reach[source] for source in group.sources} for group in groups),
            {message: end.recv.sender for group in groups for message, end in group.recvs.items()},
        )

    def leads_to_inputs(self) -> set[MessageId]:
        """The sources that reach one of the inputs."""
        goals = {get_gradient_edge(tensor).node for tensor in self._inputs or ()}
        return {source for source, ends in self.grouping.ends.items() if reaches(ends, goals)}

    def must_ask(self, source: MessageId) -> bool:
        """Whether orders are needed for ``source`` and have not been asked for; says so once."""
        if not self._needs_orders(self.grouping.of(source)):
            return False
        with self._lock:
            if self.asked or self._orders is not None:
                return False
            self.asked = True
            return True

    def _needs_orders(self, group: Group) -> bool:
        """Fast mode can tell what takes part by itself, but for messages of earlier passes and of failed calls."""
        if self.spec.restricted:
            return True
        if len(group.sources) == 1:
            return False
        return not self.spec.fast or any(source in self._uncertain for source in group.sources)

    def follow(self, orders: Orders) -> list[Outcome]:
        """Orders are there: run what waited for them."""
        with self._lock:
            self._orders = orders
            groups = {id(group): group for group in map(self.grouping.of, self._waiting)}
        return [outcome for group in groups.values() for outcome in self._try(group)]

    def arrive(self, source: MessageId, grads: Grads) -> list[Outcome]:
        """The gradients of a source are there: run its group if nothing is missing."""
        group = self.grouping.of(source)
        if len(group.sources) == 1 and not self.spec.restricted:
            return [self._run(group, {source: grads})]
        with self._lock:
            self._waiting[source] = grads
        return self._try(group)

    def _try(self, group: Group) -> list[Outcome]:
        stepper = None
        with self._lock:
            orders = self._orders
            if orders is not None:
                active = [source for source in group.sources if source in orders.active]
                circular = any(source in orders.circular for source in active)
            elif self._needs_orders(group):
                return []
            else:  # all are taken to come; which of them wait for each other nobody has looked at
                active = list(group.sources)
                circular = len(active) > 1
            here = {source: self._waiting[source] for source in active if source in self._waiting}
            if circular:
                stepper = self._steppers.get(id(group))
                if stepper is None:
                    stepper = self._steppers[id(group)] = self._make_stepper(group, active)
            elif len(here) < len(active):
                return []
            for source in here:
                del self._waiting[source]
        if not here:
            return []
        if stepper is None:
            return [self._run(group, here)]
        fired, over = stepper.feed(here)
        if not over:
            return [Outcome(None, fired)]
        self._spend(active)
        return [Outcome(Tally(tuple(active), stepper.produced), fired)]

    def _run(self, group: Group, arrived: Mapping[MessageId, Grads]) -> Outcome:
        """One native call for the whole group."""
        edges: list[GradientEdge] = []
        seeds: list[torch.Tensor] = []
        sources = sorted(arrived, key=self._place) if len(arrived) > 1 else list(arrived)
        order = self._place(sources[0])
        seen: set[int] = set()
        for source in sources:
            for end, grad in zip(self.grouping.ends[source], arrived[source], strict=False):
                if grad is None:
                    continue
                if isinstance(end, torch.Tensor) and self._leaves.is_plain(end):
                    if end.requires_grad:
                        # A message brings equal gradients once; the roots' are the user's.
                        self._leaves.keep(end, grad, order, shared=source == ROOTS or id(grad) in seen)
                        seen.add(id(grad))
                else:
                    edges.append(edge_of(end))
                    seeds.append(grad)
        ends = self._answering(group, sources)
        self._put_in_order(sources)
        early = _Early(self, ends) if self._send is not None and ends and group.size > LARGE else None
        with self._task(sources), early or contextlib.nullcontext():
            fired = self._compute(group, edges, seeds, ends, order)
        self._spend(sources)
        tally = Tally(tuple(sources), {end.recv.message: end.recv.sender for end in ends})
        return Outcome(tally, fired if early is None else [(recv, grads) for recv, grads in fired if early.left(recv)])

    def _nodes(self, sources: Iterable[MessageId]) -> dict[Node, None]:
        return nodes_behind(end for source in sources for end in self.grouping.ends[source])

    def _task(self, sources: Iterable[MessageId]) -> Task:
        return Task(self._task_number, lambda: self._nodes(sources).keys())

    def _put_in_order(self, sources: Sequence[MessageId]) -> None:
        """Let sums inside of the engine be made in an order that no thread can change."""
        if self.spec.deterministic:
            renumber(self._nodes(sources))

    def _answering(self, group: Group, sources: Sequence[MessageId]) -> list[RecvEnd]:
        """The messages that get an answer, if only that there are no gradients."""
        ends = list(group.recvs.values())
        if len(sources) < len(group.sources):
            reached = frozenset().union(*(self.reach[source] for source in sources))
            ends = [end for end in ends if end.recv.message in reached]
        useful = self._orders.useful if self._orders is not None else None
        return ends if useful is None else [end for end in ends if end.recv.message in useful]

    def _compute(
        self,
        group: Group,
        edges: Sequence[GradientEdge],
        seeds: Sequence[torch.Tensor],
        ends: Sequence[RecvEnd],
        order: tuple[int, ...],
    ) -> list[Fired]:
        """Run the engine to the group's leaves and to ``ends``, which all answer."""
        wanted = [GradientEdge(node, 0) for end in ends for node in end.nodes.values()]
        if not self.spec.restricted:  # what leads to them runs all the same
            wanted += [GradientEdge(node, 0) for node in group.frozen]
        found = iter(self._leaves.compute(edges, seeds, group.leaves.values(), wanted, order))
        return [(end.recv, end.answer({index: next(found) for index in end.nodes})) for end in ends]

    def _make_stepper(self, group: Group, active: Iterable[MessageId]) -> Stepper:
        sources = sorted(active, key=self._place)
        self._put_in_order(sources)
        return Stepper(
            {source: [edge_of(end) for end in self.grouping.ends[source]] for source in sources},
            self._answering(group, sources),
            functools.partial(self._compute, group, order=self._place(sources[0])),
            self._task(sources),
            retain=self.spec.retain,
            create=self.spec.create,
            inner={
                (edge.node, edge.output_nr): tensor
                for tensor in self._inputs or ()
                if not tensor.is_leaf
                for edge in [get_gradient_edge(tensor)]
            },
            capture=self._leaves.keep,
        )

    def _place(self, source: MessageId) -> tuple[int, ...]:
        return self._places.get(source, ())

    def _spend(self, sources: Iterable[MessageId]) -> None:
        """After a pass that frees the graph, a source can not be used again."""
        if self.spec.retain:
            return
        with self.context.lock:
            for source in sources:
                if self.context.sends.pop(source, None) is not None:
                    self.context.spent.add(source)
