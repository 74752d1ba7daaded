"""Gradients on their way out: encodes them, and sends those that go to one worker together as far as they are small."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from backhaul._autograd.backward.driver import loss_of
from backhaul._autograd.backward.groups import Fired
from backhaul._autograd.backward.local_pass import LocalPass
from backhaul._autograd.container import Container
from backhaul._autograd.forward.functions import Grads, Recv, record_send
from backhaul._autograd.messages import AutogradKind, AutogradNote, Gradient, Gradients, PassSpec
from backhaul._devices.channel_link import ChannelLink, hand_over
from backhaul._rpc.calls.pending import check_size
from backhaul._rpc.cluster.peers import Peers
from backhaul._runtime.observer import GradientKey, Observer
from backhaul._transport.base import ChannelClosedError
from backhaul._wire.codec import Encoded, encode
from backhaul._wire.device_link import Lease
from backhaul._wire.frames import Frame
from backhaul._wire.memory import Buffer
from backhaul._wire.messages import pack
from backhaul._worker.worker import Worker
from backhaul.errors import ContextError, PeerLostError

TOGETHER = 16  # gradients that go together at most: who gets them should not have to wait for all
_SMALL = 1 << 15  # bytes of them; with what describes them they are less than any worker accepts
_DESCRIBED = 64  # bytes that describe a buffer, about


class _Parcel:
    """Gradients that go to one worker together."""

    __slots__ = ("buffers", "gradients", "keep", "leases", "nbytes")

    def __init__(self) -> None:
        self.leases: list[Lease] = []  # slots of device memory that they take with them
        self.gradients: list[Gradient] = []
        self.buffers: list[Buffer] = []
        self.keep: list[Any] = []
        self.nbytes = 0


Parcels = dict[int, _Parcel]
"""By the worker they go to."""


class GradientOutbox:
    """Of one worker. Thread-safe."""

    def __init__(self, worker: Worker, peers: Peers, container: Container) -> None:
        self._worker = worker
        self._id = worker.info.id
        self._peers = peers
        self._container = container

    def put(self, run: LocalPass, fired: Sequence[Fired], parcels: Parcels) -> None:
        """Let gradients go where their messages came from: at once if they are large, else with ``ship``. What they
        come of has departed. Raises ``PeerLostError``, or what encoding raised.
        """
        if run.spec.profiles and (observer := self._worker.observer) is not None:
            self._send_observed(run, fired, observer)
            return
        for recv, grads in fired:
            to = recv.sender
            encoded, note = self._encode(run, recv, grads)
            nbytes = _DESCRIBED + len(encoded.payload.pickle)
            for buffer in encoded.buffers:
                nbytes += _DESCRIBED + len(buffer)
            parcel = parcels.get(to)
            if parcel is None or parcel.nbytes + nbytes > _SMALL:
                if parcel is not None:
                    self._send(run, to, parcel)
                parcel = parcels[to] = _Parcel()
            parcel.nbytes += nbytes
            parcel.gradients.append(Gradient(recv.message, encoded.payload, len(encoded.buffers), note))
            parcel.buffers += encoded.buffers
            parcel.keep.append(encoded.keep)
            if encoded.lease is not None:
                parcel.leases.append(encoded.lease)
            if parcel.nbytes > _SMALL or len(parcel.gradients) >= TOGETHER:
                del parcels[to]
                self._send(run, to, parcel)

    def ship(self, run: LocalPass, parcels: Parcels) -> None:
        """Send what has been put there."""
        for to, parcel in parcels.items():
            self._send(run, to, parcel)

    def send(self, run: LocalPass, recv: Recv, grads: Grads) -> None:
        """Send the gradients of one message at once."""
        if self._worker.device_context is not None:
            self._worker.device_context.stream_order.depart()
        parcels: Parcels = {}
        self.put(run, ((recv, grads),), parcels)
        self.ship(run, parcels)

    def _send_observed(self, run: LocalPass, fired: Sequence[Fired], observer: Observer) -> None:
        """One by one: a profile shows each."""
        spec = run.spec
        for recv, grads in fired:
            observer.prepare(spec.profiles, recv.sender)
            begun = observer.now()
            encoded, note = self._encode(run, recv, grads)
            parcel = _Parcel()
            parcel.gradients.append(Gradient(recv.message, encoded.payload, len(encoded.buffers), note))
            parcel.buffers, parcel.keep = encoded.buffers, encoded.keep
            if encoded.lease is not None:
                parcel.leases.append(encoded.lease)
            frame = self._frame(run, recv.sender, parcel)
            observer.gradient(spec.profiles, key_of(spec, recv.message), recv.sender, begun, frame.nbytes)
            self._send(run, recv.sender, parcel, frame)

    def _encode(self, run: LocalPass, recv: Recv, grads: Grads) -> tuple[Encoded, AutogradNote | None]:
        if run.failed:
            raise ContextError("the pass was aborted", context=run.spec.context)
        if recv.message in run.context.orphans:
            raise loss_of(run.spec, *run.context.orphans[recv.message], (recv.message,))
        link = self._link_for(recv) if self._peers.linked else None
        names, plain = ["a gradient"] * len(grads), recv.sender in self._peers.plain
        encoded = encode(grads, names=names, plain=plain, link=link)
        spec = run.spec
        if not (spec.create and any(tensor.requires_grad for tensor in encoded.tensors)):
            return encoded, None
        return encoded, record_send(
            self._container,
            run.context,
            recv.sender,
            encoded.tensors,
            place=(*recv.order, spec.number),
            born_in=(spec.driver, spec.number),
            replied=not recv.replied,
        )

    def _link_for(self, recv: Recv) -> ChannelLink | None:
        """What takes gradients of devices back the way that their message came."""
        peer = self._peers.linked.get(recv.sender)
        if peer is None or peer.link is None:
            return None
        return peer.link.request(peer.channel) if recv.replied else peer.link.answer(peer.channel)

    def _frame(self, run: LocalPass, to: int, parcel: _Parcel) -> Frame:
        run.sent_to.add(to)
        driver = run.spec.driver
        tally = None
        if driver != self._id:
            tally = run.journal.take_along(to == driver, few=to in self._peers.plain)
            if tally is not None:
                run.entrusted.setdefault(to, []).append(tally)
        message = Gradients(run.spec, parcel.gradients, tally)
        return Frame(AutogradKind.GRADIENT, 0, pack(message), parcel.buffers, parcel.keep)

    def _send(self, run: LocalPass, to: int, parcel: _Parcel, frame: Frame | None = None) -> None:
        peer = self._peers.find(to)
        if frame is None:
            frame = self._frame(run, to, parcel)
        if peer.plain:
            check_size(frame, peer, "a message of gradients")
        try:
            channel = peer.channel or self._peers.channel_to(peer, self._worker.options.connect_timeout)
            if peer.link is not None:
                for lease in parcel.leases:
                    hand_over(lease, channel)
                peer.link.tell()
            left = None if run.deadline is None else max(run.deadline - self._worker.runtime.now(), 0.0)
            if run.journal.is_last(channel):
                channel.send(frame, timeout=left)
            else:
                channel.send_soon(frame, timeout=left)
        except (ChannelClosedError, PeerLostError) as error:
            reason = (error.reason if isinstance(error, PeerLostError) else None) or str(error)
            messages = [gradient.message for gradient in parcel.gradients]
            raise loss_of(run.spec, peer.info.name, reason, messages) from error


def key_of(spec: PassSpec, message: int) -> GradientKey:
    """How a profile names a gradient message."""
    return spec.context, spec.driver, spec.number, message
