"""What ``_rpc`` and ``_autograd`` call of devices: the streams of the process, the link to a peer, a worker's devices.

The rooms above call these objects and never ask whether there are devices. Where there are none, the null objects here
serve them. Owns the interfaces and the null objects. Must not import what only a worker with devices needs.

[Note: null callables] Every call and every pass uses these objects, so a null method must not run a Python function.
The null objects are instances whose attributes are C functions that do nothing.
"""

from __future__ import annotations

import collections
import operator
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

if TYPE_CHECKING:
    from backhaul._devices.backend import DeviceEvent, Key
    from backhaul._devices.device_context import Member
    from backhaul._transport.base import Channel
    from backhaul._wire.device_link import Lease, Link

T = TypeVar("T")

# See [Note: null callables].
_without_argument: Callable[[], None] = [].clear
_false: Callable[[], object] = "".isdigit  # the empty string has no digits
_ignore: Callable[[Any], None] = collections.deque[Any](maxlen=0).append  # keeps nothing
_ignore_two: Callable[[Any, Any], object] = operator.is_
_return_second: Callable[[Any, Any], Any] = dict[Any, Any]().get  # the first argument must be hashable


class Mark:
    """What was under way on a thread's streams when it handed a value on. Made by ``ProcessStreams.mark``."""

    __slots__ = ("_events",)

    def __init__(self, events: list[tuple[Key, DeviceEvent]]) -> None:
        self._events = events

    @property
    def pending(self) -> list[tuple[Key, DeviceEvent]]:
        """What of it is still under way."""
        if self._events:
            self._events = [(key, event) for key, event in self._events if not event.query()]
        return self._events


class ProcessStreams(Protocol):
    """The order of work on the device streams of this process. The real one is ``StreamOrder``."""

    def in_use(self) -> object:
        """Whether this process uses a device. If not, every tensor is on the CPU and there is no order to keep."""

    def depart(self) -> object:
        """A message, or a value for another thread, leaves this thread."""

    def arrive(self) -> object:
        """This thread goes on with what others have sent."""

    def adopt(self, value: Any, /) -> object:
        """This thread uses tensors that another thread has made."""

    def mark(self, earlier: Mark | None, /) -> Mark | None:
        """What this thread has begun, and what is pending of an earlier mark. None: no device is in use."""

    def join(self, mark: Mark | None, value: T, /) -> T:
        """This thread goes on with a value that came with ``mark``. Returns the value."""

    def carry(self, value: object, /) -> Callable[[], None]:
        """A value leaves this thread. Another thread calls the result before it uses the value."""

    def value_of(self, future: Any, /) -> Any:
        """The value of a future that is done."""

    def explain(self, error: BaseException, worker: str, /) -> object:
        """Add a note to an error of a device, which says whether the worker is still usable."""


class PeerLink(Protocol):
    """How tensors on devices travel between a worker and one peer. The real one is ``DeviceLink``."""

    @property
    def takes_host(self) -> bool:
        """Whether CPU tensors go through the link too, because they are to arrive on a device, or come from one."""

    def request(self, channel: Channel | None, /) -> Link | None:
        """The codec's link for requests to the peer, and for gradients of the peer's replies."""

    def answer(self, channel: Channel | None, /) -> Link | None:
        """The codec's link for replies to the peer, and for gradients of the peer's requests."""

    def arrive(self, channel: Channel | None, /) -> Link | None:
        """A message has come over ``channel``, and this thread goes on with it; return the link to read it with."""

    def depart(self, lease: Lease | None, channel: Channel, /) -> object:
        """A message leaves this thread over ``channel``, with the slots of ``lease``. Raises ``ChannelClosedError`` if
        the slots belong to another channel.
        """

    def depart_with(self, leases: Iterable[Lease], channel: Channel, /) -> object:
        """As ``depart``, for gradients that go together. The caller has called ``ProcessStreams.depart``."""

    def opened(self, channel: Channel, /) -> object:
        """A channel to the peer is open."""

    def lost(self, channel: Channel, /) -> object:
        """A channel to the peer is lost."""

    def takes_from(self, device: torch.device, /) -> bool:
        """Whether results on a CUDA device of the peer can arrive here without a copy to the host."""


class Placed(Protocol):
    """Something that knows on which devices its tensors are."""

    def bring(self, grads: Any, /) -> Any:
        """Move gradients to the devices of their tensors."""


class WorkerDevices(Protocol):
    """The devices of one worker. The real one is ``_rpc.device_memory.DeviceMemory``."""

    @property
    def bytes_sent(self) -> int:
        """How many bytes of devices were sent without passing through the host."""

    def link_to(self, own: Member, record: Member, *, open: bool) -> PeerLink:
        """The link between the worker and a peer. ``open``: the two trust each other, and may share memory."""

    def bring(self, placed: Placed | None, grads: T, /) -> T:
        """Move gradients to the devices of the tensors that they belong to. Returns the gradients."""

    def start(self, peers: Any) -> None:
        """The worker's table of members is there, see ``_rpc.cluster.peers``."""

    def settle(self, timeout: float) -> None:
        """Wait until what was sent is computed. Called before channels are closed: the process may end next."""


class _NoStreams:
    __slots__ = ("adopt", "arrive", "depart", "explain", "in_use", "join", "mark", "value_of")

    def __init__(self) -> None:
        self.in_use = _false
        self.depart = self.arrive = _without_argument
        self.adopt = self.mark = _ignore
        self.join = _return_second
        self.value_of: Callable[[Any], Any] = torch._C.Future.wait
        self.explain = _ignore_two

    @staticmethod
    def carry(value: object) -> Callable[[], None]:
        return _without_argument


class _NoLink:
    __slots__ = ("answer", "arrive", "depart", "depart_with", "lost", "opened", "request")
    takes_host = False

    def __init__(self) -> None:
        self.request = self.answer = self.arrive = self.opened = self.lost = _ignore
        self.depart = self.depart_with = _ignore_two

    @staticmethod
    def takes_from(device: torch.device) -> bool:
        return False


class _NoDevices:
    __slots__ = ("bring",)
    bytes_sent = 0

    def __init__(self) -> None:
        self.bring = _return_second

    def link_to(self, own: Member, record: Member, *, open: bool) -> PeerLink:
        if not (own.maps or record.maps):
            return NO_LINK
        from backhaul._devices.links import link_to

        return link_to(own, record, None, open=open)

    def start(self, peers: Any) -> None: ...

    def settle(self, timeout: float) -> None: ...


NO_STREAMS: ProcessStreams = _NoStreams()
NO_LINK: PeerLink = _NoLink()
NO_DEVICES: WorkerDevices = _NoDevices()

streams: ProcessStreams = NO_STREAMS
"""The order of this process's streams. The first worker with devices replaces it: streams belong to a process. Read it
at each use, never at import.
"""


def _forget() -> None:
    global streams
    streams = NO_STREAMS  # CUDA does not work in a forked child


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
