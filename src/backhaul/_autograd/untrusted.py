"""Checks of autograd's frames and notes from peers that are not trusted, and the limit of contexts for each peer.

A worker must believe what a member of a pass says about its own gradients. It checks that the member speaks of its own
messages, and of contexts that the member takes part in.
"""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import torch

from backhaul._autograd.container import Container
from backhaul._autograd.forward.recording import UNRECORDED, ForwardRecorder
from backhaul._autograd.ids import split
from backhaul._autograd.messages import Abort, AutogradNote, Drop, Gradients, Know, Release, Report
from backhaul._autograd.plan.plan import Summary
from backhaul._rpc.cluster.peers import Peer
from backhaul._rpc.node import Node
from backhaul._rpc.security.frame_checks import strict_payload
from backhaul._rpc.security.rate_limits import beyond
from backhaul._wire.frames import Frame
from backhaul._wire.messages import pack, unpack
from backhaul._wire.plain import register
from backhaul._wire.tensors.subclasses import TensorList
from backhaul._worker.worker import Worker
from backhaul.errors import ProtocolError

register(Summary)


def recorder_for(node: Node, container: Container) -> ForwardRecorder:
    """The recorder of a worker. It checks notes if peers are not trusted or contexts are limited."""
    options = node.worker.options
    if options.security.trusted and node.rate_limits.contexts is None:
        made = ForwardRecorder(node.worker, container)
    else:
        node.worker.attach(container)
        made = UntrustedRecorder(node.worker, container, node.rate_limits.contexts)
    made.leaves = options.follows_reference
    return made


class UntrustedRecorder(ForwardRecorder):
    """Refuses contexts beyond a peer's limit, and messages that do not belong to their sender."""

    def __init__(self, worker: Worker, container: Container, limit: int | None) -> None:
        super().__init__(worker, container)
        self._limit = limit
        self._lock = threading.Lock()  # guards the table
        self._brought: dict[int, set[int]] = {}  # peer -> contexts

    def request_in(self, peer: Peer, note: bytes | None, tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        if note is not None and note != UNRECORDED:
            read = unpack(note, AutogradNote)
            _check_note(peer, read, tensors)
            self._take(peer, read.context)
            if (read.replay >= 0 or read.anomaly) and not self._worker.options.security.trusted:
                # An untrusted peer may not choose the id of a reply, nor anomaly mode, which holds for the process.
                note = pack(msgspec.structs.replace(read, replay=-1, anomaly=0))
        return super().request_in(peer, note, tensors)

    def reply_in(self, peer: Peer, kept: Any, note: bytes | None, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if note is not None:
            _check_note(peer, unpack(note, AutogradNote), tensors)
        return super().reply_in(peer, kept, note, tensors)

    def discard(self, peer: Peer, note: bytes) -> None:
        # The peer may have written the note, and named a message that was not sent to it.
        try:
            read, context = self._find(peer, note)
        except ProtocolError:  # the message is discarded because its note is malformed
            return
        sent = context.sends.get(read.message) if context is not None else None
        if sent is not None and sent.to == peer.record.id:
            super().discard(peer, note)

    def _take(self, peer: Peer, context: int) -> None:
        if self._limit is None or peer.record.id == self._worker.info.id:
            return
        if self._container.find(context) is not None:
            return
        with self._lock:
            brought = self._brought.setdefault(peer.record.id, set())
            if len(brought) >= self._limit:  # some of them may have been released
                brought.intersection_update([each for each in brought if self._container.find(each) is not None])
            if len(brought) >= self._limit:
                asked = f"'{peer.info.name}' has {len(brought)} contexts there and brought another"
                raise beyond(self._worker.name, "contexts of one peer at once", "limits.contexts", self._limit, asked)
            brought.add(context)


def _check_note(peer: Peer, note: AutogradNote, tensors: list[torch.Tensor]) -> None:
    if note.message and split(note.message)[0] != peer.record.id:
        raise ProtocolError(f"'{peer.info.name}' sent a note with a message id of worker {split(note.message)[0]}")
    positions, count = note.positions, len(tensors)
    if isinstance(tensors, TensorList):  # wrappers are built later, when the values are decoded
        count += tensors.wrapped
    if len(set(positions)) != len(positions) or not all(0 <= place < count for place in positions):
        raise ProtocolError(f"'{peer.info.name}' sent a note with positions {positions} on {count} tensors")
    found = [tensors[place] for place in positions if place < len(tensors)]
    if not all(tensor.is_floating_point() or tensor.is_complex() for tensor in found):
        raise ProtocolError(f"'{peer.info.name}' sent a note on a tensor whose dtype has no gradients")


def check_gradients(worker: Worker, peer: Peer, frame: Frame) -> bool:
    message = unpack(frame.body, Gradients)
    messages, counts = message.messages, message.counts
    values = message.payload.plain
    strict_payload(worker, message.payload, frame.buffers)
    if values is None or len(messages) != len(counts) or min(counts, default=-1) < 0 or sum(counts) != len(values):
        raise ProtocolError(f"'{peer.info.name}' sent gradients of {len(messages)} messages that do not fit its values")
    if len(set(messages)) != len(messages):
        raise ProtocolError(f"'{peer.info.name}' sent gradients of one message twice in one frame")
    if message.note is not None and split(message.note.message)[0] not in (0, peer.record.id):
        raise ProtocolError(f"'{peer.info.name}' sent a gradient note with a message id of another worker")
    context = worker.part(Container).find(message.spec.context)
    for number in messages:
        sent = context.sends.get(number) if context is not None else None
        if sent is not None and sent.to != peer.record.id:
            raise ProtocolError(f"'{peer.info.name}' sent gradients of a message that went to worker {sent.to}")
    return True


def check_report(worker: Worker, peer: Peer, frame: Frame) -> bool:
    fault = unpack(frame.body, Report).fault
    if fault is not None and fault.payload is not None:
        strict_payload(worker, fault.payload, frame.buffers)
    return True


def check_abort(worker: Worker, peer: Peer, frame: Frame) -> bool:
    spec = unpack(frame.body, Abort).spec
    return spec.driver != worker.info.id and _takes_part(worker, peer, spec.context)


def check_release(worker: Worker, peer: Peer, frame: Frame) -> bool:
    number = unpack(frame.body, Release).context
    return split(number)[0] != worker.info.id and _takes_part(
        worker, peer, number
    )  # a worker releases its own contexts itself


def check_know(worker: Worker, peer: Peer, frame: Frame) -> bool:
    return split(unpack(frame.body, Know).context)[0] == worker.info.id


def check_drop(worker: Worker, peer: Peer, frame: Frame) -> bool:
    unpack(frame.body, Drop)
    return True  # a worker can only drop messages that were sent to it, see ``PlainGraph.drop``


def _takes_part(worker: Worker, peer: Peer, number: int) -> bool:
    """Whether a peer made a context, or exchanged messages of the context with this worker."""
    context = worker.part(Container).find(number)
    return split(number)[0] == peer.record.id or (context is not None and peer.record.id in context.known)
