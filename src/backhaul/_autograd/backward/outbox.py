"""Gradients on their way out: encodes them, and sends small ones that go to one worker together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from backhaul._autograd.backward.groups import Fired
from backhaul._autograd.backward.pass_errors import aborted, peer_lost
from backhaul._autograd.backward.simple_runs import Answers
from backhaul._autograd.container import Container
from backhaul._autograd.forward.functions import Grads, Recv, record_send
from backhaul._autograd.ids import MessageId
from backhaul._autograd.messages import AutogradKind, AutogradNote, Gradients, PassSpec
from backhaul._devices import seam
from backhaul._rpc.calls.pending_call import check_size
from backhaul._rpc.calls.send_pacing import SendPacing
from backhaul._rpc.cluster.peers import Peer, Peers
from backhaul._rpc.compression import LEAST_COMPRESSED
from backhaul._runtime.observer import GradientKey, Observer
from backhaul._transport.base import ChannelClosedError
from backhaul._wire.call_frames import encode_values
from backhaul._wire.codec import Encoded
from backhaul._wire.frames import Frame
from backhaul._wire.messages import pack
from backhaul._worker.worker import Worker
from backhaul.errors import PeerLostError

if TYPE_CHECKING:
    from backhaul._autograd.backward.local_pass import LocalPass

TOGETHER = 128  # at most so many messages are answered together: the receiver should not have to wait for all
_TOGETHER_IF_COUNTED = 32  # likewise, if the receiver counts the values in a message; any worker accepts so many
_MAX_PARCEL_BYTES = 1 << 15  # of gradients that go together; with their descriptions less than any worker accepts
_DESCRIPTION_BYTES = 64  # about what the description of a gradient takes
_ALONE_BYTES = 1 << 40  # stands for the size of a gradient that goes alone


class _Parcel:
    """Gradients that go to one worker together."""

    __slots__ = ("counts", "grads", "messages", "nbytes", "peer")

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.messages: list[MessageId] = []
        self.counts: list[int] = []
        self.grads: list[torch.Tensor | None] = []
        self.nbytes = 0


Parcels = dict[int, _Parcel]
"""Gradients to send, by the worker they go to."""


class GradientOutbox:
    """Of one worker. Thread-safe."""

    def __init__(self, worker: Worker, peers: Peers, container: Container) -> None:
        self._worker = worker
        self._peers = peers
        self._container = container
        self._pacing = SendPacing()  # of gradients that are sent while the engine goes on

    def send_all(self, share: LocalPass, found: Iterable[Answers], *, soon: bool = False) -> None:
        """Send gradients to the senders of their messages, at once, or small ones ``soon``. The caller has called
        ``StreamOrder.depart``. Raises ``PeerLostError``, or what encoding raised.
        """
        spec = share.spec
        for answers in found:
            to, recvs, messages, counts, grads, nbytes = answers
            peer = self._claim(share, to, recvs)
            count = len(messages)
            one_frame = count == 1 or (
                count <= TOGETHER and nbytes + _DESCRIPTION_BYTES * count <= _MAX_PARCEL_BYTES and not peer.plain
            )
            if one_frame and not (spec.profiles or spec.create) and _is_on_host(peer):
                self._send(share, peer, messages, counts, grads, soon=soon)
            else:
                parcels: Parcels = {}
                self._put(share, peer, answers, parcels)
                self.ship(share, parcels)

    def put(self, share: LocalPass, found: Iterable[Answers], parcels: Parcels) -> None:
        """As ``send_all``, but small gradients are left for ``ship``."""
        for answers in found:
            self._put(share, self._claim(share, answers[0], answers[1]), answers, parcels)

    def ship(self, share: LocalPass, parcels: Parcels) -> None:
        """Send all parcels."""
        for parcel in parcels.values():
            self._send(share, parcel.peer, parcel.messages, parcel.counts, parcel.grads)

    def send(self, share: LocalPass, recv: Recv, grads: Grads) -> None:
        """Send the gradients of one message while the engine goes on. If many follow each other closely, they go out
        together, as calls do.
        """
        seam.streams.depart()
        now, pacing = self._worker.runtime.now(), self._pacing
        soon = pacing.holds_back(now)
        self.send_all(share, (answers_of((recv, grads)),), soon=soon)
        if soon and pacing.ends_window(now):
            self._worker.endpoint.flush()

    def _put(self, share: LocalPass, peer: Peer, answers: Answers, parcels: Parcels) -> None:
        observer = self._worker.observer if share.spec.profiles else None
        if observer is not None or share.spec.create or not _is_on_host(peer):
            for each in _one_by_one(answers):
                self._send_alone(share, peer, each, observer)
            return
        most = min(TOGETHER, _TOGETHER_IF_COUNTED) if peer.plain else TOGETHER
        fits = _described(answers) <= _MAX_PARCEL_BYTES and len(answers[2]) <= most
        for each in (answers,) if fits else _one_by_one(answers):
            self._add(share, peer, each, parcels, most)

    def _add(self, share: LocalPass, peer: Peer, answers: Answers, parcels: Parcels, most: int) -> None:
        """Add gradients to the parcel of a worker, and send what becomes too large. ``most``: as ``TOGETHER``."""
        to, _, messages, counts, grads, _ = answers
        nbytes = _described(answers)
        parcel = parcels.get(to)
        if parcel is not None and (
            parcel.nbytes + nbytes > _MAX_PARCEL_BYTES or len(parcel.messages) + len(messages) > most
        ):
            self.ship(share, {to: parcel})
            parcel = None
        if parcel is None:
            parcel = parcels[to] = _Parcel(peer)
        parcel.messages += messages
        parcel.counts += counts
        parcel.grads += grads
        parcel.nbytes += nbytes
        if parcel.nbytes > _MAX_PARCEL_BYTES or len(parcel.messages) >= most:
            self.ship(share, {to: parcels.pop(to)})

    def _claim(self, share: LocalPass, to: int, recvs: list[Recv]) -> Peer:
        """The worker that gradients of these messages go to. Raises an error if it cannot take them."""
        context = share.context
        for recv in recvs if context.losses else ():
            if (loss := context.orphaned(recv)) is not None:
                raise peer_lost(share.spec, *loss, (recv.message,))
        share.spend(recvs)
        return self._peers.with_id(to) or self._peers.find(to)  # which raises the error

    def _send(
        self,
        share: LocalPass,
        peer: Peer,
        messages: list[MessageId],
        counts: list[int],
        grads: Grads,
        *,
        soon: bool = False,
    ) -> None:
        if share.failed:
            raise aborted(share.spec)
        # No two messages may get one tensor: the receiver makes gradients of leaves of them.
        apart = len(messages) > 1
        encoded = encode_values(grads, ["a gradient"] * len(grads), False, peer.plain, None, apart)
        self._send_encoded(share, peer, messages, counts, encoded, soon=soon)

    def _send_alone(self, share: LocalPass, peer: Peer, answers: Answers, observer: Observer | None) -> None:
        """Send the gradients of one message: they are part of the graph, on a device, or part of a profile."""
        spec, to = share.spec, answers.to
        if share.failed:
            raise aborted(spec)
        (recv,) = answers.recvs
        begun = 0
        if observer is not None:
            observer.prepare(spec.profiles, to)
            begun = observer.now()
        # In device memory, gradients go back the way that their message came.
        link = peer.link.request(peer.channel) if recv.replied else peer.link.answer(peer.channel)
        grads = answers.grads
        encoded = encode_values(grads, ["a gradient"] * len(grads), False, peer.plain, link, False)
        note = None
        if spec.create and any(tensor.requires_grad for tensor in encoded.tensors):
            note = record_send(
                self._container,
                share.context,
                to,
                encoded.tensors,
                place=(*recv.order, spec.number),
                born_in=(spec.driver, spec.number),
                replied=not recv.replied,
            )
        try:
            self._send_encoded(share, peer, answers.messages, answers.counts, encoded, note=note, begun=begun)
        except BaseException:
            if note is not None:
                share.context.drop_send(note.message)  # its record keeps the graph
            raise

    def _send_encoded(
        self,
        share: LocalPass,
        peer: Peer,
        messages: list[MessageId],
        counts: list[int],
        encoded: Encoded,
        *,
        note: AutogradNote | None = None,
        begun: int = 0,
        soon: bool = False,
    ) -> None:
        """Send the frame of gradients. ``begun``: when its encoding began, if a profile records it. ``soon``: others
        follow, so it may wait for them.
        """
        tally, now = share.depart(peer.record.id, few=peer.plain)
        body = pack(Gradients(share.spec, messages, counts, encoded.payload, note, tally))
        frame = Frame(AutogradKind.GRADIENT, 0, body, encoded.buffers, encoded.keep)
        if peer.examined:
            if peer.plain:
                check_size(frame, peer, "a message of gradients")
            if frame.nbytes > LEAST_COMPRESSED and (smaller := peer.compression.of_gradients(encoded)) is not None:
                body = pack(Gradients(share.spec, messages, counts, smaller.payload, note, tally))
                frame = Frame(AutogradKind.GRADIENT, 0, body, smaller.buffers, smaller.keep)
        observer = self._worker.observer if begun else None
        if observer is not None:
            spec = share.spec
            observer.gradient(spec.profiles, key_of(spec, messages[0]), peer.record.id, begun, frame.nbytes)
        try:
            channel = peer.channel or self._peers.channel_to(peer, self._worker.options.connect_timeout)
            if encoded.lease is not None or peer.link is not seam.NO_LINK:
                peer.link.depart_with(() if encoded.lease is None else (encoded.lease,), channel)
            left = None if share.deadline is None else max(share.deadline - self._worker.runtime.now(), 0.0)
            if now and not soon:
                channel.send(frame, timeout=left)
            else:
                share.flush_later(channel)
                channel.send_soon(frame, timeout=left)
        except (ChannelClosedError, PeerLostError) as error:
            reason = (error.reason if isinstance(error, PeerLostError) else None) or str(error)
            raise peer_lost(share.spec, peer.info.name, reason, messages) from error


def _is_on_host(peer: Peer) -> bool:
    """Whether all tensors that travel to a peer and back are in the memory of the host."""
    link = peer.link
    return link is seam.NO_LINK or not (link.takes_host or seam.streams.in_use())


def answers_of(fired: Fired) -> Answers:
    """The gradients of one message."""
    recv, grads = fired
    return Answers(recv.sender, [recv], [recv.message], [len(grads)], grads, sum(map(_size_of, grads)))


def _described(answers: Answers) -> int:
    """About what gradients take in a frame, with their descriptions."""
    nbytes: int = answers[5]
    return nbytes + _DESCRIPTION_BYTES * len(answers[2])


def _one_by_one(answers: Answers) -> Iterator[Answers]:
    """The gradients of each message."""
    _, recvs, _, counts, grads, _ = answers
    used = 0
    for recv, count in zip(recvs, counts, strict=True):
        yield answers_of((recv, grads[used : used + count]))
        used += count


def _size_of(grad: torch.Tensor | None) -> int:
    """About what a gradient takes in a frame."""
    if grad is None:
        return 0
    if grad.layout is not torch.strided or grad.is_nested:
        return _ALONE_BYTES
    return grad.element_size() if grad.numel() and not any(grad.stride()) else grad.nbytes


def key_of(spec: PassSpec, message: int) -> GradientKey:
    """How a profile names a gradient message."""
    return spec.context, spec.driver, spec.number, message
