"""What a transport is: one worker's end (``Endpoint``) and its connections (``Channel``). Moves frames, knows
no message.

Reading is pulled: any number of threads wait in ``Endpoint.poll``, and each event goes to exactly one of them. A
channel that has delivered frames delivers no more until ``release``, so whoever holds it may act in order before
anyone sees what follows. That lets the thread which reads a request also run it, with no hand-off.

Whoever reads or writes a channel can be told from its state: an entry with its name, where a lock would leave no trace.
So what handlers of signals raise in the midst of it leaves no channel that nobody reads; see [Note: interrupts].

[Note: blocking] ``poll``, ``connect`` and ``receive`` block, ``send`` and ``send_soon`` may (back-pressure); nothing
else does. Nothing here calls back into its user.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from backhaul._wire.frames import Frame

if TYPE_CHECKING:
    from backhaul._transport.spin_wait import SpinPolicy
    from backhaul._transport.waiter import ChannelWaiter


@dataclass(frozen=True, slots=True)
class Received:
    """Frames arrived on a channel, in order. It is held, and delivers no more, until its ``release``."""

    channel: Channel
    frames: list[Frame]


@dataclass(frozen=True, slots=True)
class Lost:
    """A channel is gone: the last event of a channel, and it comes exactly once.

    It also comes for a channel that this end closed. ``reason`` is for people.
    """

    channel: Channel
    reason: str


Event = Received | Lost


class ConnectTimeoutError(ConnectionError, TimeoutError):
    """Somebody may be there, but did not answer in time."""


class ChannelClosedError(ConnectionError):
    """The channel can take no more frames. ``Lost`` says why, to whoever polls."""


class ChannelBrokenError(ChannelClosedError):
    """The channel broke while a frame was being sent: it may have arrived."""


class Channel(abc.ABC):
    """A connection to one peer that carries frames in order, both ways. All methods are thread-safe."""

    peer: str
    """Where the other end is, for people."""

    bytes_sent: int = 0
    """How many bytes have gone out."""

    bytes_received: int | None = None
    """How many bytes have come in, so that a peer which is silent can be told from one that is not. None: the peer
    cannot be lost without this end.
    """
    names: frozenset[str] | None = None
    """Who the peer's certificate says it is; None: it has none."""

    @property
    def backlog(self) -> int:
        """How many bytes wait because the peer reads too slowly."""
        return 0

    @abc.abstractmethod
    def send(self, frame: Frame, *, timeout: float | None = None) -> None:
        """Send a frame. Once this returns, the memory of its buffers may be changed.

        Frames that one thread sends arrive in that order. If the peer reads too slowly, this waits; after
        ``timeout`` seconds what is left is copied and sent when the peer reads on (0: never wait).

        Raises:
            ChannelClosedError: The channel is closed or lost, and nothing was sent.
            ChannelBrokenError: It was lost just now. The frame may or may not have arrived.
        """

    def send_soon(self, frame: Frame, *, timeout: float | None = None) -> None:
        """As ``send``, for one of several frames: it may wait for those that follow, until ``flush`` or about a
        millisecond has passed (more while another thread keeps the interpreter). A transport that gains nothing by it
        sends at once.
        """
        self.send(frame, timeout=timeout)

    def flush(self) -> None:  # noqa: B027
        """Send what waits; nothing does, where ``send_soon`` sends at once."""

    @abc.abstractmethod
    def release(self) -> None:
        """Let the channel deliver again; called once for each ``Received`` and each successful ``acquire``."""

    def acquire(self, holder: object = None) -> bool:
        """Take the channel from the pollers, so as to read it with ``receive``. False: it cannot be had now.

        A thread that waits for a reply gets it without a hand-off that way. A transport need not offer it. ``holder``
        is for ``mend``, and is not used for two holds at a time. A channel that is lost cannot be had any more.
        """
        return False

    def recover_after_interrupt(self, holder: object, *, whole: bool) -> Lost | None:
        """A thread was interrupted somewhere between ``acquire`` and the end of ``release``: let the channel
        deliver again.
        Unless it is known to be ``whole`` something may be missing, and it is closed: then the thread has to tell.
        """
        return None

    def receive(self, timeout: float | None) -> Event | None:
        """Wait for the next event of a channel that this thread holds; it stays held. None: ``timeout`` passed.

        After ``Lost`` the channel is no longer held.
        """
        raise NotImplementedError("this channel cannot be held")

    @property
    def descriptor(self) -> int:
        """Readable when ``take`` may have something; of channels that can be held."""
        raise NotImplementedError("this channel cannot be held")

    def take(self) -> Event | None:
        """As ``receive``, but None if there is nothing now."""
        raise NotImplementedError("this channel cannot be held")

    @abc.abstractmethod
    def close(self) -> None:
        """Close both directions.

        What has been sent is still delivered to a peer that reads on; where that peer is sending at the same time, TCP
        may drop what it has not read.
        """

    @property
    def unread(self) -> bool:
        """Whether something has come that nobody has read yet, where that can be told."""
        return False

    def abort(self, reason: str) -> None:
        """Close at once, since the peer is given up: what waits to be sent is dropped. ``Lost`` gives the reason."""
        self.close()


class Endpoint(abc.ABC):
    """One worker's end of a transport. All methods are thread-safe."""

    addresses: tuple[str, ...]
    """Where others reach this end, best first."""

    quiet: bool = True
    """Whether nothing runs but threads that wait for messages. Set by the threads that poll; see ``spin_wait``."""

    wakes: int = 0
    """How often ``wake`` was called, for threads that spin."""

    unflushed: Collection[Channel] = ()
    """Channels that ``flush`` would write to."""

    @property
    def shm_bytes(self) -> int:
        """How much shared memory this end has made, to put in there what it sends."""
        return 0

    @property
    def shm_lent(self) -> int:
        """How many slots of it the peers use."""
        return 0

    def share_nothing(self) -> None:  # noqa: B027
        """Use no memory that peers can still change after it was looked at. Called before the first ``poll``."""

    def limit_buffers(self, most: int) -> None:  # noqa: B027
        """Take no frame with more buffers than ``most``. For channels that are made after this call."""

    @abc.abstractmethod
    def connect(self, address: str, *, timeout: float) -> Channel:
        """Open a channel to the endpoint that listens at ``address``.

        Raises:
            ConnectionError: Nobody is there; ``ConnectTimeoutError`` if nobody answered within ``timeout`` seconds.
            AuthenticationError: One side does not know the other's secret.
            ValueError: The address is none of this transport's.
        """

    @abc.abstractmethod
    def poll(self, timeout: float | None) -> Event | None:
        """Wait for the next event. None: ``timeout`` passed, ``wake`` was called, or there was nothing to tell."""

    @abc.abstractmethod
    def wake(self) -> None:
        """Make one thread that waits in ``poll``, or the next that comes, return at once."""

    def wake_soon(self) -> None:
        """As ``wake``, but about a millisecond later where the transport can: it may not be needed any more."""
        self.wake()

    def flush(self) -> None:  # noqa: B027
        """Send what waits in any channel, see ``Channel.send_soon``."""

    def make_waiter(self, policy: SpinPolicy) -> ChannelWaiter:
        """Make what a thread needs to wait for several channels of this end that it holds."""
        from backhaul._transport.waiter import ChannelWaiter  # which imports this module

        return ChannelWaiter(policy, self)

    @abc.abstractmethod
    def close(self) -> None:
        """Stop listening, close all channels, free everything. No thread may be in ``poll`` any more."""

    def sever(self) -> None:  # noqa: B027
        """This process was forked: close the descriptors of this copy without a word to the peers, and send nothing any
        more. Takes no lock, since threads that are not here may hold it.
        """


EndpointFactory = Callable[[], Endpoint]
"""Makes an independent endpoint; what the conformance kit takes."""
