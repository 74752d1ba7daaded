"""The links of one worker: for each peer where tensors of devices arrive, and for each channel how they get there.

Not imported by ``_wire``, which sees a link as ``_wire.device_link.Link`` only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch

from backhaul._devices.channel_link import ChannelLink, hand_over
from backhaul._devices.device_context import DeviceContext, Member, in_this_process
from backhaul._devices.handover import Handover
from backhaul._devices.placement import backward, onward
from backhaul._devices.seam import NO_LINK, PeerLink
from backhaul._devices.shared_slots import SharedSlots
from backhaul._transport.base import Channel
from backhaul._transport.shm import segments
from backhaul._wire.device_link import Lease
from backhaul.errors import SerializationError


class _Pair:
    """The links over one channel."""

    __slots__ = ("back", "ends", "onward")

    def __init__(
        self, peer: DeviceLink, record: Member, channel: Channel | None, ends: SharedSlots | Handover | None
    ) -> None:
        self.ends = ends
        self.onward = ChannelLink(peer.onward, record, peer.device_context, ends)
        self.back = ChannelLink(peer.back, record, peer.device_context, ends)
        self.onward.channel = self.back.channel = channel


class DeviceLink:
    """How tensors of devices travel between one worker and a peer. Thread-safe.

    Args:
        own: The worker.
        record: The peer.
        device_context: What the worker's links share; None if the worker has no devices.
        open: Whether the two trust each other, and may share memory.
    """

    def __init__(self, own: Member, record: Member, device_context: DeviceContext | None, *, open: bool) -> None:
        self.device_context = device_context
        self.onward, self.back = onward(own, record), backward(own, record)
        self._own = own
        self._record = record
        self._open = open and device_context is not None
        self._staged = _Pair(self, record, None, None)
        self._pairs: dict[Channel, _Pair] = {}

    @property
    def needed(self) -> bool:
        """Whether there is anything to do. A worker without devices needs no link, unless its CPU tensors are to arrive
        on a device of the peer, or those of the peer here.
        """
        return self.device_context is not None or self.takes_host

    @property
    def takes_host(self) -> bool:
        """See ``seam.PeerLink``."""
        return self.onward.takes_host or self.back.takes_host

    def opened(self, channel: Channel) -> None:
        """A channel to the peer is open."""
        ends: SharedSlots | Handover | None = None
        if self._open and self._record.devices:
            device_context = self.device_context
            assert device_context is not None
            if in_this_process(self._record):
                ends = Handover(device_context.memory, device_context.stream_order)
            elif device_context.ipc is not None and self._record.host == self._own.host and segments.available():
                ends = SharedSlots(device_context, device_context.ipc)
        self._pairs[channel] = _Pair(self, self._record, channel, ends)

    def lost(self, channel: Channel) -> None:
        """A channel to the peer is lost."""
        device_context = self.device_context
        with contextlib.nullcontext() if device_context is None else device_context.count_lock:
            pair = self._pairs.pop(channel, None)
            if device_context is not None and pair is not None and isinstance(pair.ends, SharedSlots):
                device_context.bytes_lent_before += pair.ends.lender.bytes_lent
        if pair is not None and pair.ends is not None:
            assert device_context is not None
            pair.ends.close()
            device_context.free_soon()

    def close(self) -> None:
        """The worker ends."""
        for channel in list(self._pairs):
            self.lost(channel)

    def request(self, channel: Channel | None) -> ChannelLink:
        """The link for requests to the peer, and for gradients of the peer's replies."""
        return self._pair(channel).onward

    def answer(self, channel: Channel | None) -> ChannelLink:
        """The link for replies to the peer, and for gradients of the peer's requests."""
        return self._pair(channel).back

    def _pair(self, channel: Channel | None) -> _Pair:
        return self._staged if channel is None else self._pairs.get(channel, self._staged)

    def takes_from(self, device: torch.device) -> bool:
        """Whether results on a CUDA device of the peer can arrive here without a copy to the host."""
        if device.type != "cuda":
            return False
        if self._record.incarnation == self._own.incarnation:
            return True  # its own stay where they are
        try:
            backward(self._record, self._own).target(f"cuda:{device.index or 0}")
        except SerializationError:
            return False
        return True

    def ends_of(self, channel: Channel) -> SharedSlots | None:
        """The memory that is shared over a channel, if any."""
        ends = self._pair(channel).ends
        return ends if isinstance(ends, SharedSlots) else None

    def shared(self) -> list[tuple[Channel, SharedSlots]]:
        """The memory that is shared with the peer, over each channel."""
        return [
            (channel, pair.ends) for channel, pair in list(self._pairs.items()) if isinstance(pair.ends, SharedSlots)
        ]

    def depart(self, lease: Lease | None, channel: Channel) -> None:
        """A message is about to go out over ``channel``, with the slots of ``lease``. Raises ``ChannelClosedError`` if
        they belong to another channel, which has been lost since the message was encoded.
        """
        if self.device_context is not None:
            self.device_context.stream_order.depart()
        self.depart_with(() if lease is None else (lease,), channel)

    def depart_with(self, leases: Iterable[Lease], channel: Channel) -> None:
        """As ``depart``, for messages that go together and whose thread has told the stream order."""
        for lease in leases:
            hand_over(lease, channel)
        self._tell()

    def _tell(self) -> None:
        """Tell the peer about memory that there is for it."""
        for channel, pair in list(self._pairs.items()):
            if isinstance(pair.ends, SharedSlots) and pair.ends.news:
                assert self.device_context is not None
                self.device_context.send_updates(channel, pair.ends)

    def arrive(self, channel: Channel | None) -> ChannelLink:
        """A message has come over ``channel``, and this thread goes on with it; return the link to read it with."""
        if self.device_context is not None:
            self.device_context.stream_order.arrive()
        return self._pair(channel).back


def link_to(own: Member, record: Member, device_context: DeviceContext | None, *, open: bool) -> PeerLink:
    """The link between two workers; the null link if neither needs one, as no devices are involved."""
    made = DeviceLink(own, record, device_context, open=open)
    return made if made.needed else NO_LINK
