"""The two ends of a message in the graph.

[Note: roles of a tensor]

- *sent*: a tensor of an outgoing message that requires grad. Its gradient edge is kept in the message's send
  record, not the tensor. It may be a leaf.
- *received*: what it becomes at the other end: an output of the message's recv node, never a leaf, so that user
  code may
  change it in place.
- *root*: what ``backward`` starts from, on the driver.
- *leaf*: where gradients end in a worker: they are summed in the context (or in ``.grad``).
- *anchor*: the input of a recv node. Asking the engine for its gradient makes the engine run the recv node; the
  gradient itself is always None.

A *source* is where gradients enter a worker's graph: the roots, or a send record. A *sink* is where they end:
leaves and recv nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NewType

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from backhaul.autograd.native import ThreadState

MessageId = NewType("MessageId", int)
"""Names one recorded message among all of the cluster: 16 bits of worker id, 48 of counter."""

ContextId = NewType("ContextId", int)
"""Names one context among all of the cluster, likewise."""

ROOTS = MessageId(0)
"""The roots of a pass, as a source."""

Grads = Sequence[torch.Tensor | None]

_firing = ThreadState("backhaul_firing")


class SendRecord:
    """The sending end of a message: where its gradients enter this worker."""

    __slots__ = ("born_in", "edges", "message", "order", "to")

    def __init__(
        self,
        message: MessageId,
        to: int,
        tensors: Sequence[torch.Tensor],
        order: tuple[int, ...],
        born_in: tuple[int, int] | None = None,
    ) -> None:
        self.message = message
        self.to = to
        self.edges: list[GradientEdge] = [get_gradient_edge(tensor) for tensor in tensors]
        self.order = order  # place in program order; see recording
        self.born_in = born_in  # the pass that sent it, if it is a gradient message


class Recv:
    """The receiving end of a message. The node that fires it hangs in the graph of the received tensors."""

    __slots__ = ("anchor", "message", "order", "sender")

    def __init__(self, message: MessageId, sender: int, order: tuple[int, ...]) -> None:
        self.message = message
        self.sender = sender
        self.order = order
        self.anchor = torch.empty(0, requires_grad=True)


class RecvRpc(torch.autograd.Function):
    """The recv node. Its backward hands the gradients of the received tensors to whoever runs the engine."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, recv: Recv, tensors: list[torch.Tensor]) -> Any:
        # In a list: tensors given directly and returned would be views of their inputs.
        ctx.recv = recv
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        fire = _firing.get()
        if fire is None:
            raise RuntimeError(
                "this graph reaches back to another worker: use backhaul.backward(context, [loss]) inside "
                "`with backhaul.context() as context:` instead of loss.backward() or torch.autograd.grad()"
            )
        fire(ctx.recv, grads)
        return None, None, None


RecvNode: Any = RecvRpc._backward_cls
"""The class of recv nodes in a graph; a node's ``recv`` says which it is."""


class _Single(torch.autograd.Function):
    """Gives one output of a recv node a node of its own."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, alias: list[torch.Tensor]) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return alias[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        return grad, None


def _apart(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Give each tensor memory of its own: the graph does not know which of them share it, so a change of one in place
    would spoil the gradients of the others without a word.
    """
    if len(tensors) == 1:
        return [tensors[0].detach()]
    found = []
    seen: set[int] = set()
    for tensor in tensors:
        memory = tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided and not tensor.is_nested else 0
        found.append(tensor.detach().clone() if memory in seen else tensor.detach())
        if memory:
            seen.add(memory)
    return found


def receive(recv: Recv, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Make received tensors part of the graph.

    The engine calls the hooks of all outputs of a node that runs, with None where there is no gradient. Two tensors
    that happen to travel in one message have nothing to do with each other, so each gets a node of its own.
    """
    apply: Callable[..., Any] = RecvRpc.apply
    outputs: Sequence[torch.Tensor] = apply(recv.anchor, recv, _apart(tensors))
    if len(outputs) == 1:
        return list(outputs)
    single: Callable[..., torch.Tensor] = _Single.apply
    return [single(output, [output.detach()]) for output in outputs]


class firing:
    """While inside, recv nodes that the engine runs hand their gradients to ``fire``."""

    __slots__ = ("_fire", "_outer")

    def __init__(self, fire: Callable[[Recv, Grads], None]) -> None:
        self._fire = fire
        self._outer: Any = None

    def __enter__(self) -> None:
        self._outer = _firing.get()
        _firing.set(self._fire)

    def __exit__(self, *_: object) -> None:
        _firing.set(self._outer)


def add(left: torch.Tensor | None, right: torch.Tensor | None) -> torch.Tensor | None:
    """The sum of two gradients, out of place: earlier ones are in graphs and in users' hands."""
    if left is None or right is None:
        return right if left is None else left
    if left.layout is not torch.strided and right.layout is torch.strided:
        return right + left  # torch adds sparse to dense, not the other way round
    return left + right
