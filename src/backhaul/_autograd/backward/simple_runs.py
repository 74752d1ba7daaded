"""Runs sources that meet no others and that no hook looks at: all those of a frame at once, in the native core.

The core asks the engine for the gradients of all leaves and recv nodes that the sources reach, and adds the gradients
of the leaves. ``ReadyGroups`` does the same source by source, in Python. It takes what the core does not: a source that
meets another one, hooks, devices, and passes with options. Knows no frame and no worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from backhaul._autograd.backward.early_sends import SEND_EARLY_NODES
from backhaul._autograd.backward.groups import nodes_behind
from backhaul._autograd.backward.leaves import Leaves
from backhaul._autograd.context import Context
from backhaul._autograd.forward.functions import Recv
from backhaul._autograd.ids import MessageId
from backhaul._autograd.messages import PassSpec
from backhaul._autograd.torch_engine import hooks, sharded
from backhaul._autograd.torch_engine.graph_task import GraphTask, new_task_number
from backhaul._autograd.torch_engine.reducers import reducers
from backhaul._autograd.torch_engine.run import grad_writers, run_sources
from backhaul._devices import seam


class Answers(NamedTuple):
    """Gradients for one worker. The core makes plain tuples of the same form.

    Attributes:
        to: The worker.
        recvs: The messages that the gradients answer.
        messages: Their ids.
        counts: How many of the gradients belong to each.
        grads: The gradients.
        nbytes: About what they take in a frame.
    """

    to: int
    recvs: Sequence[Recv]
    messages: Sequence[MessageId]
    counts: Sequence[int]
    grads: Sequence[torch.Tensor | None]
    nbytes: int


class SimpleRuns:
    """Of one pass on one worker. Thread-safe.

    Args:
        spec: The pass.
        context: Its context on this worker.
    """

    __slots__ = ("_context", "_number", "_spec")

    def __init__(self, spec: PassSpec, context: Context) -> None:
        self._spec = spec
        self._context = context
        self._number = 0  # of the ``GraphTask``

    @staticmethod
    def suits(spec: PassSpec, context: Context) -> bool:
        """Whether the core may run sources of a pass."""
        return (
            context.index is not None
            and not (spec.restricted or spec.create or spec.deterministic or spec.anomaly)
            and context.replay is None
            and seam.streams is seam.NO_STREAMS
            and reducers.none
            and not sharded.states()
        )

    def run(
        self, sources: list[Any], counts: list[int], grads: list[torch.Tensor | None], *, roots: bool = False
    ) -> list[Answers] | None:
        """Run sources whose gradients have arrived, and add the gradients of their leaves. Returns the gradients of the
        messages that they reach; None if they have to run in another way, then nothing has been done.

        Args:
            sources: The core's objects of the sources.
            counts: How many of the gradients belong to each.
            grads: The gradients.
            roots: Whether the source is the roots of the pass, which no other pass may meet.
        """
        if hooks.node_hooks.possible:
            return None
        if RemovableHandle.next_id > hooks.own_handles:  # multi-grad hooks may ask which nodes run
            with self._task(sources):
                found = self._compute(sources, counts, grads, roots)
        else:
            found = self._compute(sources, counts, grads, roots)
        if found is None:
            return None
        leaves, answers = found
        if self._spec.into_grad:
            with grad_writers.lock:
                left = leaves.rest() if grad_writers.count else leaves.add_to_grad()
        else:
            left = self._context.accumulate_all(leaves)
        if left:
            Leaves(self._context, self._spec, None).add(left)
        return answers

    def _compute(
        self, sources: list[Any], counts: list[int], grads: list[torch.Tensor | None], roots: bool
    ) -> tuple[Any, list[Answers]] | None:
        spec = self._spec
        return run_sources(
            self._context.index,
            sources,
            counts,
            grads,
            retain=spec.retain,
            most_nodes=SEND_EARLY_NODES,
            forget=roots,
            checkpoints=spec.into_grad,
        )

    def _task(self, sources: Sequence[Any]) -> GraphTask:
        self._number = self._number or new_task_number()
        return GraphTask(self._number, lambda: nodes_behind(end for each in sources for end in each.ends()).keys())
