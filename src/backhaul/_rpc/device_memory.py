"""What workers tell each other about shared device memory, and when it is let go. See ``cuda.segments``."""

from __future__ import annotations

import functools
import threading
import time

from backhaul._devices.links import DeviceContext, Shared
from backhaul._devices.segments import Offer, SegmentUpdate, free_deferred
from backhaul._rpc.cluster.peers import Peers
from backhaul._transport.base import Channel, ChannelClosedError
from backhaul._wire.frames import Frame
from backhaul._wire.messages import Kind, pack, unpack
from backhaul._worker.thread_pool import Task
from backhaul._worker.worker import Worker
from backhaul.errors import ProtocolError

_TRIM = 10.0  # seconds between looks at what is not used
_MOURN = 0.05, 1.0  # seconds between looks at what was given up, at first and later


class DeviceMemory:
    """Of one worker that has devices. Thread-safe."""

    def __init__(self, worker: Worker, peers: Peers, device_context: DeviceContext) -> None:
        self._worker = worker
        self._peers = peers
        self._plane = device_context
        self._trimming = False
        self._mourning = False
        device_context.tell = self._tell
        device_context.mourn = self._mourn
        worker.thread_pool.prepare = device_context.stream_order.enter
        worker.on_frame(Kind.SEGMENTS, self._on_news, check=None)
        worker.on_close(self._close)
        worker.counters["device_slot_bytes"] = lambda: device_context.slot_bytes
        worker.counters["cuda_usable"] = lambda: not device_context.stream_order.trouble

    @property
    def bytes_sent(self) -> int:
        """How many bytes of devices have gone out that did not pass through the host."""
        links = [peer.link for peer in self._peers if peer.link is not None]
        with self._plane.counting:
            ends = [shared for link in links for _, shared in link.shared()]
            return self._plane.lent_before + sum(shared.lender.bytes_lent for shared in ends)

    def _on_news(self, channel: Channel, frame: Frame) -> Task | None:
        peer = self._peers.of(channel)
        shared = None if peer is None or peer.link is None else peer.link.ends_of(channel)
        if shared is None:
            raise ProtocolError("device memory from a peer with which none is shared")
        offers = shared.hear(unpack(frame.body, SegmentUpdate).items)
        self._mourn()
        return functools.partial(self._open, channel, shared, offers) if offers else None

    def _open(self, channel: Channel, shared: Shared, offers: list[Offer]) -> None:
        shared.open(offers)
        self._tell(channel, shared)
        if self._worker.closed:  # meanwhile
            self._mourn_on()
        else:
            self._mourn()

    def _tell(self, channel: Channel, shared: Shared) -> None:
        items = []
        while shared.news:
            try:
                items.append(shared.news.popleft())
            except IndexError:  # another thread was faster
                break
        if not items:
            return
        try:
            channel.send(Frame(Kind.SEGMENTS, 0, pack(SegmentUpdate(tuple(items)))), timeout=0)
        except ChannelClosedError:
            return  # it is all forgotten with the channel
        if not self._trimming and any(isinstance(item, Offer) for item in items):
            self._trimming = True
            self._worker.thread_pool.call_at(self._worker.runtime.now() + _TRIM, self._trim)

    def _trim(self) -> None:
        again = False
        for peer in self._peers:
            for channel, shared in peer.link.shared() if peer.link is not None else ():
                again |= shared.lender.trim()
                self._tell(channel, shared)
        self._trimming = again
        self._mourn()
        if again:
            self._worker.thread_pool.call_at(self._worker.runtime.now() + _TRIM, self._trim)

    def _mourn(self, pause: float = _MOURN[0]) -> None:
        if self._mourning or not free_deferred(self._plane.stream_order):
            return
        self._mourning = True
        self._worker.thread_pool.call_at(
            self._worker.runtime.now() + pause, functools.partial(self._mourn_again, pause)
        )

    def _mourn_again(self, pause: float) -> None:
        self._mourning = False
        self._mourn(min(2 * pause, _MOURN[1]))

    def _close(self) -> None:
        for peer in self._peers:
            if peer.link is not None:
                peer.link.close()
        self._plane.close()
        self._mourn_on()

    def _mourn_on(self) -> None:
        if free_deferred(self._plane.stream_order):  # others may have tensors of ours, or streams of ours wait for them
            threading.Thread(target=_mourn_on, args=(self._plane,), name="backhaul-graves", daemon=True).start()

    def settle(self, timeout: float) -> None:
        """What was sent is computed before channels are closed: the process may end next."""
        shared = [shared for peer in self._peers if peer.link is not None for _, shared in peer.link.shared()]
        over = time.monotonic() + timeout
        while not all(one.lender.settled for one in shared) and time.monotonic() < over:
            if self._plane.stream_order.failed():
                return
            time.sleep(0.001)


def _mourn_on(device_context: DeviceContext) -> None:
    pause, longest = _MOURN
    while free_deferred(device_context.stream_order):
        time.sleep(pause)
        pause = min(2 * pause, longest)
