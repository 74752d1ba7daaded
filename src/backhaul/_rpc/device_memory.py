"""What workers tell each other about shared device memory, and when it is let go. See ``cuda.segments``."""

from __future__ import annotations

import functools
import threading
import time

from backhaul._devices.links import Plane, Shared
from backhaul._devices.segments import News, Offer, visit_graves
from backhaul._rpc.cluster.peers import Peers
from backhaul._transport.base import Channel, ChannelClosedError
from backhaul._wire.frames import Frame
from backhaul._wire.messages import Kind, pack, unpack
from backhaul._worker.thread_pool import Task
from backhaul._worker.worker import Worker
from backhaul.errors import ProtocolError

_TRIM = 10.0  # seconds between looks at what is not used
_MOURN = 0.05, 1.0  # seconds between looks at what was given up, at first and later


class Devices:
    """Of one worker that has devices. Thread-safe."""

    def __init__(self, worker: Worker, peers: Peers, plane: Plane) -> None:
        self._worker = worker
        self._peers = peers
        self._plane = plane
        self._trimming = False
        self._mourning = False
        plane.tell = self._tell
        plane.mourn = self._mourn
        worker.crew.prepare = plane.frontier.enter
        worker.on_frame(Kind.SEGMENTS, self._on_news)
        worker.on_close(self._close)
        worker.counters["device_slot_bytes"] = lambda: plane.slot_bytes
        worker.counters["cuda_usable"] = lambda: not plane.frontier.trouble

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
        offers = shared.hear(unpack(frame.body, News).items)
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
            channel.send(Frame(Kind.SEGMENTS, 0, pack(News(tuple(items)))), timeout=0)
        except ChannelClosedError:
            return  # it is all forgotten with the channel
        if not self._trimming and any(isinstance(item, Offer) for item in items):
            self._trimming = True
            self._worker.crew.call_at(self._worker.runtime.now() + _TRIM, self._trim)

    def _trim(self) -> None:
        again = False
        for peer in self._peers:
            for channel, shared in peer.link.shared() if peer.link is not None else ():
                again |= shared.lender.trim()
                self._tell(channel, shared)
        self._trimming = again
        self._mourn()
        if again:
            self._worker.crew.call_at(self._worker.runtime.now() + _TRIM, self._trim)

    def _mourn(self, pause: float = _MOURN[0]) -> None:
        if self._mourning or not visit_graves(self._plane.frontier):
            return
        self._mourning = True
        self._worker.crew.call_at(self._worker.runtime.now() + pause, functools.partial(self._mourn_again, pause))

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
        if visit_graves(self._plane.frontier):  # others may have tensors of ours, or streams of ours wait for them
            threading.Thread(target=_mourn_on, args=(self._plane,), name="backhaul-graves", daemon=True).start()

    def settle(self, timeout: float) -> None:
        """What was sent is computed before channels are closed: the process may end next."""
        shared = [shared for peer in self._peers if peer.link is not None for _, shared in peer.link.shared()]
        over = time.monotonic() + timeout
        while not all(one.lender.settled for one in shared) and time.monotonic() < over:
            if self._plane.frontier.failed():
                return
            time.sleep(0.001)


def _mourn_on(plane: Plane) -> None:
    pause, longest = _MOURN
    while visit_graves(plane.frontier):
        time.sleep(pause)
        pause = min(2 * pause, longest)
