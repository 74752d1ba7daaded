"""One worker's share of one pass: what has arrived, what may run, and the running itself.

A group of one source runs when that source arrives; a group of several when all that take part have arrived; a
group that waits in a circle node by node, see ``stepper``. Every message that a group reaches is answered exactly
once, with gradients or with none.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from backhaul._autograd.backward.groups import Fired, Group, Grouping, RecvEnd, nodes_behind, reaches
from backhaul._autograd.backward.leaves import Leaves
from backhaul._autograd.backward.report_buffer import ReportBuffer
from backhaul._autograd.backward.stepper import Stepper
from backhaul._autograd.context import Context
from backhaul._autograd.forward.functions import End, Grads, Recv, edge_of
from backhaul._autograd.ids import ROOTS, MessageId
from backhaul._autograd.messages import PassSpec, PassTally
from backhaul._autograd.plan.termination import Summary
from backhaul._autograd.torch_engine.anomaly import watching
from backhaul._autograd.torch_engine.run import Node, NodeWatch, Task, new_task_number, renumber, tasks_matter
from backhaul._devices.cuda import process
from backhaul._wire.frames import Frame

if TYPE_CHECKING:
    from backhaul._autograd.backward.driver import PassDriver


class Outcome(NamedTuple):
    """A group has run, or gone some way.

    Attributes:
        tally: The messages it consumed, and all it produced with the workers they go to. A group that is not done has
            consumed none; that it has produced some the driver should know, in case a worker they go to is lost.
        fired: Gradients to send.
    """

    tally: PassTally | None
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


class ForeignGraph(Exception):
    """A gradient has come to a recv node of another context.

    Attributes:
        recv: The message behind that node.
        source: The source whose graph leads there.
        place: Which of its tensors does: of the roots, or of the message that was sent.
    """

    def __init__(self, recv: Recv, source: MessageId, place: int) -> None:
        super().__init__(recv, source, place)
        self.recv = recv
        self.source = source
        self.place = place


LARGE = 64  # nodes of a group from which on it may pay to send before all of it has run

Send = Callable[["LocalPass", Recv, Grads], None]


class _Early(contextlib.AbstractContextManager[None]):
    """Sends the gradients of a message as soon as they are there, while the rest of the group still runs."""

    def __init__(self, run: LocalPass, ends: Iterable[RecvEnd]) -> None:
        self._run = run
        self._ends = {node: (end, index) for end in ends for index, node in end.nodes.items()}
        self._found: dict[MessageId, dict[int, torch.Tensor | None]] = {}
        self._sent: set[MessageId] = set()
        self._watch = NodeWatch(self._ends, self._seen)

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


class _GatheredGradients:
    """A group that needs more than one source, or orders.

    Attributes:
        active: The sources that take part.
        missing: Those of them that have not come.
        stepper: Runs it, if it waits in a circle.
    """

    __slots__ = ("active", "missing", "stepper")

    def __init__(self, active: Sequence[MessageId], missing: set[MessageId], stepper: Stepper | None) -> None:
        self.active = active
        self.missing = missing
        self.stepper = stepper


class LocalPass:
    """Thread-safe.

    Args:
        spec: The pass.
        context: Its context on this worker.
        send: Sends gradients before the group they come from has run to its end; not called unless that may pay.
        roots: Where the pass starts, on its driver.
        inputs: What it is restricted to, on its driver.
    """

    drive: PassDriver | None = None  # on the driver
    deadline: float | None = None  # where it is known: on the driver
    failed = False
    aborted = False
    asked = False  # whether orders have been asked for
    complaint: Frame | None = None  # what the driver was told of a failure here
    _orders: Orders | None = None
    _grouping: Grouping | None = None
    _reach: dict[MessageId, frozenset[MessageId]] | None = None

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
        self.journal = ReportBuffer()
        self.sent_to: set[int] = set()  # workers that gradients went to
        self.entrusted: dict[
            int, list[PassTally]
        ] = {}  # worker -> what it is to pass on to the driver, or is the driver
        self.fired: dict[int, int] = {}  # messages answered by groups that had not run to their end: where that went
        self.lost: dict[int, str] = {}  # of the workers that gradients went to, those that are lost, and why
        self._send = send
        self._roots = roots
        self._inputs = inputs
        self._leaves = Leaves(context, spec, inputs)
        self._walking = threading.Lock()  # held while the grouping is made
        self._lock = threading.Lock()  # guards what follows, and asked
        self._waiting: dict[MessageId, Grads] = {}  # arrived, but their groups have not run
        self._gatherings: dict[int, _GatheredGradients] = {}  # by id of the group, once it is known who takes part

    @property
    def grouping(self) -> Grouping:
        """The groups of this worker."""
        return self._grouping or self.prepare()

    def prepare(self) -> Grouping:
        """Find the groups of this worker, at the first use; takes as long as its graph is large."""
        with self._walking:
            if self._grouping is None:
                self._grouping = self._walk()
            return self._grouping

    def _walk(self) -> Grouping:
        spec, context = self.spec, self.context
        sources: dict[MessageId, Sequence[End]] = {} if self._roots is None else {ROOTS: self._roots}
        self._places: dict[MessageId, tuple[int, ...]] = {}
        self._uncertain: set[MessageId] = set()  # those of which it is not known whether gradients come
        with context.lock:
            records = list(context.sends.values())
        for record in records:
            if record.born_in is not None:
                if record.born_in == (spec.driver, spec.number):
                    continue
                self._uncertain.add(record.message)
            elif record.failed:
                self._uncertain.add(record.message)
            sources[record.message] = record.ends
            self._places[record.message] = record.order
        self._task_number = new_task_number()
        return Grouping(sources, self._leaves.join, context.id)

    def send(self, recv: Recv, grads: Grads) -> None:
        """Send gradients at once."""
        assert self._send is not None
        self._send(self, recv, grads)

    def told(self, to: int | None = None) -> PassTally:
        """All that this worker has told the driver, directly or by others, or by one of them; and what nobody has been
        told yet of messages on their way.
        """
        tallies = self.entrusted.get(to, ()) if to is not None else itertools.chain(*list(self.entrusted.values()))
        consumed: list[int] = []
        produced = {message: worker for message, worker in list(self.fired.items()) if to in (None, worker)}
        for tally in list(tallies):
            consumed += tally.consumed
            produced |= tally.produced
        return PassTally(tuple(consumed), produced)

    @property
    def waiting(self) -> list[MessageId]:
        """Sources that have come and whose group has not run."""
        with self._lock:
            return sorted(self._waiting)

    @property
    def reach(self) -> Mapping[MessageId, frozenset[MessageId]]:
        """For each source the recv nodes it reaches."""
        if self._reach is None:
            self._reach = self.grouping.reach()
        return self._reach

    def summary(self) -> Summary:
        """What the driver needs to make a plan."""
        groups, ends = self.grouping.groups, self.grouping.ends
        return Summary(
            tuple({source: self.reach[source] for source in group.sources} for group in groups),
            {message: end.recv.sender for group in groups for message, end in group.recvs.items()},
            frozenset(s for g in groups if g.foreign for s in g.sources if reaches(ends[s], g.foreign.keys())),
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
        return not self.spec.fast or not self._uncertain.isdisjoint(group.sources)

    def follow(self, orders: Orders) -> list[Outcome]:
        """Orders are there: run what waited for them."""
        waiting: dict[int, list[MessageId]] = {}
        with self._lock:
            self._orders = orders
            for source in self._waiting:
                waiting.setdefault(id(self.grouping.of(source)), []).append(source)
        return [outcome for sources in waiting.values() for outcome in self._try(self.grouping.of(sources[0]), sources)]

    def arrive(self, source: MessageId, grads: Grads) -> list[Outcome] | None:
        """The gradients of a source are there: run its group if nothing is missing. None: there is no such source."""
        group = (self._grouping or self.prepare()).find(source)
        if group is None:
            return None
        if len(group.sources) == 1 and not self.spec.restricted:
            return [self._run(group, {source: grads})]
        if process.stream_order is not None:
            process.stream_order.depart()  # another thread may be the one that goes on with them
        with self._lock:
            self._waiting[source] = grads
        return self._try(group, (source,))

    def _try(self, group: Group, arrived: Sequence[MessageId]) -> list[Outcome]:
        with self._lock:
            gathering = self._gatherings.get(id(group))
            if gathering is None:
                if self._orders is None and self._needs_orders(group):
                    return []
                gathering = self._gatherings[id(group)] = self._gather(group)
                arrived = gathering.active
            else:
                gathering.missing.difference_update(arrived)
            if gathering.stepper is None:
                arrived = () if gathering.missing else gathering.active
            here = {source: self._waiting.pop(source) for source in arrived if source in self._waiting}
        if not here:
            return []
        if process.stream_order is not None:
            process.stream_order.arrive()  # other threads may have brought some of the gradients
            process.stream_order.adopt(here)
        if gathering.stepper is None:
            return [self._run(group, here)]
        fired, over = gathering.stepper.feed(here)
        if not over:
            produced: dict[int, int] = {recv.message: recv.sender for recv, _ in fired}
            return [Outcome(PassTally((), produced) if produced else None, fired)]
        if not self.spec.retain:
            self._spend(gathering.active)
        return [Outcome(PassTally(tuple(gathering.active), gathering.stepper.produced), fired)]

    def _gather(self, group: Group) -> _GatheredGradients:
        orders = self._orders
        if orders is not None:
            active = [source for source in group.sources if source in orders.active]
            circular = not orders.circular.isdisjoint(active)
        else:  # all are taken to come; which of them wait for each other nobody has looked at
            active = group.sources
            circular = len(active) > 1
        stepper = self._make_stepper(group, active) if circular else None
        return _GatheredGradients(active, set(active) - self._waiting.keys(), stepper)

    def _run(self, group: Group, arrived: Mapping[MessageId, Grads]) -> Outcome:
        """One native call for the whole group."""
        edges: list[GradientEdge] = []
        seeds: list[torch.Tensor] = []
        sources = sorted(arrived, key=self._place) if len(arrived) > 1 else list(arrived)
        order = self._places.get(sources[0], ())
        all_ends = (self._grouping or self.prepare()).ends
        seen: set[int] = set()
        for source in sources:
            for end, grad in zip(all_ends[source], arrived[source], strict=False):
                if grad is None:
                    continue
                if not isinstance(end, torch.Tensor):
                    edges.append(end)
                    seeds.append(grad)
                elif not self._leaves.is_plain(end):
                    edges.append(edge_of(end))
                    seeds.append(grad)
                elif end.requires_grad:
                    # A message brings equal gradients once; the roots' are the user's.
                    self._leaves.keep(end, grad, order, shared=source == ROOTS or id(grad) in seen)
                    seen.add(id(grad))
        if len(sources) == len(group.sources) and self._orders is None:
            ends = list(group.recvs.values())
        else:
            ends = self._answering(group, sources)
        early = len(group.nodes) > LARGE and self._send is not None and bool(ends)
        if early or self.spec.deterministic or tasks_matter():
            compute = functools.partial(self._engine_run.compute, group, edges, seeds, ends, order)
            fired = self._watch(sources, ends if early else (), compute)
        else:
            fired = self._engine_run.compute(group, edges, seeds, ends, order) if edges or ends else []
        if not self.spec.retain:
            self._spend(sources)
        produced: dict[int, int] = {}
        for answered in ends:
            produced[answered.recv.message] = answered.recv.sender
        return Outcome(PassTally(tuple(sources), produced), fired)

    def _watch(
        self, sources: Sequence[MessageId], early: Sequence[RecvEnd], compute: Callable[[], list[Fired]]
    ) -> list[Fired]:
        """Compute where hooks may ask what runs, or where the gradients of some messages are to go out before all of it
        is done. Returns those that are left.
        """
        if self.spec.deterministic:
            self._put_in_order(sources)
        if not early:
            with self._task(sources):
                return compute()
        sending = _Early(self, early)
        with self._task(sources), sending:
            fired = compute()
        return [(recv, grads) for recv, grads in fired if sending.left(recv)]

    def _task(self, sources: Iterable[MessageId]) -> Task:
        all_ends = self.grouping.ends  # not the run itself, see ``_make_stepper``
        return Task(self._task_number, lambda: _nodes(all_ends, sources).keys())

    def _put_in_order(self, sources: Sequence[MessageId]) -> None:
        """Let sums inside of the engine be made in an order that no thread can change."""
        renumber(_nodes(self.grouping.ends, sources))

    def _answering(self, group: Group, sources: Sequence[MessageId]) -> list[RecvEnd]:
        """The messages that get an answer, if only that there are no gradients."""
        ends = list(group.recvs.values())
        if len(sources) < len(group.sources):
            reached = frozenset().union(*(self.reach[source] for source in sources))
            ends = [end for end in ends if end.recv.message in reached]
        if self._orders is None:
            return ends
        useful = self._orders.useful
        return ends if useful is None else [end for end in ends if end.recv.message in useful]

    @property
    def _engine_run(self) -> _EngineRun:
        return _EngineRun(self._leaves, self.grouping.ends, self.spec)

    def _make_stepper(self, group: Group, active: Iterable[MessageId]) -> Stepper:
        """The stepper does not refer to the run, which refers to it. Graphs in a cycle are freed by the garbage
        collector alone. Up to torch 2.12, second-order passes failed now and then with ``KeyError: <AccumulateGrad>``
        if the collector ran while another thread walked over the same nodes.
        """
        sources = sorted(active, key=self._place)
        if self.spec.deterministic:
            self._put_in_order(sources)
        return Stepper(
            {source: [edge_of(end) for end in self.grouping.ends[source]] for source in sources},
            self._answering(group, sources),
            functools.partial(self._engine_run.compute, group, order=self._place(sources[0])),
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
            foreign=group.foreign,
            anomaly=self.spec.anomaly,
        )

    def _place(self, source: MessageId) -> tuple[int, ...]:
        return self._places.get(source, ())

    def _spend(self, sources: Iterable[MessageId]) -> None:
        """After a pass that frees the graph, a source can not be used again."""
        with self.context.lock:
            for source in sources:
                if self.context.sends.pop(source, None) is not None:
                    self.context.spent.add(source)


def _nodes(ends: Mapping[MessageId, Sequence[End]], sources: Iterable[MessageId]) -> dict[Node, None]:
    return nodes_behind(end for source in sources for end in ends[source])


class _EngineRun:
    """Runs the engine for groups of a pass. Does not refer to the ``LocalPass``, see ``LocalPass._make_stepper``."""

    __slots__ = ("_leaves", "_sources", "_spec")

    def __init__(self, leaves: Leaves, sources: Mapping[MessageId, Sequence[End]], spec: PassSpec) -> None:
        self._leaves = leaves
        self._sources = sources
        self._spec = spec

    def compute(
        self,
        group: Group,
        edges: Sequence[GradientEdge],
        seeds: Sequence[torch.Tensor],
        ends: Sequence[RecvEnd],
        order: tuple[int, ...],
    ) -> list[Fired]:
        """Run the engine to the group's leaves and to ``ends``, which all answer."""
        if not edges:
            return [(end.recv, [None] * end.recv.count) for end in ends]
        wanted = []
        for end in ends:
            for node in end.nodes.values():
                wanted.append(GradientEdge(node, 0))
        if group.frozen and not self._spec.restricted:  # what leads to them runs all the same
            wanted += [GradientEdge(node, 0) for node in group.frozen]
        check = None
        if group.foreign:  # asked for so that it is known whether a gradient comes there
            check = functools.partial(self._refuse_foreign, group, len(wanted))
            wanted += [GradientEdge(node, 0) for node in group.foreign]
        with watching(group.nodes, self._spec.anomaly):
            found = self._leaves.compute(edges, seeds, group.leaves.values(), wanted, order, check=check)
        fired: list[Fired] = []
        used = 0
        for end in ends:
            following = used + len(end.nodes)
            fired.append((end.recv, end.answer(dict(zip(end.nodes, found[used:following], strict=True)))))
            used = following
        return fired

    def _refuse_foreign(self, group: Group, first: int, found: Grads) -> None:
        """Raise if a gradient has come to a recv node of another context; ``first``: where those are in ``found``."""
        for (node, recv), grad in zip(group.foreign.items(), found[first:], strict=True):
            if grad is not None:
                for source in sorted(group.sources):  # the roots first
                    for place, end in enumerate(self._sources[source]):
                        if reaches([end], {node}):
                            raise ForeignGraph(recv, source, place)
