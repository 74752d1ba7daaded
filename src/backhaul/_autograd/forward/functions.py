"""The two ends of a message in the graph.

[Note: roles of a tensor]

- *sent*: a tensor of an outgoing message that requires grad. Its gradient edge is kept in the message's send
  record, not the tensor. It may be a leaf.
- *received*: what it becomes at the other end: the output of a recv node, never a leaf, so that user code may change
  it in place.
- *root*: what ``backward`` starts from, on the driver.
- *leaf*: where gradients end in a worker: they are summed in the context (or in ``.grad``).
- *recv node*: the end of the graph behind a received tensor. The engine is asked for the gradient that comes there,
  and never runs it: in a plain ``loss.backward()`` it raises an error that says what to call instead. A tensor that
  requires grad and is received outside a context gets one too, which belongs to no message.

A *source* is where gradients enter a worker's graph: the roots, or a send record. A *sink* is where they end:
leaves and recv nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NewType

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from backhaul._autograd.torch_engine.boundary import BoundaryNode
from backhaul._autograd.torch_engine.run import Node, leaf_edge
from backhaul._wire.tensors.subclasses import TensorList, mark_refused, may_require_grad

MessageId = NewType("MessageId", int)
"""Names one recorded message among all of the cluster: 16 bits of worker id, 48 of counter."""

ContextId = NewType("ContextId", int)
"""Names one context among all of the cluster, likewise."""

NO_CONTEXT = ContextId(-1)
"""In the place of a context's id, where there is none."""

ROOTS = MessageId(0)
"""The roots of a pass, as a source."""

Grads = Sequence[torch.Tensor | None]

End = GradientEdge | torch.Tensor
"""Where a gradient enters a graph; a tensor is a leaf, whose edge is made when it is needed."""


def edge_of(end: End) -> GradientEdge:
    """The edge of an end."""
    return leaf_edge(end) if isinstance(end, torch.Tensor) else end


class SendRecord:
    """The sending end of a message: where its gradients enter this worker."""

    __slots__ = ("born_in", "devices", "ends", "failed", "message", "order", "replied", "to")

    def __init__(
        self,
        message: MessageId,
        to: int,
        tensors: Sequence[torch.Tensor],
        order: tuple[int, ...],
        *,
        born_in: tuple[int, int] | None = None,
        replied: bool = False,
    ) -> None:
        self.replied = replied  # it went the way of replies, so its gradients come that of requests: see cuda.placement
        self.message = message
        self.to = to
        self.ends: list[End] = []
        self.devices: list[torch.device] | None = None  # where the tensors are, if one is on a CUDA device
        with torch._C.DisableTorchFunctionSubclass():
            for tensor in tensors:
                if tensor.is_cuda and self.devices is None:
                    self.devices = [each.device for each in tensors]
                node = tensor.grad_fn
                if node is None:
                    self.ends.append(tensor)
                elif isinstance(node, torch._C._FunctionBase):  # a function in Python does not keep its own node
                    self.ends.append(get_gradient_edge(tensor))
                else:
                    self.ends.append(GradientEdge(node, tensor.output_nr))
        self.order = order  # place in program order; see recording
        self.born_in = born_in  # the pass that sent it, if it is a gradient message
        self.failed = False  # so did its call; whether it was done there, and is part of anything, is not known

    def bring(self, grads: Grads) -> Grads:
        """Gradients where their tensors are: a map may have sent both ways to the CPU, see cuda.placement."""
        if self.devices is None:
            return grads
        with torch.enable_grad():  # those of a pass that records itself stay recorded, whatever this thread does
            return [
                grad if grad is None or grad.device == device else grad.to(device)
                for grad, device in zip(grads, self.devices, strict=True)
            ]


class Recv:
    """The receiving end of a message. Marks, with its index, each received tensor's node in the graph."""

    __slots__ = ("context", "count", "message", "order", "replied", "sender")

    def __init__(
        self,
        message: MessageId,
        sender: int,
        order: tuple[int, ...],
        replied: bool = False,
        context: ContextId = NO_CONTEXT,
    ) -> None:
        self.context = context  # in which it was received
        self.replied = replied  # it came the way of replies
        self.message = message
        self.sender = sender
        self.order = order
        self.count = 0  # tensors


_fence = BoundaryNode(
    "this graph reaches back to another worker: use backhaul.backward(context, [loss]) inside "
    "`with backhaul.context() as context:` instead of loss.backward() or torch.autograd.grad()"
)

_outside = BoundaryNode(
    "this graph reaches back to a tensor that was received outside any context, so no gradient can go back to its "
    "sender: make the call inside `with backhaul.context() as context:` and use backhaul.backward(context, [loss]) "
    "instead of loss.backward(); if no gradient is meant, make the call under torch.no_grad() or detach() the tensor"
)

recv_of: Callable[[Node], tuple[Recv, int] | None] = BoundaryNode.mark_of
"""Which received tensor a node stands for; None for all other nodes."""


def apart(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Give each tensor memory of its own: the graph does not know which of them share it, so a change of one in place,
    or of another that came with it, would spoil gradients without a word.
    """
    found = []
    seen = {memory for tensor in others for memory in _memories(tensor)}
    for tensor in tensors:
        memories = _memories(tensor)
        found.append(tensor if seen.isdisjoint(memories) else tensor.detach().clone())
        seen |= memories
    return found


def _memories(tensor: torch.Tensor) -> set[int]:
    if tensor.is_nested or tensor.layout is torch.jagged:
        parts: Sequence[torch.Tensor] = tensor.detach().unbind()
    elif tensor.layout is torch.sparse_coo:
        parts = (tensor.detach()._indices(), tensor.detach()._values())
    elif tensor.layout is torch.strided:
        parts = (tensor,)
    else:
        parts = (tensor.detach().values(),)
    return {part.untyped_storage().data_ptr() for part in parts} - {0}


def receive(recv: Recv, tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
    """Make received tensors part of the graph. Each gets a node of its own: those that happen to travel in one message
    have nothing to do with each other.

    Args:
        recv: Their message.
        tensors: What is recorded of it.
        others: What else came with it.
    """
    recv.count = len(tensors)
    return [_fence.put(tensor.requires_grad_(), (recv, index)) for index, tensor in enumerate(apart(tensors, others))]


def receive_wrapper(recv: Recv, first: int, number: int, wrapper: torch.Tensor) -> torch.Tensor:
    """As ``receive``, for a tensor that was built from others of its message; see ``wire.subclasses``.

    Args:
        recv: Its message.
        first: The index in the message of the wrapper with number 0.
        number: The number of the wrapper.
        wrapper: The tensor.
    """
    return _fence.put(wrapper.detach().requires_grad_(), (recv, first + number))


def receive_one(recv: Recv, tensor: torch.Tensor) -> list[torch.Tensor]:
    """As ``receive``, for a message of one tensor, which is recorded."""
    recv.count = 1
    return [_fence.put(tensor.requires_grad_(), (recv, 0))]


def receive_outside(sender: int, tensors: list[torch.Tensor], context: ContextId = NO_CONTEXT) -> list[torch.Tensor]:
    """Let received tensors that are part of no context, or of one that was released, refuse their gradients: nothing
    carries them back.
    """
    if not may_require_grad(tensors):
        return tensors
    recv = Recv(ROOTS, sender, (), context=context)

    def refuse(index: int, tensor: torch.Tensor) -> torch.Tensor:
        return mark_refused(_outside.put(tensor, (recv, index)))

    def attach(number: int, wrapper: torch.Tensor) -> torch.Tensor:
        return refuse(len(tensors) + number, wrapper.detach().requires_grad_())

    made = [refuse(index, tensor) if tensor.requires_grad else tensor for index, tensor in enumerate(tensors)]
    return TensorList(made, tensors.wrapped, attach) if isinstance(tensors, TensorList) else made


def add(left: torch.Tensor | None, right: torch.Tensor | None) -> torch.Tensor | None:
    """The sum of two gradients, out of place: earlier ones are in graphs and in users' hands."""
    if left is None or right is None:
        return right if left is None else left
    if left.layout is not torch.strided and right.layout is torch.strided:
        return right + left  # torch adds sparse to dense, not the other way round
    return left + right
