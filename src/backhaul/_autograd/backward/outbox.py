"""Gradients on their way out: encodes them, and sends small ones that go to one worker together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from backhaul._autograd.backward.groups import Fired
from backhaul._autograd.backward.pass_errors import aborted, peer_lost
from backhaul._autograd.container import Container
from backhaul._autograd.forward.functions import Grads, PlainRecv, Recv, record_send
from backhaul._autograd.messages import AutogradKind, AutogradNote, Gradient, Gradients, PassSpec
from backhaul._devices import seam
from backhaul._rpc.calls.pending_call import check_size
from backhaul._rpc.cluster.peers import Peer, Peers
from backhaul._runtime.observer import GradientKey, Observer
from backhaul._transport.base import ChannelClosedError
from backhaul._wire.codec import Encoded, encode
from backhaul._wire.device_link import Lease
from backhaul._wire.frames import Frame
from backhaul._wire.memory import Buffer
from backhaul._wire.messages import pack
from backhaul._worker.worker import Worker
from backhaul.errors import PeerLostError

if TYPE_CHECKING:
    from backhaul._autograd.backward.local_pass import LocalPass

TOGETHER = 16  # at most so many gradients go together: the receiver should not have to wait for all
_MAX_PARCEL_BYTES = 1 << 15  # of gradients that go together; with their descriptions less than any worker accepts
_DESCRIPTION_BYTES = 64  # about what the description of a buffer takes


class _Parcel:
    """Gradients that go to one worker together."""

    __slots__ = ("buffers", "gradients", "keep", "leases", "nbytes", "peer")

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.leases: list[Lease] = []  # the slots of device memory that hold them
        self.gradients: list[Gradient] = []
        self.buffers: list[Buffer] = []
        self.keep: list[Any] = []
        self.nbytes = 0


Parcels = dict[int, _Parcel]
"""Gradients to send, by the worker they go to."""


class GradientOutbox:
    """Of one worker. Thread-safe."""

    def __init__(self, worker: Worker, peers: Peers, container: Container) -> None:
        self._worker = worker
        self._peers = peers
        self._container = container

    def put(self, share: LocalPass, fired: Sequence[Fired], parcels: Parcels) -> None:
        """Send gradients to the senders of their messages: at once if they are large, else with ``ship``. The caller
        has called ``StreamOrder.depart``. Raises ``PeerLostError``, or what encoding raised.
        """
        if share.spec.profiles and (observer := self._worker.observer) is not None:
            self._send_observed(share, fired, observer)
            return
        for recv, grads in fired:
            to = recv.sender
            peer, encoded, note = self._encode(share, recv, grads)
            nbytes = _DESCRIPTION_BYTES + len(encoded.payload.pickle)
            for buffer in encoded.buffers:
                nbytes += _DESCRIPTION_BYTES + len(buffer)
            parcel = parcels.get(to)
            if parcel is None or parcel.nbytes + nbytes > _MAX_PARCEL_BYTES:
                if parcel is not None:
                    self._send(share, parcel)
                parcel = parcels[to] = _Parcel(peer)
            parcel.nbytes += nbytes
            parcel.gradients.append(Gradient(recv.message, encoded.payload, len(encoded.buffers), note))
            parcel.buffers += encoded.buffers
            parcel.keep.append(encoded.keep)
            if encoded.lease is not None:
                parcel.leases.append(encoded.lease)
            if parcel.nbytes > _MAX_PARCEL_BYTES or len(parcel.gradients) >= TOGETHER:
                del parcels[to]
                self._send(share, parcel)

    def ship(self, share: LocalPass, parcels: Parcels) -> None:
        """Send all parcels."""
        left = list(parcels.values())
        try:
            while left:
                self._send(share, left.pop(0))
        finally:
            for parcel in left:
                _forget(share, parcel)

    def send(self, share: LocalPass, recv: Recv, grads: Grads) -> None:
        """Send the gradients of one message at once."""
        seam.streams.depart()
        parcels: Parcels = {}
        self.put(share, ((recv, grads),), parcels)
        self.ship(share, parcels)

    def _send_observed(self, share: LocalPass, fired: Sequence[Fired], observer: Observer) -> None:
        """Send gradients one by one: a profile shows each."""
        spec = share.spec
        for recv, grads in fired:
            observer.prepare(spec.profiles, recv.sender)
            begun = observer.now()
            peer, encoded, note = self._encode(share, recv, grads)
            parcel = _Parcel(peer)
            parcel.gradients.append(Gradient(recv.message, encoded.payload, len(encoded.buffers), note))
            parcel.buffers, parcel.keep = encoded.buffers, encoded.keep
            if encoded.lease is not None:
                parcel.leases.append(encoded.lease)
            frame, now = self._frame(share, parcel)
            observer.gradient(spec.profiles, key_of(spec, recv.message), recv.sender, begun, frame.nbytes)
            self._send_frame(share, parcel, frame, now=now)

    def _encode(self, share: LocalPass, recv: Recv, grads: Grads) -> tuple[Peer, Encoded, AutogradNote | None]:
        if share.failed:
            raise aborted(share.spec)
        if (orphan := share.context.orphaned(recv)) is not None:
            raise peer_lost(share.spec, *orphan, (recv.message,))
        if isinstance(recv, PlainRecv):
            share.spend(recv)
        peer = self._peers.with_id(recv.sender) or self._peers.find(recv.sender)  # which raises the error
        # In device memory, gradients go back the way that their message came.
        link = peer.link.request(peer.channel) if recv.replied else peer.link.answer(peer.channel)
        encoded = encode(grads, names=["a gradient"] * len(grads), plain=peer.plain, link=link)
        spec = share.spec
        if not (spec.create and any(tensor.requires_grad for tensor in encoded.tensors)):
            return peer, encoded, None
        note = record_send(
            self._container,
            share.context,
            recv.sender,
            encoded.tensors,
            place=(*recv.order, spec.number),
            born_in=(spec.driver, spec.number),
            replied=not recv.replied,
        )
        return peer, encoded, note

    def _frame(self, share: LocalPass, parcel: _Parcel) -> tuple[Frame, bool]:
        """The frame of a parcel, and whether it is sent at once."""
        tally, now = share.depart(parcel.peer.record.id, few=parcel.peer.plain)
        message = Gradients(share.spec, parcel.gradients, tally)
        return Frame(AutogradKind.GRADIENT, 0, pack(message), parcel.buffers, parcel.keep), now

    def _send(self, share: LocalPass, parcel: _Parcel) -> None:
        frame, now = self._frame(share, parcel)
        self._send_frame(share, parcel, frame, now=now)

    def _send_frame(self, share: LocalPass, parcel: _Parcel, frame: Frame, *, now: bool) -> None:
        peer = parcel.peer
        if peer.plain:
            check_size(frame, peer, "a message of gradients")
        try:
            channel = peer.channel or self._peers.channel_to(peer, self._worker.options.connect_timeout)
            peer.link.depart_with(parcel.leases, channel)
            left = None if share.deadline is None else max(share.deadline - self._worker.runtime.now(), 0.0)
            if now:
                channel.send(frame, timeout=left)
            else:
                share.flush_later(channel)
                channel.send_soon(frame, timeout=left)
        except (ChannelClosedError, PeerLostError) as error:
            _forget(share, parcel)
            reason = (error.reason if isinstance(error, PeerLostError) else None) or str(error)
            messages = [gradient.message for gradient in parcel.gradients]
            raise peer_lost(share.spec, peer.info.name, reason, messages) from error


def _forget(share: LocalPass, parcel: _Parcel) -> None:
    """A parcel was not sent: forget the records of its gradients, which keep the graph."""
    for gradient in parcel.gradients:
        if gradient.note is not None:
            share.context.drop_send(gradient.note.message)


def key_of(spec: PassSpec, message: int) -> GradientKey:
    """How a profile names a gradient message."""
    return spec.context, spec.driver, spec.number, message
