"""Records calls: puts a note on each, and makes its messages part of the graph of a context, or of the plain graph.

[Note: order] Every recorded message has a place in program order: the place of the request whose handler sent it,
followed by its number among that handler's messages. Message ids depend on the order in which threads run; places do
not. So sums made in the order of places are the same in every run.
"""

from __future__ import annotations

import contextvars
import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from backhaul._autograd.container import Container
from backhaul._autograd.context import Context
from backhaul._autograd.failure.replay import ReplayEntry
from backhaul._autograd.forward.functions import receive_outside, record_recv, record_send, send_note
from backhaul._autograd.ids import NO_CONTEXT, PLAIN, ROOTS, ContextId, MessageId, split
from backhaul._autograd.messages import AutogradNote
from backhaul._autograd.torch_engine import anomaly
from backhaul._rpc.cluster.peers import Peer
from backhaul._wire.codec import Encoded
from backhaul._wire.messages import pack, unpack
from backhaul._wire.tensors.subclasses import detached
from backhaul._worker import deadlines
from backhaul._worker.worker import Worker
from backhaul.errors import SerializationError

_scope: contextvars.ContextVar[Scope | None] = contextvars.ContextVar("backhaul_scope", default=None)

carried: Callable[[], Scope | None] | None = None
"""Finds the current scope on threads that context variables do not reach; see ``jit.thread_state``."""

_NO_COPIES: frozenset[int] = frozenset()

_NO_GRAD = object()
"""Kept for a call made under ``no_grad``: its result does not require grad, like the result of a local operation."""

UNRECORDED = pack(AutogradNote(NO_CONTEXT))
"""The note on a request made under ``no_grad`` with tensors that require grad: the receiver detaches them."""


class Scope:
    """Marks a context as current on one worker, for one thread or task."""

    __slots__ = ("__weakref__", "_numbers", "_place", "context", "worker")

    def __init__(self, worker: Worker, context: Context, place: tuple[int, ...] = ()) -> None:
        self.worker = worker
        self.context = context
        self._place = place
        self._numbers = itertools.count()

    reply = ROOTS
    """The id under which the reply is recorded; ``ROOTS``: a new one."""

    def next_place(self) -> tuple[int, ...]:
        """The place of the next message; see [Note: order]."""
        return (*self._place, next(self._numbers))


class PlainScope(Scope):
    """The scope of a worker's calls outside contexts and outside handlers of such calls."""

    __slots__ = ("_new_message",)

    def __init__(self, worker: Worker, container: Container) -> None:
        super().__init__(worker, container.plain)
        self._new_message = container.new_message

    def next_place(self) -> tuple[int, ...]:
        return (self._new_message(),)


class ReplayedScope(Scope):
    """The scope of a request that a lost worker has answered before; see [Note: replay]."""

    __slots__ = ("reply",)

    def __init__(self, worker: Worker, context: Context, place: tuple[int, ...], reply: MessageId) -> None:
        super().__init__(worker, context, place)
        self.reply = reply


_NOWHERE = Scope.__new__(Scope)
"""Set as the current scope to say that there is no scope. Then ``carried`` is not asked either."""
_NOWHERE.worker = None  # type: ignore[assignment]


def current_scope(worker: Worker) -> Scope | None:
    """The scope of the context that is current here, if it belongs to ``worker``."""
    scope = _find_scope()
    return scope if scope is not None and scope.worker is worker and scope.context.id != PLAIN else None


def _find_scope() -> Scope | None:
    """The scope of a context, or of a handler of a call outside contexts; ``_NOWHERE``: calls are not recorded."""
    scope = _scope.get()
    return carried() if scope is None and carried is not None else scope


def enter(scope: Scope | None) -> contextvars.Token[Scope | None]:
    """Make a scope current in this thread or task; None: make no scope current."""
    return _scope.set(_NOWHERE if scope is None else scope)


def leave(token: contextvars.Token[Scope | None]) -> None:
    """Undo ``enter``."""
    _scope.reset(token)


def _lost_gradient(encoded: Encoded, context: Context) -> SerializationError:
    encoded.discard()
    first = encoded.unrecorded[0]
    where = "outside contexts" if context.id == PLAIN else f"inside context {context.id}"
    return SerializationError(
        f"{first} requires grad and is sent {where}, but the serialization of its class loses the gradient; "
        "if no gradient is meant, make the call under torch.no_grad() or send a detached copy; otherwise send plain "
        "tensors, or give the class __tensor_flatten__ and __tensor_unflatten__",
        path=first.partition(" ")[0],
    )


class ForwardRecorder:
    """The interceptor that records calls. Thread-safe."""

    key = "autograd"
    leaves = False
    """Whether tensors received outside a context are leaves, as in ``torch.distributed.rpc``. Otherwise ``backward``
    raises an error when it reaches them.
    """

    def __init__(self, worker: Worker, container: Container) -> None:
        self._worker = worker
        self._container = container
        self._plain = PlainScope(worker, container) if worker.options.autograd == "plain" else None
        # ``keep_requests`` is called for a context with replay, ``tell_over`` for a worker that may have missed the
        # release of a context.
        self.keep_requests: Callable[[Context, int], None] = lambda context, epoch: None
        self.tell_over: Callable[[int, int], None] = lambda worker, context: None
        self._encode = msgspec.msgpack.Encoder().encode  # the same as ``pack``, with one call less

    def request_out(self, peer: Peer, encoded: Encoded) -> tuple[bytes | None, Any]:
        if not torch.is_grad_enabled():
            needed = not self.leaves and any([tensor.requires_grad for tensor in encoded.tensors])
            return UNRECORDED if needed else None, _NO_GRAD
        scope = _find_scope()
        if scope is None or scope.worker is not self._worker:
            if scope is _NOWHERE or self._plain is None:
                return None, None
            scope = self._plain
        context, place = scope.context, scope.next_place()
        if encoded.unrecorded:
            raise _lost_gradient(encoded, context)
        copies = encoded.copies if context.id == PLAIN else _NO_COPIES
        log, level = context.replay, anomaly.level()
        if log is None and not level:
            noted = send_note(self._container, context, peer.record.id, encoded.tensors, place=place, copies=copies)
            return noted, None if noted is None else context
        note = record_send(self._container, context, peer.record.id, encoded.tensors, place=place, copies=copies)
        if note is None:
            return None, None
        if level:
            note = msgspec.structs.replace(note, anomaly=level)
        if log is not None:
            entry = log.begin(context, note, peer)
            return self._encode(msgspec.structs.replace(note, replay=0, epoch=log.epoch)), entry
        return self._encode(note), context

    def request_in(self, peer: Peer, note: bytes | None, tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        if note is None:
            return self._outside(peer, tensors), None
        if note == UNRECORDED:
            return detached(tensors), None
        read = unpack(note, AutogradNote)
        context = self._container.get_or_create(read.context)
        if context is None:  # the caller has released the context: no pass will ask for gradients
            return self._outside(peer, tensors, read.context), None
        if read.replay < 0:
            scope = Scope(self._worker, context, read.order)
        else:
            self.keep_requests(context, read.epoch)
            scope = ReplayedScope(self._worker, context, read.order, MessageId(read.replay))
        _scope.set(scope)
        if read.anomaly and (limit := deadlines.current.get()) is not None:
            limit.at_end = anomaly.hold_for_handler(read.anomaly).release
        return record_recv(context, peer.record.id, read, tensors), scope

    def reply_out(self, peer: Peer, kept: Any, encoded: Encoded) -> bytes | None:
        if kept is None:
            return None
        context, place = kept.context, kept.next_place()
        if encoded.unrecorded:
            raise _lost_gradient(encoded, context)
        return send_note(
            self._container,
            context,
            peer.record.id,
            encoded.tensors,
            place=place,
            message=kept.reply,
            replied=True,
            copies=encoded.copies if context.id == PLAIN else _NO_COPIES,
        )

    def reply_in(self, peer: Peer, kept: Any, note: bytes | None, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if kept is _NO_GRAD:
            return detached(tensors)
        read = None if note is None else unpack(note, AutogradNote)
        if type(kept) is ReplayEntry:
            kept.answer(read)
            kept = kept.context
        if kept is None:
            return self._outside(peer, tensors)
        if read is None:  # the other worker has released the context
            return self._outside(peer, tensors, kept.id)
        if kept.released:
            self.tell_over(peer.record.id, kept.id)
        return record_recv(kept, peer.record.id, read, tensors, replied=True)

    def _outside(self, peer: Peer, tensors: list[torch.Tensor], context: ContextId = NO_CONTEXT) -> list[torch.Tensor]:
        """Receive tensors outside any context, or of a released one."""
        return tensors if self.leaves else receive_outside(peer.record.id, tensors, context)

    def discard(self, peer: Peer, note: bytes) -> None:
        """Forget a sent message that no worker will use. It gets no gradients, and its record would keep the graph."""
        read, context = self._find(peer, note)
        if context is None or not read.message:
            return
        if split(read.message)[0] != self._worker.info.id:
            if read.context == PLAIN:
                self._container.plain.refuse(peer.record.id, read.message)
        elif context.replay is None:
            context.drop_send(read.message)
        else:
            context.doubt_send(read.message)  # replay may still send it to another worker

    def failed(self, peer: Peer, note: bytes) -> None:
        read, context = self._find(peer, note)
        if context is not None:
            context.doubt_send(read.message)

    def _find(self, peer: Peer, note: bytes) -> tuple[AutogradNote, Context | None]:
        read = unpack(note, AutogradNote)
        context = self._container.find(read.context)
        if context is None and self._container.was_released(read.context):
            self.tell_over(peer.record.id, read.context)
        return read, context
