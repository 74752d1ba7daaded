"""Runs sources that meet no others, in the native core: all those of a frame at once.

The core asks the engine for the gradients of all leaves and recv nodes that the sources reach, and adds the gradients
of the leaves. It sees the hooks of every node, also those of a DDP reducer. If leaves have hooks, the core runs a
source only if there is no other, and leaves the gradients of the leaves to Python. ``ReadyGroups`` does the same source
by source, in Python. It takes what the core does not: sources that meet, devices, and passes with options. Knows no
frame and no worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from backhaul._autograd.backward.early_sends import SendEarly
from backhaul._autograd.backward.groups import nodes_behind
from backhaul._autograd.backward.leaves import Leaves
from backhaul._autograd.context import Context
from backhaul._autograd.forward.functions import Recv, SendRecord
from backhaul._autograd.ids import MessageId
from backhaul._autograd.messages import PassSpec
from backhaul._autograd.torch_engine import hooks, sharded
from backhaul._autograd.torch_engine.graph_task import GraphTask
from backhaul._autograd.torch_engine.run import Node, grad_writers, run_sources
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
    recvs: list[Recv]
    messages: list[MessageId]
    counts: list[int]
    grads: Sequence[torch.Tensor | None]
    nbytes: int


def suits(spec: PassSpec, context: Context) -> bool:
    """Whether the core may run sources of a pass on this worker."""
    return not (
        context.index is None
        or spec.restricted
        or spec.create
        or spec.deterministic
        or spec.anomaly
        or context.replay is not None
        or seam.streams.in_use()
        or sharded.states()
    )


def run_simple(
    spec: PassSpec,
    context: Context,
    sources: list[Any],
    counts: list[int],
    grads: list[torch.Tensor | None],
    *,
    task_number: Callable[[], int],
    send_early: SendEarly,
    send_all: Callable[[list[Answers]], None],
    roots: bool = False,
) -> tuple[list[Answers], dict[int, int]] | None:
    """Run sources whose gradients have arrived, and add the gradients of their leaves. Returns the gradients of
    messages that are left to send, and all messages that the sources reach with their senders. None: the sources have
    to run in another way, and nothing has been done.

    Args:
        spec: The pass, which ``suits``.
        context: Its context on this worker.
        sources: Ids of messages, or objects of the core.
        counts: How many of the gradients belong to each.
        grads: The gradients.
        task_number: Returns the number of the pass's ``GraphTask``.
        send_early: Sends the gradients of a message while a large group still runs. They are not returned.
        send_all: Sends gradients before hooks and reducers of leaves run: a reducer of DDP waits for other processes.
        roots: Whether the source is the roots of the pass, which no other pass may meet.
    """
    records, retain = context.sends, spec.retain
    if RemovableHandle.next_id > hooks.own_handles:  # multi-grad hooks may ask which nodes run
        with GraphTask(task_number(), lambda: _nodes(records, sources)):
            found = run_sources(
                context.index, records, sources, counts, grads, retain, send_early, roots, spec.into_grad
            )
    else:
        found = run_sources(context.index, records, sources, counts, grads, retain, send_early, roots, spec.into_grad)
    if found is None:
        return None
    leaves, hooked, answers, produced = found
    if hooked:
        left = leaves.rest()
        if left and answers:
            send_all(answers)
            answers = []
    elif spec.into_grad:
        with grad_writers.lock:
            left = leaves.rest() if grad_writers.count else leaves.add_to_grad()
    else:
        left = context.accumulate_all(leaves)
    if left:
        Leaves(context, spec, None).add(left)
    return answers, produced


def _nodes(records: Mapping[MessageId, SendRecord], sources: Iterable[Any]) -> Set[Node]:
    found = [source if records.get(source) is None else records[source].source for source in sources]
    return nodes_behind(end for source in found for end in source.ends()).keys()
