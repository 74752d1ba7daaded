"""The groups of one worker in one pass: which gradients have arrived, and which groups may run.

A group of one source runs when that source arrives. A group of several sources runs when all that take part have
arrived. A group that waits in a circle runs node by node, see ``stepper``. Every message that a group reaches is
answered exactly once, with gradients or with none. Knows no frame and no worker.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.autograd.graph import GradientEdge

from backhaul._autograd.backward.early_sends import SendEarly
from backhaul._autograd.backward.group_run import GroupRun
from backhaul._autograd.backward.groups import Fired, Group
from backhaul._autograd.backward.leaves import Leaves
from backhaul._autograd.backward.node_runner import NodeRunner
from backhaul._autograd.backward.pass_graph import PassGraph, Ran
from backhaul._autograd.backward.plain_pass_graph import PlainPassGraph
from backhaul._autograd.backward.stepper import Stepper
from backhaul._autograd.context import Context
from backhaul._autograd.forward.functions import Grads, edge_of
from backhaul._autograd.gradient_table import GradientTable
from backhaul._autograd.ids import ROOTS, MessageId
from backhaul._autograd.messages import PassSpec, PassTally
from backhaul._autograd.plain_graph import PlainGraph
from backhaul._autograd.plan.plan import Orders
from backhaul._autograd.torch_engine.graph_task import new_task_number
from backhaul._autograd.torch_engine.patches import sharded_share
from backhaul._devices import seam


class Outcome(NamedTuple):
    """A group has run, or has run in part.

    Attributes:
        tally: The messages that the group consumed, and all it produced with the workers they go to. A group that is
            not done has consumed none. The driver has to know what it produced, in case a worker they go to is lost.
        fired: Gradients to send.
    """

    tally: PassTally | None
    fired: Sequence[Fired]


class _Gathering:
    """A group that needs more than one source, or orders.

    Attributes:
        active: The sources that take part.
        missing: Those of them that have not arrived.
        stepper: Runs the group, if it waits in a circle.
    """

    __slots__ = ("active", "missing", "stepper")

    def __init__(self, active: Sequence[MessageId], missing: set[MessageId], stepper: Stepper | None) -> None:
        self.active = active
        self.missing = missing
        self.stepper = stepper


# Over the limit because sources arrive, wait, get their orders and run under one lock.
class ReadyGroups:
    """Thread-safe.

    Args:
        spec: The pass.
        context: Its context on this worker.
        roots: Where the pass starts, on its driver.
        inputs: The tensors that the pass is restricted to, on its driver.
        results: See ``LocalPass``.
        ran: See ``PassGraph``.
        task_number: Returns the number of the pass's ``GraphTask``; None: the number is made here.
    """

    _graph: PassGraph | None = None
    _group_run: GroupRun  # made with the graph
    _orders: Orders | None = None
    _asked = False  # whether orders have been asked for

    def __init__(
        self,
        spec: PassSpec,
        context: Context,
        roots: Sequence[GradientEdge] | None = None,
        inputs: Sequence[torch.Tensor | GradientEdge] | None = None,
        results: GradientTable | None = None,
        *,
        ran: Ran | None = None,
        task_number: Callable[[], int] | None = None,
    ) -> None:
        self._spec = spec
        self._context = context
        self._sharded = sharded_share(at_driver=roots is not None)
        self._leaves = Leaves(context, spec, inputs, results, self._sharded)
        self._starts = roots, inputs
        self._ran = ran
        self._task_number = task_number or itertools.repeat(new_task_number()).__next__
        self._walking = threading.Lock()  # held while the graph is walked
        self._lock = threading.Lock()  # guards what follows, _orders and _asked
        self._waiting: dict[MessageId, Grads] = {}  # arrived, but their groups have not run
        self._gatherings: dict[int, _Gathering] = {}  # by id of the group, once the sources that take part are known

    @property
    def graph(self) -> PassGraph:
        """This worker's graph."""
        return self._graph or self.prepare()

    def prepare(self) -> PassGraph:
        """Find the groups of this worker, at the first use. It takes as long as the graph is large."""
        with self._walking:
            if self._graph is None:
                if isinstance(self._context, PlainGraph):
                    graph: PassGraph = PlainPassGraph(
                        self._spec, self._context, self._leaves.join, *self._starts, ran=self._ran
                    )
                else:
                    graph = PassGraph(self._spec, self._context, self._leaves.join, *self._starts, ran=self._ran)
                self._group_run = GroupRun(self._spec, self._leaves, graph.ends, self._sharded, self._task_number)
                self._graph = graph
            return self._graph

    @property
    def waiting(self) -> list[MessageId]:
        """Sources that have arrived and whose group has not run."""
        with self._lock:
            return sorted(self._waiting)

    @property
    def holding(self) -> bool:
        """Whether gradients wait here, or a part of the graph outside contexts is kept."""
        return bool(self._waiting or self._gatherings or (self._graph is not None and self._graph.ends))

    def joins(self, sources: Iterable[MessageId]) -> bool:
        """Whether one of these sources is known to run together with another, such as the roots."""
        graph = self._graph
        if graph is None:
            return False
        groups = map(graph.grouping.find, sources)
        return any(group is not None and len(group.sources) > 1 for group in groups)

    def arrive(self, source: MessageId, grads: Grads, send_early: SendEarly | None = None) -> list[Outcome] | None:
        """The gradients of a source have arrived: run its group if nothing is missing. None: no such source."""
        graph = self._graph or self.prepare()
        group = graph.find(source)
        if group is None:
            return None
        if graph.settled(group) and not self._spec.restricted:
            return [self._run(group, {source: grads}, send_early)]
        seam.streams.depart()  # another thread may continue with them
        with self._lock:
            self._waiting[source] = grads
        return self._try((source,), send_early)

    def must_ask(self, source: MessageId) -> bool:
        """Whether ``source`` needs orders and nobody has asked for them; True once."""
        with self._lock:
            if self._asked or self._orders is not None:
                return False
            group = self.graph.find(source)
            self._asked = group is not None and self._needs_orders(group)
            return self._asked

    def _needs_orders(self, group: Group) -> bool:
        """Fast mode knows what takes part without orders, except for messages of earlier passes and of failed calls."""
        if self._spec.restricted:
            return True
        if self.graph.settled(group):
            return False
        return not self._spec.fast or not self.graph.uncertain.isdisjoint(group.sources)

    def follow(self, orders: Orders, send_early: SendEarly | None = None) -> list[Outcome]:
        """Orders have arrived: run what waited for them."""
        graph = self.graph
        graph.follow(orders)
        waiting: dict[int, list[MessageId]] = {}
        with self._lock:
            self._orders = orders
            for source in self._waiting:
                waiting.setdefault(id(graph.find(source)), []).append(source)
        return [outcome for sources in waiting.values() for outcome in self._try(sources, send_early)]

    def _try(self, arrived: Sequence[MessageId], send_early: SendEarly | None) -> list[Outcome]:
        """Run a group as far as those of its sources that have arrived allow."""
        with self._lock:
            if self._waiting.keys().isdisjoint(arrived):
                return []  # another thread has run the group
            group = self.graph.find(arrived[0])
            assert group is not None
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
            if here and gathering.stepper is None:
                del self._gatherings[id(group)]
        if not here:
            return []
        seam.streams.arrive()  # other threads may have brought some of the gradients
        seam.streams.adopt(here)
        if gathering.stepper is None:
            return [self._run(group, here, send_early)]
        fired, over = self._group_run.feed(gathering.stepper, group, here)
        if not over:
            produced: dict[int, int] = {recv.message: recv.sender for recv, _ in fired}
            return [Outcome(PassTally((), produced) if produced else None, fired)]
        with self._lock:
            self._gatherings.pop(id(group), None)
        self._reduce_sharded(group)
        self._end(gathering.active)
        return [Outcome(PassTally(tuple(gathering.active), gathering.stepper.produced), fired)]

    def _reduce_sharded(self, group: Group) -> None:
        """A group has run: reduce gradients of FSDP2 modules, unless others of the pass may still come."""
        sharded = self._sharded
        if sharded is None:
            return
        joined = sharded.joins(group.leaves, group.nodes)
        if joined:
            sharded.joined_ran = True
            sharded.reach(group.leaves)
        if not (sharded.at_driver or (not sharded.joined_ran and self.graph.has(sharded.joins))):
            sharded.finish()

    def finish(self) -> None:
        """At the driver: the pass is over."""
        if self._sharded is not None:
            self._sharded.finish()

    def _gather(self, group: Group) -> _Gathering:
        orders = self._orders
        if orders is not None:
            active = [source for source in group.sources if source in orders.active]
            circular = not orders.circular.isdisjoint(active)
        else:  # fast mode: assume that all arrive; nobody has looked for circles
            active = group.sources
            circular = len(active) > 1
        stepper = self._make_stepper(group, active) if circular else None
        return _Gathering(active, set(active) - self._waiting.keys(), stepper)

    def _run(self, group: Group, arrived: Mapping[MessageId, Grads], send_early: SendEarly | None) -> Outcome:
        """Run the whole group with one call of the engine."""
        graph = self._graph or self.prepare()
        edges: list[GradientEdge] = []
        seeds: list[torch.Tensor] = []
        sources = graph.in_order(arrived) if len(arrived) > 1 else list(arrived)
        order = graph.orders.get(sources[0], ())
        once: set[int] = set()
        again: set[int] = set()  # ids of gradients that several tensors get: a message brings equal ones as one tensor
        for grads in arrived.values():
            for grad in grads if len(grads) > 1 or len(arrived) > 1 else ():
                (again if id(grad) in once else once).add(id(grad))
        for source in sources:
            for end, grad in zip(graph.ends[source], arrived[source], strict=False):
                if grad is None:
                    continue
                if not isinstance(end, torch.Tensor):
                    edges.append(end)
                    seeds.append(grad)
                    continue
                # The gradients of the roots are the user's.
                if not self._leaves.keep_plain(end, grad, order, shared=source == ROOTS or id(grad) in again):
                    edges.append(edge_of(end))
                    seeds.append(grad)
        if len(sources) == len(group.sources) and self._orders is None:
            ends = list(group.recvs.values())
        else:
            ends = graph.answering(group, sources, self._orders)
        fired: list[Fired] = []
        if edges or ends:
            fired = self._group_run.run(group, sources, edges, seeds, ends, order=order, send_early=send_early)
            self._reduce_sharded(group)
        self._end(sources)
        produced: dict[int, int] = {}
        for answered in ends:
            produced[answered.recv.message] = answered.recv.sender
        return Outcome(PassTally(tuple(sources), produced), fired)

    def _end(self, sources: Sequence[MessageId]) -> None:
        """Sources have run."""
        if not self._spec.retain:
            self._context.spend(sources)
        self.graph.leave(sources)

    def release(self) -> None:
        """The pass has failed: forget what waits, and the graph."""
        with self._lock:
            self._waiting.clear()
            self._gatherings.clear()
        if self._graph is not None:
            self._graph.release()

    def _make_stepper(self, group: Group, active: Iterable[MessageId]) -> Stepper:
        """The stepper does not refer to this object, which refers to it. Only the garbage collector frees a graph in a
        reference cycle. Up to torch 2.12, second-order passes sometimes failed with ``KeyError: <AccumulateGrad>`` if
        the collector ran while another thread walked over the same nodes.
        """
        graph, group_run, spec = self.graph, self._group_run, self._spec
        sources = graph.in_order(active)
        if spec.deterministic:
            group_run.put_in_order(sources)
        return Stepper(
            {source: [edge_of(end) for end in graph.ends[source]] for source in sources},
            graph.answering(group, sources, self._orders),
            functools.partial(group_run.compute, group, order=graph.orders.get(sources[0], ())),
            group_run.task(sources),
            NodeRunner(spec, graph.inner_inputs(), functools.partial(self._leaves.keep, shared=True)),
            create=spec.create,
            foreign=group.foreign,
            in_turn=group_run.joins_sharded(group),
        )
