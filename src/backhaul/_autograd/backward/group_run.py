"""Runs PyTorch's engine for one group of a pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch.autograd.graph import GradientEdge
from torch.utils.hooks import RemovableHandle

from backhaul._autograd.backward.early_sends import EarlySends, SendEarly
from backhaul._autograd.backward.groups import Fired, Group, RecvEnd, reaches
from backhaul._autograd.backward.leaves import Leaves
from backhaul._autograd.backward.pass_errors import ForeignGraph
from backhaul._autograd.backward.pass_graph import nodes_of
from backhaul._autograd.backward.stepper import Stepper
from backhaul._autograd.forward.functions import End, Grads
from backhaul._autograd.ids import MessageId
from backhaul._autograd.messages import PassSpec
from backhaul._autograd.torch_engine import hooks
from backhaul._autograd.torch_engine import run as torch_run
from backhaul._autograd.torch_engine.anomaly import watching
from backhaul._autograd.torch_engine.graph_task import GraphTask
from backhaul._autograd.torch_engine.hooks import node_hooks
from backhaul._autograd.torch_engine.run import renumber
from backhaul._autograd.torch_engine.sharded import ShardedShare


class GroupRun:
    """Runs PyTorch's engine for the groups of one pass on one worker. Thread-safe.

    It does not refer to the ``LocalPass`` or to the ``ReadyGroups``, which refer to it; see ``ReadyGroups``.

    Args:
        spec: The pass.
        leaves: Where gradients of leaves go.
        ends: The ends of each source.
        sharded: What the pass does with FSDP2 modules, if there are any.
        task_number: Returns the number of the pass's ``GraphTask``.
    """

    __slots__ = ("_ends", "_leaves", "_sharded", "_spec", "_task_number")

    def __init__(
        self,
        spec: PassSpec,
        leaves: Leaves,
        ends: Mapping[MessageId, Sequence[End]],
        sharded: ShardedShare | None,
        task_number: Callable[[], int],
    ) -> None:
        self._sharded = sharded
        self._spec = spec
        self._leaves = leaves
        self._ends = ends
        self._task_number = task_number

    def run(
        self,
        group: Group,
        sources: Sequence[MessageId],
        edges: Sequence[GradientEdge],
        seeds: Sequence[torch.Tensor],
        ends: Sequence[RecvEnd],
        *,
        order: tuple[int, ...],
        send_early: SendEarly | None,
    ) -> list[Fired]:
        """Run the group; return the answers that are left to send."""
        if self._sharded is not None:
            compute = functools.partial(self.compute, group, edges, seeds, ends, order)
            return self._run_sharded(group, sources, compute)
        sending = None
        if send_early is not None and len(group.nodes) > torch_run.SEND_EARLY_NODES and ends:
            sending = EarlySends.begin(send_early, ends)
        if self._spec.deterministic:
            self.put_in_order(sources)
        elif not (sending or node_hooks.possible or RemovableHandle.next_id > hooks.own_handles):
            return self.compute(group, edges, seeds, ends, order)
        if sending is None:
            with self.task(sources):
                return self.compute(group, edges, seeds, ends, order)
        with self.task(sources), sending:
            fired = self.compute(group, edges, seeds, ends, order)
        return sending.left(fired)

    def _run_sharded(
        self, group: Group, sources: Sequence[MessageId], compute: Callable[[], list[Fired]]
    ) -> list[Fired]:
        assert self._sharded is not None
        if self._spec.deterministic or self.joins_sharded(group):
            self.put_in_order(sources)
        with self.task(sources), self._sharded.running():
            return compute()

    def feed(self, stepper: Stepper, group: Group, arrived: Mapping[MessageId, Grads]) -> tuple[list[Fired], bool]:
        """Give a group that runs node by node what has arrived; see ``Stepper.feed``."""
        if self._sharded is None:
            return stepper.feed(arrived)
        with self._sharded.running():
            return stepper.feed(arrived)

    def joins_sharded(self, group: Group) -> bool:
        """Whether the group has joined all FSDP2 modules of this worker."""
        return self._sharded is not None and self._sharded.joins(group.leaves, group.nodes)

    def task(self, sources: Iterable[MessageId]) -> GraphTask:
        """What multi-grad hooks are told about a run from ``sources``."""
        ends = self._ends
        return GraphTask(self._task_number(), lambda: nodes_of(ends, sources).keys())

    def put_in_order(self, sources: Sequence[MessageId]) -> None:
        """Make the engine sum gradients in an order that does not depend on the threads of the forward."""
        renumber(nodes_of(self._ends, sources))

    def compute(
        self,
        group: Group,
        edges: Sequence[GradientEdge],
        seeds: Sequence[torch.Tensor],
        ends: Sequence[RecvEnd],
        order: tuple[int, ...],
    ) -> list[Fired]:
        """Run the engine to the group's leaves and to ``ends``; return the answers of ``ends``."""
        if not edges:
            return [(end.recv, [None] * end.recv.count) for end in ends]
        wanted = []
        for end in ends:
            for node in end.nodes.values():
                wanted.append(GradientEdge(node, 0))
        if group.frozen and not self._spec.restricted:  # the nodes that lead to them run nevertheless
            wanted += [GradientEdge(node, 0) for node in group.frozen]
        check = None
        if group.foreign:  # asked for, to learn whether a gradient arrives there
            check = functools.partial(self._refuse_foreign, group, len(wanted))
            wanted += [GradientEdge(node, 0) for node in group.foreign]
        leaves = group.leaves.values()
        if self._spec.anomaly:
            with watching(group.nodes, self._spec.anomaly):
                found = self._leaves.compute(edges, seeds, leaves, wanted, order, check=check)
        else:
            found = self._leaves.compute(edges, seeds, leaves, wanted, order, check=check)
        fired: list[Fired] = []
        used = 0
        for end in ends:
            following = used + len(end.nodes)
            fired.append((end.recv, end.answer(dict(zip(end.nodes, found[used:following], strict=True)))))
            used = following
        return fired

    def _refuse_foreign(self, group: Group, first: int, found: Grads) -> None:
        """Raise if a gradient has arrived at a recv node of another context. ``first``: their place in ``found``."""
        for (node, recv), grad in zip(group.foreign.items(), found[first:], strict=True):
            if grad is not None:
                for source in sorted(group.sources):  # the roots first
                    for place, end in enumerate(self._ends[source]):
                        if reaches([end], {node}):
                            raise ForeignGraph(recv, source, place)
