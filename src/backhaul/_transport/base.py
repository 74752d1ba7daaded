"""The interface of a transport: one worker's end (``Endpoint``) and its connections (``Channel``). A transport moves
frames and knows no message.

Reading is pulled: any number of threads wait in ``Endpoint.poll``, and each event goes to exactly one of them. A
channel that has delivered frames is held: it delivers no more until ``release``. The thread that holds the channel can
therefore act on the frames in order, before another thread sees what follows. The thread that reads a request can also
run it, without a hand-off.

A channel notes which thread reads it, and which thread writes to it. After an exception that a signal handler has
raised, the note tells what the interrupted thread has to repair, so that no channel stays unread. A lock would not
tell its owner. See [Note: interrupts].

[Note: blocking] ``poll``, ``connect`` and ``receive`` block. ``send`` and ``send_soon`` block if the peer reads too
slowly. Nothing else blocks, and nothing here calls back into its user.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from backhaul._wire.frames import Frame

if TYPE_CHECKING:
    from backhaul._runtime.runtime import OneShotEvent
    from backhaul._transport.spin_wait import Signal
    from backhaul._transport.waiter import ChannelWaiter


@dataclass(frozen=True, slots=True)
class Received:
    """Frames arrived on a channel, in order. The channel is held: it delivers no more until its ``release``."""

    channel: Channel
    frames: list[Frame]


@dataclass(frozen=True, slots=True)
class Lost:
    """A channel is lost. This is the last event of a channel, and it comes exactly once.

    It also comes for a channel that this end closed. ``reason`` is for people.
    """

    channel: Channel
    reason: str


Event = Received | Lost


class ConnectTimeoutError(ConnectionError, TimeoutError):
    """A worker may be at the address, but it did not answer in time."""


class ChannelClosedError(ConnectionError):
    """The channel can take no more frames. The thread that polls learns from ``Lost`` why."""


class ChannelBrokenError(ChannelClosedError):
    """The channel broke while a frame was being sent. The frame may have arrived."""


class Channel(abc.ABC):
    """A connection to one peer. It carries frames in order, in both directions. All methods are thread-safe."""

    peer: str
    """Where the other end is, for people."""

    bytes_sent: int = 0
    """How many bytes were sent."""

    bytes_received: int | None = None
    """How many bytes were received. Shows whether the peer is silent. None: the peer cannot be lost alone, since it
    shares this process.
    """

    names: frozenset[str] | None = None
    """The worker names in the peer's certificate; None: the peer has no certificate."""

    key: str | None = None
    """Identifies the peer's certificate, and with it the peer's private key: a hash. None: it has no certificate."""

    relayed: bool = False
    """Whether another member passes the bytes on. They are encrypted between the two ends then."""

    @property
    def backlog(self) -> int:
        """How many bytes wait to be sent because the peer reads too slowly."""
        return 0

    @abc.abstractmethod
    def send(self, frame: Frame, *, timeout: float | None = None) -> None:
        """Send a frame. Once this returns, the memory of its buffers may be changed.

        Frames that one thread sends arrive in that order. If the peer reads too slowly, this waits. After
        ``timeout`` seconds the rest is copied, and sent when the peer reads on (0: never wait; None: wait any time).

        Raises:
            ChannelClosedError: The channel is closed or lost, and nothing was sent.
            ChannelBrokenError: The channel was lost just now. The frame may or may not have arrived.
        """

    def send_soon(self, frame: Frame, *, timeout: float | None = None) -> None:
        """Like ``send``, for one of several frames. The frame may wait for those that follow, until ``flush`` is called
        or about a millisecond has passed (more while another thread keeps the interpreter). So long the channel may be
        parked too: no thread is woken for each reply. A transport that gains nothing by it sends at once.
        """
        self.send(frame, timeout=timeout)

    def flush(self) -> None:  # noqa: B027
        """Send the frames of ``send_soon`` that wait. None do where ``send_soon`` sends at once."""

    @abc.abstractmethod
    def release(self) -> None:
        """Let the channel deliver again. Call this once for each ``Received`` and each successful ``acquire``."""

    def park(self) -> None:
        """Like ``release``, but the channel may deliver nothing until ``Endpoint.unpark``, which the caller brings
        about soon. Meanwhile ``acquire`` takes the channel.
        """
        self.release()

    def acquire(self, holder: object = None) -> bool:
        """Hold the channel, so that this thread reads it with ``receive`` and ``Endpoint.poll`` does not. Returns
        whether the thread holds it now.

        A thread that waits for a reply gets the reply without a hand-off that way. A transport need not offer it. A
        channel that is lost cannot be held any more.

        Args:
            holder: Identifies this hold for ``recover_after_interrupt``. Not used for two holds at a time.
        """
        return False

    def recover_after_interrupt(self, holder: object, *, whole: bool) -> Lost | None:
        """Let the channel deliver again after the thread that holds it was interrupted, somewhere between ``acquire``
        and the end of ``release``.

        Args:
            holder: What was given to ``acquire``.
            whole: No frame was lost. Otherwise the channel is closed, since part of a frame may be missing.

        Returns:
            The loss of the channel, which the thread must report; None if the channel goes on.
        """
        return None

    def receive(self, timeout: float | None) -> Event | None:
        """Wait for the next event of a channel that this thread holds. None: ``timeout`` seconds passed.

        The channel stays held, except after ``Lost``.
        """
        raise NotImplementedError("this channel cannot be held")

    @property
    def descriptor(self) -> int:
        """A descriptor that is readable when ``take`` may return an event. Only of channels that can be held."""
        raise NotImplementedError("this channel cannot be held")

    def take(self) -> Event | None:
        """Like ``receive``, but does not wait. None: there is no event now."""
        raise NotImplementedError("this channel cannot be held")

    @abc.abstractmethod
    def close(self) -> None:
        """Close both directions.

        Frames that were sent are still delivered to a peer that reads on. If that peer sends at the same time, TCP may
        drop frames that the peer has not read.
        """

    @property
    def unread(self) -> bool:
        """Whether bytes have come that no thread has read yet. False where the transport cannot tell."""
        return False

    def abort(self, reason: str) -> None:
        """Close at once, and drop what waits to be sent. For a peer that is given up. ``Lost`` gives the reason."""
        self.close()


class Endpoint(abc.ABC):
    """One worker's end of a transport. All methods are thread-safe."""

    addresses: tuple[str, ...]
    """The addresses of this end, best first."""

    key: str = ""
    """Identifies the certificate with which this end proves itself over relayed connections; empty: it has none."""

    quiet: bool = True
    """Whether nothing runs but threads that wait for messages. Set by the threads that poll; see ``spin_wait``."""

    wakes: int = 0
    """How often ``wake`` was called, for threads that spin."""

    signal: Signal[int]
    """See ``spin_wait.Busyness``. Only of endpoints whose threads spin."""

    spinners: dict[int, int]
    """See ``spin_wait.Busyness``. Only of endpoints whose threads spin."""

    blocked: int = 0
    """How many tasks wait for something. Set by the threads that poll; see ``spin_wait``."""

    spinner: object | None = None
    """Identifies the spin that is under way; see ``spin_wait``."""

    unflushed: Collection[Channel] = ()
    """Channels that ``flush`` would write to."""

    parked: Collection[Channel] = ()
    """Channels that ``unpark`` would release."""

    @property
    def shm_bytes(self) -> int:
        """How many bytes of shared memory this end has made, for what it sends."""
        return 0

    @property
    def shm_lent(self) -> int:
        """How many slots of that shared memory the peers use."""
        return 0

    @property
    def relayed(self) -> int:
        """How many connections between other workers this end relays."""
        return 0

    def share_nothing(self) -> None:  # noqa: B027
        """Use no memory that peers can change after this end has checked it. Called before the first ``poll``."""

    def limit_buffers(self, most: int) -> None:  # noqa: B027
        """Accept no frame with more than ``most`` buffers. Holds for channels that are made after this call."""

    @abc.abstractmethod
    def connect(self, address: str, *, timeout: float) -> Channel:
        """Open a channel to the endpoint that listens at ``address``.

        Raises:
            ConnectionError: No endpoint listens there; ``ConnectTimeoutError``: none answered in ``timeout`` seconds.
            AuthenticationError: One side does not know the other's secret.
            ValueError: The address does not belong to this transport.
        """

    @abc.abstractmethod
    def poll(self, timeout: float | None) -> Event | None:
        """Wait for the next event. None: ``timeout`` seconds passed, ``wake`` was called, or no event was left."""

    @abc.abstractmethod
    def wake(self) -> None:
        """Make one thread that waits in ``poll`` return at once, or the next thread that calls it."""

    def wake_soon(self) -> None:
        """Like ``wake``, but about a millisecond later where the transport can: by then it may not be needed."""
        self.wake()

    def flush(self) -> None:  # noqa: B027
        """Send what waits in any channel of this end, see ``Channel.send_soon``."""

    def unpark(self) -> None:  # noqa: B027
        """Let all parked channels of this end deliver again, see ``Channel.park``."""

    def spin_for(self, one_shot: OneShotEvent, timeout: float | None) -> None:  # noqa: B027
        """Wait for an event without sleeping, for as long as that is worthwhile here: other threads of this worker open
        it. Returns at once where it is not.
        """

    def make_waiter(self) -> ChannelWaiter:
        """Make what a thread needs to wait for several channels of this end that it holds."""
        from backhaul._transport.spin_wait import SpinPolicy
        from backhaul._transport.waiter import ChannelWaiter  # which imports this module

        return ChannelWaiter(SpinPolicy(), self)

    @abc.abstractmethod
    def close(self) -> None:
        """Stop listening, close all channels, and free everything. No thread may be in ``poll`` any more."""

    def sever(self) -> None:  # noqa: B027
        """Close the descriptors of this copy in a forked process, without a message to the peers, and send nothing any
        more. Takes no lock, since a thread of the parent may hold it. See [Note: forks].
        """


EndpointFactory = Callable[[], Endpoint]
"""Makes an independent endpoint. The conformance kit takes one."""
