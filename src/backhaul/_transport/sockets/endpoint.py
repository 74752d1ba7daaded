"""Channels over Unix sockets (one host) and TCP. Linux only.

The endpoint polls and owns the channels. ``acceptor`` and ``connector`` make connections; both ends of a connection
prove that they know the cluster's secret before the endpoint makes a channel of it (``handshake``).
"""

from __future__ import annotations

import contextlib
import resource
import select
import socket
import ssl
import threading
import time
from typing import Literal

from backhaul._runtime.runtime import OneShotEvent
from backhaul._transport.base import Channel, Endpoint, Event
from backhaul._transport.shm.segments import default_ceiling
from backhaul._transport.shm.slots import Budget
from backhaul._transport.signal_wait import SignalWait, may_spin_idly
from backhaul._transport.sockets.acceptor import Acceptor
from backhaul._transport.sockets.channel import SocketChannel
from backhaul._transport.sockets.connector import Connector, is_local
from backhaul._transport.sockets.epoll_set import EpollSet
from backhaul._transport.sockets.lane_opening import LaneOpening
from backhaul._transport.sockets.laned_channel import LanedChannel
from backhaul._transport.sockets.pending_connections import PendingConnection
from backhaul._transport.sockets.relay import Relay
from backhaul._transport.sockets.relay_legs import Leg
from backhaul._transport.sockets.shared_memory_link import Trimmer
from backhaul._transport.sockets.tcp_listener import TcpListener, listen_address
from backhaul._transport.sockets.tls import Credentials
from backhaul._transport.sockets.tls_channel import TlsChannel
from backhaul._transport.sockets.tls_socket import TlsSocket
from backhaul._transport.spin_wait import SpinLimit, SpinPolicy, new_signal
from backhaul._transport.waiter import ChannelWaiter
from backhaul._wire.frames import MAX_BUFFERS
from backhaul._wire.memory import Recycler

_MIN_SPIN_TIMEOUT_SECONDS = 0.002  # a thread that polls for no longer than this has other things to do
_FLUSH_SECONDS = 0.001
_AUTO_LANES = 16  # of a channel between hosts
_LONGEST_SECONDS = 1e6  # the system takes no timeouts of more than a few weeks


class _Nobody:
    wanted = False  # see ``spin_wait.Spinning``: no other thread wants what an idle thread spins for


_NOBODY = _Nobody()


# Over the limit because eight of its attributes are what its channels read of it (``ChannelOwner``).
class SocketEndpoint(Endpoint):
    """A worker's listening sockets and its channels.

    Args:
        secret: What peers must know.
        unix: Whether to listen on an abstract Unix socket.
        bind: Where to listen by TCP, see ``Options.bind``; None: nowhere.
        advertise: See ``Options.advertise``.
        limit: Largest frame to accept, in bytes.
        shm_bytes: How much shared memory to use at most; 0 for none. Default: see ``shm.default_ceiling``.
        credentials: What this worker proves itself with over TCP, which is then TLS. See also ``use_tcp``.
        spin: How long threads may spin, see ``Options.spin``.
        lanes: How many connections carry large frames to a peer, see ``Options.lanes``.
        relayed: How many connections this worker relays for others at most.

    Attributes:
        relay: The connections that this worker relays for others.
    """

    def __init__(
        self,
        *,
        secret: bytes,
        unix: bool = True,
        bind: str | None = None,
        advertise: str | None = None,
        limit: int = 8 << 30,
        shm_bytes: int | None = None,
        credentials: Credentials | None = None,
        spin: float | Literal["auto"] = "auto",
        lanes: int | Literal["auto"] = "auto",
        relayed: int = 256,
    ) -> None:
        self.limit = limit
        self.secret = secret
        self._most_lanes = lanes
        self.tickets: dict[bytes, LanedChannel] = {}
        self.spin_limit = SpinLimit(spin)
        self._waiting = SpinPolicy(self.spin_limit)  # of the threads that wait for several channels
        self._signal_wait = SignalWait(self.spin_limit)
        self._idle: dict[int, int] = {}  # [0]: the thread that spins for whatever comes, without the interpreter
        self.buffers = MAX_BUFFERS
        self.budget = Budget(default_ceiling() if shm_bytes is None else shm_bytes)
        self.recycler = Recycler()
        self.descriptors = EpollSet()
        self.trimmer = Trimmer(self.descriptors)
        self.wakes = 0
        self.signal = new_signal()
        self.spinners: dict[int, int] = {}
        self.unflushed: set[SocketChannel] = set()
        self.parked: set[SocketChannel] = set()
        self._flush_timer = self.descriptors.add_timer(self._go_on)
        self.relay = Relay(self.descriptors, relayed)
        self._relayed_credentials: Credentials | None = None
        self._acceptor = Acceptor(self.descriptors, secret, self.relay, self._accepted, self.tickets)
        self._connector = Connector(secret)
        self._last_read = threading.local()  # .channel: the channel that this thread read last
        self._lock = threading.Lock()  # guards the two below
        self._channels: dict[int, SocketChannel] = {}  # by descriptor
        self._closed = False
        self.addresses = ()
        try:
            if unix:
                self.addresses += (self._acceptor.listen_unix(),)
            self.use_tcp(TcpListener(listen_address(bind, advertise)) if bind is not None else None, credentials)
        except (OSError, ValueError):
            self.close()
            raise

    def use_tcp(self, listener: TcpListener | None, credentials: Credentials | None) -> None:
        """Listen at a TCP socket, which then belongs to this object. Others are told the address of the last one. With
        credentials, TCP is TLS from now on. Called before the first ``poll``.
        """
        self._connector.credentials = credentials
        if listener is not None:
            self._connector.scope = listener.where.interface
            kept = (address for address in self.addresses if not address.startswith("tcp:"))
            self.addresses = (*kept, self._acceptor.listen_tcp(listener, credentials))

    def use_relays(self, credentials: Credentials) -> None:
        """Reach other workers through relays too, and prove itself to them with these credentials."""
        self._relayed_credentials = credentials
        self.key = credentials.key

    def poll(self, timeout: float | None) -> Event | None:
        if self._acceptor.paused:
            timeout = self._acceptor.resume(timeout)
        here = self._last_read
        last: SocketChannel | None = getattr(here, "channel", None)
        if self.spin_limit.allows_company:
            here.channel = None
            event, ready = self._spin_and_poll(last, timeout)
            if event is not None:
                here.channel = last
                return event
        else:
            if last is not None and (timeout is None or timeout > _MIN_SPIN_TIMEOUT_SECONDS):
                begun = time.monotonic()
                event = last.spin_read(timeout)
                if event is not None:
                    return event
                here.channel = None
                if timeout is not None:
                    timeout = max(timeout - (time.monotonic() - begun), 0.0)
            ready = self.descriptors.poll(timeout if timeout is None else min(timeout, _LONGEST_SECONDS), 1)
        if not ready:
            return None
        fd = ready[0][0]
        channel = self._channels.get(fd)
        if channel is not None:
            here.channel = channel
            return channel.read()
        self.descriptors.run(fd)
        return None

    def _spin_and_poll(
        self, last: SocketChannel | None, timeout: float | None
    ) -> tuple[Event | None, list[tuple[int, int]]]:
        """Wait for an event of the channel that this thread read last, or for a descriptor. The thread spins first,
        unless another one does. Returns neither after ``wake``.
        """
        longest = _LONGEST_SECONDS if timeout is None else min(timeout, _LONGEST_SECONDS)
        me, since, signal = threading.get_ident(), time.perf_counter(), self.signal[0]
        policy: SpinPolicy | None = getattr(self._last_read, "policy", None)
        if policy is None:
            policy = self._last_read.policy = SpinPolicy(self.spin_limit)
        ready: list[tuple[int, int]] = []
        if longest > _MIN_SPIN_TIMEOUT_SECONDS and may_spin_idly(self) and self._idle.setdefault(0, me) == me:
            try:
                if last is not None:
                    event = last.spin_read(longest)
                    if event is not None:
                        return event, []
                else:
                    ready = policy.spin_if_worthwhile(self._poll_one, self, _NOBODY, longest, self.descriptors.own)
            finally:
                self._idle.clear()
            if not ready and self.signal[0] != signal:
                return None, []
        if not ready:
            longest = max(longest - (time.perf_counter() - since), 0.0)
            ready = self.descriptors.poll(longest, 1)
        policy.waited = time.perf_counter() - since
        return None, ready

    def _poll_one(self, timeout: int) -> list[tuple[int, int]]:
        return self.descriptors.poll(timeout, 1)

    def wake(self) -> None:
        self.wakes += 1  # for threads that spin; a count that is lost does no harm
        self.signal[0] += 1
        if self._idle:
            self.wake_soon()  # in case the thread that spins has looked at the signal just now
        else:
            self.descriptors.wake()

    def spin_for(self, one_shot: OneShotEvent, timeout: float | None) -> None:
        if self.spin_limit.allows_company:
            one_shot.signal = signal = new_signal()
            if not one_shot.opened:
                self._signal_wait.spin(self, signal, timeout)

    def wake_soon(self) -> None:
        self._flush_timer.start(_FLUSH_SECONDS)

    def flush(self) -> None:
        while self.unflushed:
            with contextlib.suppress(KeyError):  # another thread took it
                self.unflushed.pop().flush()

    def flush_soon(self, channel: SocketChannel) -> None:
        """See ``ChannelOwner``."""
        self.unflushed.add(channel)
        self.wake_soon()

    def unpark(self) -> None:
        while self.parked:
            with contextlib.suppress(KeyError):  # another thread took it
                self.parked.pop().unpark()

    def _go_on(self) -> None:
        """A while after frames were queued, or a channel was parked."""
        self.flush()
        if self.quiet:  # else the thread that runs tasks, or the one that watches it, goes on with parked channels
            self.unpark()

    def make_waiter(self) -> ChannelWaiter:
        return ChannelWaiter(self._waiting, self)

    # Shared memory and limits.

    @property
    def shm_bytes(self) -> int:
        return self.budget.used

    @property
    def shm_lent(self) -> int:
        with self._lock:
            channels = list(self._channels.values())
        return sum(channel.slots_lent for channel in channels)

    @property
    def relayed(self) -> int:
        return self.relay.carried

    def share_nothing(self) -> None:
        self.budget = Budget(0)

    def limit_buffers(self, most: int) -> None:
        self.buffers = most

    # Channels.

    def connect(self, address: str, *, timeout: float) -> Channel:
        self._check_open(address)
        return self._make_channel(self._connector.connect(address, timeout), address, relayed=False)

    def connect_through(self, address: str, leg: Leg, *, timeout: float) -> Channel:
        """As ``connect``, to the other end of a relayed connection. The relay listens at ``address``."""
        sock = self._connector.connect_through(address, leg, self._for_relays(address), timeout)
        return self._make_channel(sock, f"relayed by {address}", relayed=True)

    def accept_through(self, address: str, leg: Leg, *, timeout: float) -> None:
        """Wait for the other end of a relayed connection, and accept what it begins as from a port of this worker. The
        relay listens at ``address``. Raises ``ConnectionError``.
        """
        credentials = self._for_relays(address)
        sock = self._connector.open_leg(address, leg, timeout)
        try:
            self._acceptor.take(sock, f"relayed by {address}", credentials)
        except (OSError, ValueError) as error:  # the endpoint is being closed
            sock.close()
            raise ConnectionAbortedError(f"cannot connect to {address}: this worker is closed") from error

    def _for_relays(self, address: str) -> Credentials:
        self._check_open(address)
        if self._relayed_credentials is None:
            raise ConnectionRefusedError("this worker uses no relays")
        return self._relayed_credentials

    def _check_open(self, address: str) -> None:
        if self._closed:
            raise ConnectionAbortedError(f"cannot connect to {address}: this worker is closed")

    def _make_channel(self, sock: socket.socket, peer: str, *, relayed: bool) -> Channel:
        try:
            channel: SocketChannel
            if isinstance(sock, ssl.SSLSocket):
                channel = TlsChannel(self, TlsSocket(sock), peer, connects=True, relayed=relayed)
            elif sock.family == socket.AF_UNIX:
                channel = SocketChannel(self, sock, peer)
            else:
                channel = LanedChannel(self, sock, peer, connects=True, relayed=relayed)
            channel.relayed = relayed
            if not self._adopt(channel):
                raise ConnectionAbortedError(f"cannot connect to {peer}: this worker is closed")
            return channel
        except BaseException:
            sock.close()
            raise

    def _accepted(self, pending: PendingConnection) -> None:
        if pending.ticket is not None:
            expecting = self.tickets.pop(pending.ticket, None)
            if expecting is None:  # another connection was faster with the same ticket
                pending.sock.close()
            else:
                expecting.attach(pending.sock)
            return
        channel = pending.make_channel(self)
        if not self._adopt(channel):
            channel.free()

    def _adopt(self, channel: SocketChannel) -> bool:
        """Read a new channel from now on; False if this endpoint is closed."""
        with self._lock:
            if self._closed:
                return False
            self._channels[channel.descriptor] = channel
        self.descriptors.watch(channel.descriptor, None, select.EPOLLIN)
        return True

    def count_lanes(self, sock: socket.socket) -> int:
        """See ``LanesOwner``. A worker with many channels has fewer lanes, so that descriptors are left for others."""
        if self._most_lanes != "auto":
            return self._most_lanes
        if is_local(sock):
            return 1
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if most == resource.RLIM_INFINITY:
            return _AUTO_LANES
        return max(min(most // 4 // (len(self._channels) + 1), _AUTO_LANES), 1)

    def open_lane(self, opening: LaneOpening) -> None:
        """See ``LanesOwner``."""
        opening.start(self.descriptors, self._connector.secret, self._connector.credentials)

    def forget(self, fd: int) -> None:
        """See ``ChannelOwner``."""
        with self._lock:
            self._channels.pop(fd, None)
        self.descriptors.forget(fd)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            channels = list(self._channels.values())
        self._acceptor.close()
        self.relay.close()
        for channel in channels:
            channel.close()
            channel.free()
        self.descriptors.close()

    def sever(self) -> None:
        self._lock = threading.Lock()
        self._closed = True
        self._acceptor.sever()
        self.relay.sever()
        for channel in self._channels.values():
            channel.sever()
        self.descriptors.sever()
