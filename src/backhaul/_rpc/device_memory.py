"""Carries the news of shared device memory between workers, and decides when unused memory is retired and freed.

The memory itself, and what is told about it, is ``_devices``' business.
"""

from __future__ import annotations

import functools
import threading
import time
from typing import Any

from backhaul._devices.cuda import process
from backhaul._devices.deferred_free import free_deferred
from backhaul._devices.device_context import DeviceContext, Member
from backhaul._devices.links import DeviceLink, link_to
from backhaul._devices.seam import PeerLink, Placed
from backhaul._devices.segment_messages import Offer, SegmentUpdate
from backhaul._devices.shared_slots import SharedSlots
from backhaul._rpc.cluster.peers import Peers
from backhaul._transport.base import Channel, ChannelClosedError
from backhaul._wire.frames import Frame
from backhaul._wire.messages import Kind, pack, unpack
from backhaul._worker.thread_pool import Task
from backhaul._worker.worker import Worker
from backhaul.errors import ProtocolError

_TRIM_SECONDS = 10.0  # between two looks for segments that nobody uses
_FREE_SECONDS = 0.05, 1.0  # between two attempts to free memory, at first and at most
_SETTLE_SECONDS = 0.001  # between two looks whether all is computed


class DeviceMemory:
    """The shared device memory of one worker that has devices. Thread-safe."""

    def __init__(self, worker: Worker, device_context: DeviceContext) -> None:
        self._worker = worker
        self._peers: Peers | None = None
        self._context = device_context
        self._slot_order = device_context.stream_order.slot_order
        self._trimming = False  # whether the next look for unused segments is scheduled
        self._freeing = False  # whether the next attempt to free memory is scheduled

    def link_to(self, own: Member, record: Member, *, open: bool) -> PeerLink:
        """The link between the worker and a peer. ``open``: the two trust each other, and may share memory."""
        return link_to(own, record, self._context, open=open)

    def bring(self, placed: Placed | None, grads: Any) -> Any:
        """Move gradients to the devices of the tensors that they belong to. Returns the gradients."""
        return grads if placed is None else placed.bring(grads)

    def start(self, peers: Peers) -> None:
        """The worker's table of members is there: share memory with them."""
        worker, device_context = self._worker, self._context
        self._peers = peers
        device_context.send_updates = self._send_updates
        device_context.free_soon = self._free_soon
        worker.thread_pool.prepare = device_context.stream_order.enter
        worker.on_frame(Kind.SEGMENTS, self._on_updates, check=None)
        worker.on_close(self._close)
        worker.counters["device_slot_bytes"] = lambda: device_context.slot_bytes
        worker.counters["cuda_usable"] = lambda: not device_context.stream_order.trouble

    def _links(self) -> list[DeviceLink]:
        return [peer.link for peer in self._peers or () if isinstance(peer.link, DeviceLink)]

    @property
    def bytes_sent(self) -> int:
        """How many bytes of devices were sent without passing through the host."""
        links = self._links()
        with self._context.count_lock:
            ends = [shared for link in links for _, shared in link.shared()]
            return self._context.bytes_lent_before + sum(shared.lender.bytes_lent for shared in ends)

    def _on_updates(self, channel: Channel, frame: Frame) -> Task | None:
        assert self._peers is not None
        peer = self._peers.of(channel)
        shared = peer.link.ends_of(channel) if peer is not None and isinstance(peer.link, DeviceLink) else None
        if shared is None:
            raise ProtocolError("the peer tells of device memory, but none is shared with it")
        offers = shared.take_in(unpack(frame.body, SegmentUpdate).items)
        self._free_soon()
        return functools.partial(self._open, channel, shared, offers) if offers else None

    def _open(self, channel: Channel, shared: SharedSlots, offers: list[Offer]) -> None:
        shared.open(offers)
        self._send_updates(channel, shared)
        if self._worker.closed:  # meanwhile
            self._free_after_close()
        else:
            self._free_soon()

    def _send_updates(self, channel: Channel, shared: SharedSlots) -> None:
        items = []
        while shared.news:
            try:
                items.append(shared.news.popleft())
            except IndexError:  # another thread has taken the last one
                break
        if not items:
            return
        try:
            channel.send(Frame(Kind.SEGMENTS, 0, pack(SegmentUpdate(tuple(items)))), timeout=0)
        except ChannelClosedError:
            return  # the memory goes with the channel
        if not self._trimming and any(isinstance(item, Offer) for item in items):
            self._trimming = True
            self._worker.thread_pool.call_at(self._worker.runtime.now() + _TRIM_SECONDS, self._trim)

    def _trim(self) -> None:
        free_deferred(self._slot_order)  # first: what is freed no longer counts in budgets
        again = False
        for link in self._links():
            for channel, shared in link.shared():
                again |= shared.lender.trim()
                self._send_updates(channel, shared)
        self._trimming = again
        self._free_soon()
        if again:
            self._worker.thread_pool.call_at(self._worker.runtime.now() + _TRIM_SECONDS, self._trim)

    def _free_soon(self, pause: float = _FREE_SECONDS[0]) -> None:
        """Free what can be freed, and try again after a pause if there is more."""
        if self._freeing or not free_deferred(self._slot_order):
            return
        self._freeing = True
        self._worker.thread_pool.call_at(self._worker.runtime.now() + pause, functools.partial(self._free_again, pause))

    def _free_again(self, pause: float) -> None:
        self._freeing = False
        self._free_soon(min(2 * pause, _FREE_SECONDS[1]))

    def _close(self) -> None:
        for link in self._links():
            link.close()
        self._context.close()
        self._free_after_close()

    def _free_after_close(self) -> None:
        """The worker's pool runs nothing more. Peers may still use memory of ours, or our streams wait for theirs, so a
        thread of its own frees the rest.
        """
        if free_deferred(self._slot_order):
            target = functools.partial(_free_all, self._context)
            threading.Thread(target=target, name="backhaul-deferred-free", daemon=True).start()

    def settle(self, timeout: float) -> None:
        """Wait until what was sent is computed. Called before channels are closed: the process may end next."""
        shared = [shared for link in self._links() for _, shared in link.shared()]
        deadline = time.monotonic() + timeout
        while not all(one.lender.is_settled for one in shared) and time.monotonic() < deadline:
            if self._context.stream_order.failed():
                return
            time.sleep(_SETTLE_SECONDS)


def start_devices(worker: Worker, own: Member) -> None:
    """Give a worker its devices, if it has any. The one place that decides that."""
    device_context = process.start(own, worker.options.devices.slot_bytes)
    if device_context is not None:
        worker.devices = DeviceMemory(worker, device_context)


def _free_all(device_context: DeviceContext) -> None:
    pause, longest = _FREE_SECONDS
    while free_deferred(device_context.stream_order.slot_order):
        time.sleep(pause)
        pause = min(2 * pause, longest)
