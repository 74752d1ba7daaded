"""The errors of passes: what happened, where, and what to do. Knows no frame and no thread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence

from backhaul._autograd.context import Context
from backhaul._autograd.forward.functions import Recv
from backhaul._autograd.ids import NO_CONTEXT, PLAIN, ROOTS, TOGETHER, MessageId
from backhaul._autograd.messages import PassSpec
from backhaul.errors import (
    BackwardTimeoutError,
    ContextError,
    ForeignGraphError,
    GraphFreedError,
    PeerLostError,
    SerializationError,
)


class ForeignGraph(Exception):
    """A gradient has arrived at a recv node of another context.

    Attributes:
        recv: The message behind that node.
        source: The source whose graph leads there.
        place: Which of its tensors leads there: of the roots, or of the message that was sent.
    """

    def __init__(self, recv: Recv, source: MessageId, place: int) -> None:
        super().__init__(recv, source, place)
        self.recv = recv
        self.source = source
        self.place = place


def of_context(context: int) -> str:
    """Which graph a pass belongs to, as a part of a sentence."""
    return "outside contexts" if context == PLAIN else f"of context {context}"


def aborted(spec: PassSpec) -> ContextError:
    """The error of a task of a pass that has failed elsewhere."""
    return ContextError(
        f"pass {spec.number} {of_context(spec.context)} was aborted; its driver raises the reason", context=spec.context
    )


def graph_freed(message: MessageId, sender: str | None) -> GraphFreedError:
    """The error for a second pass through a graph outside contexts, on the worker that received the message.

    ``sender``: the name of the worker that sent it; None: that is not known any more.
    """
    where = (
        f"the worker that sent message {message}" if sender is None else f"worker '{sender}', behind message {message}"
    )
    return GraphFreedError(
        f"trying to run backward through the graph a second time: the first pass freed the graph on {where}; give the "
        "first pass retain_graph=True",
        worker=sender,
        message=message,
    )


def graph_lost(  # noqa: PLR0917 (given by position)
    spec: PassSpec, worker: str, source: MessageId, lost: int, name: str, reason: str
) -> PeerLostError:
    """The error for gradients of a message that this worker cannot go back through, because it has dropped the graph
    when it lost the worker ``lost``, to which it had sent the message. The other worker may not have noticed.
    """
    return PeerLostError(
        f"worker '{worker}' had lost worker '{name}' ({reason}), and has dropped the graph behind message {source}, "
        "which it had sent to that worker; both can be reached again, so compute the roots again",
        worker=worker if lost == spec.driver else name,
        reason=reason,
        context=spec.context,
        pass_number=spec.number,
        messages=(source,),
    )


def place_of(spec: PassSpec, source: int, worker: str) -> str:
    """Where in a pass something went wrong."""
    what = "messages whose gradients came together" if source == TOGETHER else f"message {source}"
    return f"in the backward pass {of_context(spec.context)}, {what}, on worker '{worker}'"


def add_place(error: BaseException, spec: PassSpec, source: int, worker: str) -> None:
    """Add a note to an error that says where in a pass it was raised; once."""
    place = place_of(spec, source, worker)
    if place not in getattr(error, "__notes__", ()):
        with contextlib.suppress(Exception):  # an exception that takes no notes
            error.add_note(place)


def peer_lost(spec: PassSpec, name: str, reason: str, messages: Sequence[int] = ()) -> PeerLostError:
    """The error of a pass that needs a lost worker. ``messages``: what that worker had to consume."""
    what = ", ".join(f"message {message}" for message in messages[:4])
    what += f" and {len(messages) - 4} more" if len(messages) > 4 else ""
    where = f", which had to consume {what}" if what else ""
    return PeerLostError(
        f"lost worker '{name}' in backward pass {spec.number} {of_context(spec.context)}{where}: {reason}",
        worker=name,
        reason=reason,
        context=spec.context,
        pass_number=spec.number,
        messages=tuple(messages),
    )


def missing_source(worker: str, context: int, source: MessageId, *, freed: bool) -> ContextError:
    """The error for gradients of a message that this worker cannot go back through. ``freed``: it could before."""
    if context == PLAIN:
        return GraphFreedError(
            f"worker '{worker}' no longer has the graph behind message {source}: an earlier pass freed it; give the "
            "earlier pass retain_graph=True, or compute the roots again",
            worker=worker,
            context=context,
            message=source,
        )
    if freed:
        return GraphFreedError(
            f"trying to run backward through the graph of context {context} a second time: the first pass freed the "
            f"graph behind message {source} on worker '{worker}'; give the first pass retain_graph=True",
            worker=worker,
            context=context,
            message=source,
        )
    return ContextError(
        f"worker '{worker}' sent no message {source} in context {context}; compute the roots inside this context, "
        "not in another one",
        worker=worker,
        context=context,
        message=source,
    )


def undecodable(worker: str, sender: str | None, source: MessageId, error: BaseException) -> SerializationError:
    """The error for gradients that a worker cannot decode."""
    origin = "" if sender is None else f" from worker '{sender}'"
    made = SerializationError(
        f"worker '{worker}' cannot decode the gradients of message {source}{origin}: {type(error).__name__}: {error}",
        worker=worker,
    )
    made.__cause__ = error
    return made


def foreign_graph(
    found: ForeignGraph, context: Context, worker: str, name_of: Callable[[int], str], *, released: bool
) -> ForeignGraphError:
    """The error for a gradient that would have to go through another context, or through none.

    Args:
        found: Where the gradient arrived.
        context: The context of the pass.
        worker: The name of this worker.
        name_of: Names another worker.
        released: Whether the other context was released.
    """
    recv, source, origin = found.recv, found.source, found.recv.context
    sender = name_of(recv.sender)
    if source == ROOTS:
        what = f"roots[{found.place}]"
    else:
        record = context.sends.get(source)
        to = "another worker" if record is None else f"worker '{name_of(record.to)}'"
        what = f"a tensor that worker '{worker}' sent to {to}"
    if origin == NO_CONTEXT or origin <= PLAIN:
        where = "outside any context"
    else:
        where = f"in context {origin}" + (", which was released" if released else "")
    inside = "outside contexts" if context.id == PLAIN else f"in context {context.id}"
    if context.id == PLAIN and origin <= PLAIN:
        text = (
            f"{what} depends on a tensor that another worker of this process received, and a pass of worker '{worker}' "
            "goes back only through what that worker received; compute the loss of one worker at a time"
        )
    else:
        text = (
            f"{what} depends on a tensor that worker '{worker}' received from worker '{sender}' {where}, so its "
            f"gradient cannot be computed {inside}; make the call {inside}, or detach() the received tensor if no "
            "gradient is meant to go back there"
        )
    return ForeignGraphError(
        text,
        worker=worker,
        context=context.id,
        message=recv.message or None,
        origin=None if origin == NO_CONTEXT or origin <= PLAIN else origin,
        sender=sender,
        root=found.place if source == ROOTS else None,
    )


def too_late(
    spec: PassSpec, worker: str, timeout: float, cut_by: str | None, outstanding: Mapping[int, str]
) -> BackwardTimeoutError:
    """The error of a pass that was not done in time.

    Args:
        spec: The pass.
        worker: The name of its driver.
        timeout: The time that it had, in seconds.
        cut_by: What set the deadline, if that was not the timeout.
        outstanding: The messages under way, and the worker that each is at.
    """
    where = ", ".join(f"message {m} at worker '{name}'" if m else "the roots" for m, name in outstanding.items())
    return BackwardTimeoutError(
        f"backward {of_context(spec.context)} was not done "
        + (f"within {timeout:g} s" if cut_by is None else f"when the deadline of {cut_by} was over")
        + f"; under way: {where}",
        worker=worker,
        context=spec.context,
        outstanding=dict(outstanding),
        cut_by=cut_by,
    )
