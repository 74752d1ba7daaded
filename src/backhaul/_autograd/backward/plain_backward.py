"""``loss.backward()`` and ``torch.autograd.grad`` over workers.

torch's own functions check and complete their arguments, and then enter the engine by ``torch_engine.entry``. If a
tensor received outside contexts lies behind the roots, the pass runs here. All other passes are torch's own.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import GradientEdge

from backhaul._autograd.backward import pass_errors
from backhaul._autograd.forward.functions import PlainRecv, live, recv_of
from backhaul._autograd.gradient_table import GradientTable
from backhaul._autograd.ids import ContextId
from backhaul._autograd.torch_engine import entry
from backhaul._autograd.torch_engine.run import LeafNode, Node
from backhaul._native import core
from backhaul._runtime.compile_marks import graph_break
from backhaul.errors import BackhaulError

if TYPE_CHECKING:
    from backhaul._autograd.backward.engine import Engine

Root = torch.Tensor | GradientEdge

engines: weakref.WeakValueDictionary[ContextId, Engine] = weakref.WeakValueDictionary()
"""The engines of this process, by the ``mark`` of their plain graphs."""

_UNUSED = (
    "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if this is "
    "the desired behavior."
)  # torch's text


@graph_break
def take(  # noqa: PLR0917 (torch's signature)
    outputs: Sequence[Root],
    seeds: Sequence[torch.Tensor | None],
    retain: bool | None,
    create: bool,
    inputs: Sequence[Root] = (),
    allow_unreachable: bool = True,
    accumulate_grad: bool = True,
) -> tuple[torch.Tensor | None, ...] | None:
    """See ``entry.take``."""
    if not live:
        return None
    recvs = received_behind(outputs)
    if not recvs or any(seed is None for seed in seeds):
        return None
    engine = engines.get(recvs[0].context)
    for recv in recvs:
        if recv.spent:
            raise pass_errors.graph_freed(recv.message, None if engine is None else engine.name_of(recv.sender))
    if engine is None or engine.worker.closed:
        raise BackhaulError(
            "the roots depend on a tensor that another worker sent, but the worker that received it was shut down; "
            "call backward() before shutdown()"
        )
    if any(map(_is_batched, seeds)):
        raise BackhaulError(
            "is_grads_batched and torch.func transforms cannot go back to another worker; use bh.remote_op for the call"
        )
    if inputs and any(isinstance(each, torch.Tensor) and hasattr(each, "owner_name") for each in inputs):
        raise BackhaulError(
            "inputs= names a parameter of another worker, and a pass can only be limited to tensors of this worker; "
            "call backward() without inputs=, and read .grad of the parameter"
        )
    wanted = _once(inputs)
    results = None if accumulate_grad else GradientTable()
    with engine.worker:
        engine.backward(
            engine.container.plain,
            list(outputs),
            [seed if create or seed is None else seed.detach() for seed in seeds],
            inputs=list(wanted.values()) or None,
            timeout=engine.worker.options.backward_timeout,
            retain=bool(retain),
            create=create,
            fast=False,
            into_grad=accumulate_grad,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            results=results,
        )
    if results is None:
        return ()
    found = results.gradients
    gradients = tuple(found.get(wanted[_key(each)]) for each in inputs)
    if not allow_unreachable and any(gradient is None for gradient in gradients):
        raise RuntimeError(_UNUSED)
    return gradients


def _is_batched(seed: torch.Tensor | None) -> bool:
    batched, legacy = torch._C._functorch.is_batchedtensor, torch._C._functorch.is_legacy_batchedtensor
    return seed is not None and (batched(seed) or legacy(seed))


def _once(inputs: Sequence[Root]) -> dict[object, Root]:
    """Each input once. A tensor stands for an edge that is the same."""
    wanted: dict[object, Root] = {}
    for each in inputs:
        key = _key(each)
        if key not in wanted or isinstance(wanted[key], GradientEdge):
            wanted[key] = each
    return wanted


def _key(given: Root) -> object:
    """The same for all inputs that get the same gradient."""
    if not isinstance(given, GradientEdge):
        return id(given) if given.grad_fn is None else (given.grad_fn, given.output_nr)
    node: Node = given.node
    return id(node.variable) if type(node) is LeafNode else (node, given.output_nr)


def received_behind(roots: Sequence[Root]) -> list[PlainRecv]:
    """The messages outside contexts whose received tensors lie behind ``roots``."""
    if core is not None and (listed := core.received_behind(roots)) is not None:
        return listed  # type: ignore[no-any-return]
    found: dict[PlainRecv, None] = {}
    seen: set[Node] = set()
    stack: list[Node] = [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots]
    while stack:
        node = stack.pop()
        if node is None or node in seen or type(node) is LeafNode:
            continue
        seen.add(node)
        mark = recv_of(node)
        if mark is None:
            stack += [following for following, _ in node.next_functions]
        elif type(mark[0]) is PlainRecv:
            found[mark[0]] = None
    return list(found)


entry.take = take
