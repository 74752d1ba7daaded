"""The two ends of a message in the graph: a send record on the worker that sends it, a recv end on the worker that
receives it. Knows no wire format and no RPC.

[Note: roles of a tensor] Every tensor that takes part in a pass has at least one of these roles. Other modules use the
words as defined here.

- *sent*: a tensor of an outgoing message that requires grad. The send record keeps the tensor's gradient edge, not the
  tensor. A sent tensor may be a leaf.
- *received*: the tensor that a sent tensor becomes on the other worker. It is the output of a *recv node*, never a
  leaf, so user code may change it in place.
- *root*: a tensor that ``backward`` starts from, on the worker that drives the pass.
- *leaf*: a tensor at which gradients end on a worker. They are summed in the context, or in ``.grad``.
- *cut*: a received tensor through which no gradient can go back, because it was received in a context that was
  released, or outside any context where ``Options(autograd="context")`` holds. It has a recv node that belongs to no
  message.

A *recv node* is the end of the local graph behind a received tensor. torch's engine is asked for the gradient that
arrives at the node, and never runs it. If the engine does run the node, because nothing of Backhaul saw the backward
pass begin, the node raises an error that says what to do.

A *source* is where gradients enter a worker's graph: the roots, or a send record. A *sink* is where they end: leaves
and recv nodes.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from backhaul._autograd.ids import NO_CONTEXT, ROOTS, ContextId, MessageId
from backhaul._autograd.messages import AutogradNote
from backhaul._autograd.torch_engine.boundary import MARK, BoundaryNode
from backhaul._autograd.torch_engine.run import Node, leaf_edge
from backhaul._native import core
from backhaul._wire.messages import pack
from backhaul._wire.tensors.subclasses import TensorList, mark_refused, may_require_grad

if TYPE_CHECKING:
    from backhaul._autograd.container import Container
    from backhaul._autograd.context import Context

_FIRST = (0,)

Grads = Sequence[torch.Tensor | None]

End = GradientEdge | torch.Tensor
"""Where a gradient enters a graph. A tensor stands for a leaf: its edge is made when it is needed."""


def edge_of(end: End) -> GradientEdge:
    """The edge of an end."""
    return leaf_edge(end) if isinstance(end, torch.Tensor) else end


class SendRecord(msgspec.Struct, eq=False):
    """The sending end of a message: where its gradients enter this worker.

    Attributes:
        message: The message.
        to: The worker that it was sent to.
        order: Its place in program order; see [Note: order] in recording.
        source: The native core's object, which keeps the edges of the sent tensors; None: ``kept_ends`` has them.
        kept_ends: The ends, once a part in Python has asked for them.
        devices: Where the tensors are, if one is on a CUDA device.
        born_in: The pass that sent the message, if it is a gradient message.
        replied: The message traveled as a reply, so its gradients travel as a request: see ``devices.placement``.
        failed: Its call failed: it is not known whether the other worker ran it.
    """

    message: MessageId
    to: int
    order: tuple[int, ...]
    source: Any = None
    kept_ends: list[End] | None = None
    devices: list[torch.device] | None = None
    born_in: tuple[int, int] | None = None
    replied: bool = False
    failed: bool = False

    @property
    def ends(self) -> list[End]:
        """Where gradients enter, for each tensor of the message that is recorded."""
        if self.kept_ends is None:
            self.kept_ends = self.source.ends()
        return self.kept_ends

    def bring(self, grads: Grads) -> Grads:
        """Move gradients to the devices of their tensors: device maps may have sent both to the CPU."""
        if self.devices is None:
            return grads
        with torch.enable_grad():  # under create_graph the move is recorded, in whatever grad mode this thread is
            return [
                grad if grad is None or grad.device == device else grad.to(device)
                for grad, device in zip(grads, self.devices, strict=True)
            ]


def ends_of(tensors: Sequence[torch.Tensor]) -> list[End]:
    """Where the gradients of tensors that require grad enter."""
    ends: list[End] = []
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in tensors:
            node = tensor.grad_fn
            if node is None:
                ends.append(tensor)
            elif isinstance(node, torch._C._FunctionBase):  # without an edge torch frees the node
                ends.append(get_gradient_edge(tensor))
            else:
                ends.append(GradientEdge(node, tensor.output_nr))
    return ends


def _devices_of(tensors: Sequence[torch.Tensor]) -> list[torch.device] | None:
    """Where the tensors of a message are, if one is on a CUDA device."""
    return [tensor.device for tensor in tensors] if any(tensor.is_cuda for tensor in tensors) else None


class Recv(msgspec.Struct, eq=False):
    """The receiving end of a message. Each received tensor's recv node is marked with it and the tensor's index.

    Attributes:
        message: The message.
        sender: The worker that sent it.
        order: Its place in program order.
        replied: It traveled as a reply.
        context: The ``mark`` of the context in which it was received.
        count: How many tensors of the message are recorded.
    """

    message: MessageId
    sender: int
    order: tuple[int, ...]
    replied: bool = False
    context: ContextId = NO_CONTEXT
    count: int = 0

    boundary: ClassVar[BoundaryNode] = BoundaryNode(
        "this graph reaches back to another worker through a context: use backhaul.backward(context, [loss]) inside "
        "`with backhaul.context() as context:` instead of loss.backward() or torch.autograd.grad(), or make the calls "
        "outside the context"
    )
    """Makes the recv nodes."""


class PlainRecv(Recv, eq=False, weakref=True):
    """The receiving end of a message outside contexts. Only the recv nodes of the message refer to it, so it dies with
    the local graph. The send record on the other worker lives as long as this object, see ``plain_graph``.

    Attributes:
        generation: How often the sender had been lost when the message came.
        on_death: Called when this object dies before the sender has freed its record, see ``PlainGraph.watch``.
        spent: The sender has freed its record, or frees it in a pass that runs now: its graph is used up.
    """

    generation: int = 0
    on_death: Callable[[tuple[int, MessageId]], None] | None = None
    spent: bool = False

    boundary: ClassVar[BoundaryNode] = BoundaryNode(
        "this graph reaches back to another worker, but its backward pass was not started by loss.backward(), "
        "torch.autograd.backward() or torch.autograd.grad() while a worker of Backhaul ran in this process; start it "
        "by one of these, before shutdown()"
    )

    def __del__(self) -> None:
        message = self.message
        live.discard(message)
        if (not self.spent or message in doubted) and self.on_death is not None:
            self.on_death((self.sender, message))
        doubted.discard(message)


live: set[MessageId] = set()
"""The messages outside contexts whose received tensors are part of a graph of this process."""

doubted: set[MessageId] = set()
"""Those for which the sender has asked after the loss of a channel. A pass that was to free the record may have failed,
and this process may never hear of that. So the death of the receiving end is reported, even if it is spent.
"""

Spent = tuple[weakref.ref[PlainRecv], int, MessageId]
"""A received message whose sender frees its record, the sender, and the id of the message."""


def _claim(recvs: list[Recv], retain: bool, spent: list[Spent]) -> PlainRecv | None:
    """The gradients of messages are about to be sent. Returns the first message outside contexts that is spent already.
    Until then, marks each as spent unless ``retain``, and adds it to ``spent``.
    """
    for recv in recvs:
        if type(recv) is PlainRecv:
            if recv.spent:
                return recv
            if not retain:
                recv.spent = True
                spent.append((weakref.ref(recv), recv.sender, recv.message))
    return None


claim: Callable[[list[Recv], bool, list[Spent]], PlainRecv | None] = _claim if core is None else core.claim

if core is not None:
    core.connect(mark=MARK, plain_recv=PlainRecv, gradient_edge=GradientEdge)

_cut_node = BoundaryNode(
    "this graph reaches back to a tensor that was received outside any context, so no gradient can go back to its "
    "sender: make the call inside `with backhaul.context() as context:` and use backhaul.backward(context, [loss]) "
    "instead of loss.backward(); if no gradient is meant, make the call under torch.no_grad() or detach() the tensor"
)

recv_of: Callable[[Node], tuple[Recv, int] | None] = BoundaryNode.mark_of
"""The recv end and index that a recv node is marked with; None for all other nodes."""


def apart(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Copy tensors that share memory with another tensor of the message. The graph does not know which tensors share
    memory, so a change of one in place would silently make gradients of another wrong.
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
    """Make received tensors part of the graph. Each gets a recv node of its own: tensors of one message need not depend
    on each other.

    Args:
        recv: Their message.
        tensors: The recorded tensors of the message.
        others: The other tensors of the message.
    """
    recv.count = len(tensors)
    put = recv.boundary.put
    return [put(tensor.requires_grad_(), (recv, index)) for index, tensor in enumerate(apart(tensors, others))]


def receive_wrapper(recv: Recv, first: int, number: int, wrapper: torch.Tensor) -> torch.Tensor:
    """As ``receive``, for a tensor that was built from others of its message; see ``wire.tensors.subclasses``.

    Args:
        recv: Its message.
        first: The index in the message of the wrapper with number 0.
        number: The number of the wrapper.
        wrapper: The tensor.
    """
    return recv.boundary.put(wrapper.detach().requires_grad_(), (recv, first + number))


def receive_outside(sender: int, tensors: list[torch.Tensor], context: ContextId = NO_CONTEXT) -> list[torch.Tensor]:
    """Cut tensors that were received outside any context, or in one that was released: no gradient can go back to their
    sender. They raise an error in backward.
    """
    if not may_require_grad(tensors):
        return tensors
    recv = Recv(ROOTS, sender, (), context=context)

    def refuse(index: int, tensor: torch.Tensor) -> torch.Tensor:
        return mark_refused(_cut_node.put(tensor, (recv, index)))

    def attach(number: int, wrapper: torch.Tensor) -> torch.Tensor:
        return refuse(len(tensors) + number, wrapper.detach().requires_grad_())

    made = [refuse(index, tensor) if tensor.requires_grad else tensor for index, tensor in enumerate(tensors)]
    return TensorList(made, tensors.wrapped, attach) if isinstance(tensors, TensorList) else made


def record_send(
    container: Container,
    context: Context,
    to: int,
    tensors: Sequence[torch.Tensor],
    *,
    place: tuple[int, ...],
    born_in: tuple[int, int] | None = None,
    message: MessageId = ROOTS,
    replied: bool = False,
    copies: frozenset[int] = frozenset(),
) -> AutogradNote | None:
    """Keep the sending end of a message. Returns the note that goes with it; None if the context was released.
    ``copies``: indices of tensors that are not recorded.
    """
    if not tensors:
        return AutogradNote(context.id, ROOTS, (), place) if context.know(to) else None
    source, kept, devices = None, None, None
    if context.index is None:
        positions: tuple[int, ...] = tuple([index for index, tensor in enumerate(tensors) if tensor.requires_grad])
        if copies:
            positions = tuple([index for index in positions if index not in copies])
        if positions:
            recorded = [tensors[index] for index in positions]
            kept, devices = ends_of(recorded), _devices_of(recorded)
    elif found := core.record_sent(context.index, tensors, copies):
        positions, source, on_host = found
        if not on_host:
            devices = _devices_of([tensors[index] for index in positions])
    else:
        positions = ()
    if not positions:
        return AutogradNote(context.id, ROOTS, positions, place) if context.know(to) else None
    message = message or container.new_message()
    record = SendRecord(message, to, place, source, kept, devices, born_in, replied)
    return AutogradNote(context.id, message, positions, place) if context.add_send(record) else None


def send_note(
    container: Container,
    context: Context,
    to: int,
    tensors: Sequence[torch.Tensor],
    *,
    place: tuple[int, ...],
    message: MessageId = ROOTS,
    replied: bool = False,
    copies: frozenset[int] = frozenset(),
) -> bytes | None:
    """As ``record_send``. Returns the encoded note."""
    if context.index is not None and not context.released:
        context.known.add(to)
        noted: bytes | None = core.record_message(
            context.index,
            context.sends,
            context.pending,
            SendRecord,
            context.id,
            to,
            tensors,
            copies,
            place,
            container.new_message,
            message,
            replied,
        )
        if noted is not None:
            return noted
    note = record_send(container, context, to, tensors, place=place, message=message, replied=replied, copies=copies)
    return None if note is None else pack(note)


def record_recv(
    context: Context, sender: int, note: AutogradNote, tensors: list[torch.Tensor], *, replied: bool = False
) -> list[torch.Tensor]:
    """Keep the receiving end of a message. Returns the tensors as part of the graph."""
    message = note.message
    if not message:
        context.know(sender)
        return tensors
    recv = context.receive(message, sender, note.order, replied)
    made = recv.boundary.put_all(tensors, note.positions, recv)
    if made is not None:
        recv.count = len(note.positions)
        return made
    if len(tensors) == 1 and note.positions == _FIRST and type(tensors) is list:
        recv.count = 1
        return [recv.boundary.put(tensors[0].requires_grad_(), (recv, 0))]
    positions = [position for position in note.positions if position < len(tensors)]
    others = [place for place in range(len(tensors)) if place not in positions]
    recorded = list(tensors)
    if isinstance(tensors, TensorList):  # wrappers are built from the others, and must not share memory either
        recorded = TensorList(tensors, 0)
        for place, tensor in zip(others, apart([tensors[place] for place in others], ()), strict=True):
            recorded[place] = tensor
    made = receive(recv, [tensors[place] for place in positions], [recorded[place] for place in others])
    for position, tensor in zip(positions, made, strict=True):
        recorded[position] = tensor
    if isinstance(recorded, TensorList):
        recorded.attach = functools.partial(receive_wrapper, recv, len(made))
        recv.count = len(note.positions)
    return recorded


def add(left: torch.Tensor | None, right: torch.Tensor | None) -> torch.Tensor | None:
    """The sum of two gradients, out of place: graphs and users may hold the earlier ones."""
    if left is None or right is None:
        return right if left is None else left
    if left.layout is not torch.strided and right.layout is torch.strided:
        return right + left  # torch adds sparse to dense, not dense to sparse
    return left + right
