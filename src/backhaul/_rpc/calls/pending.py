"""A call under way, as its caller sees it: what it waits for, and how its reply becomes a value."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from backhaul._rpc.cluster.peers import Peer
from backhaul._rpc.futures import Future
from backhaul._rpc.interceptors import Interceptor
from backhaul._rpc.security.rate_limits import over_bounds
from backhaul._runtime import interrupts
from backhaul._runtime.observer import CallTrace
from backhaul._runtime.runtime import OneShotEvent
from backhaul._transport.base import Channel
from backhaul._wire.codec import Encoded, load
from backhaul._wire.device_link import Lease, decline
from backhaul._wire.faults import decode_fault
from backhaul._wire.frames import Frame
from backhaul._wire.messages import Fault, Kind, Payload, Reply, pack, unpack
from backhaul._wire.tensors.reader import tensors_of
from backhaul._wire.tensors.subclasses import may_require_grad
from backhaul._worker.deadlines import FOREVER, CancelScope
from backhaul._worker.worker import Worker
from backhaul.errors import (
    BackhaulError,
    CallCancelledError,
    CallTimeoutError,
    FrameTooLargeError,
    LimitError,
    PeerLostError,
    SerializationError,
)

Outcome = Frame | BackhaulError
"""Of a call: the reply, or why there is none."""


class Pending:
    """A call under way. Whoever takes it off the table gives it its outcome, once."""

    # What most calls leave as it is stands here and not in each of them.
    number = 0
    deadline = FOREVER
    channel: Channel | None = None
    kept: Sequence[tuple[Interceptor, Any]] = ()  # by those who kept something
    notes: Mapping[str, bytes] = {}
    trace: CallTrace | None = None
    limit: CancelScope | None = None  # of the handler or block that made the call
    cut = False  # the time is the limit's, not the call's own
    lease: Lease | None = None  # slots of device memory that the request takes with it

    def __init__(self, peer: Peer, timeout: float, label: str) -> None:
        self.peer = peer
        self.timeout = timeout
        self.label = label

    def timed_out(self) -> CallTimeoutError:
        """The error of a call whose deadline has passed."""
        name, suspicion = self.peer.info.name, self.peer.suspicion
        doubt = f"; that worker is suspected to be lost: {suspicion}" if suspicion else ""
        cut_by = self.limit.label if self.cut and self.limit is not None else None
        of_another = "" if cut_by is None else f", which is what was left until the deadline of {cut_by}"
        return CallTimeoutError(
            f"{self.label} on worker '{name}' gave no reply within {self.timeout:.4g} s{of_another}{doubt}",
            worker=name,
            function=self.label,
            timeout=self.timeout,
            cut_by=cut_by,
        )

    def cancelled(self, why: str = "") -> CallCancelledError:
        """The error of a call that was cancelled."""
        name = self.peer.info.name
        return CallCancelledError(
            f"{self.label} on worker '{name}' was cancelled{why}", worker=name, function=self.label
        )

    def interrupted(self, error: BaseException) -> CallCancelledError:
        """The error of a call whose outcome could not be read because a signal came."""
        return self.cancelled(f": {type(error).__name__} interrupted it")

    def lost(self, reason: str) -> PeerLostError:
        """The error of a call whose channel is gone."""
        name = self.peer.info.name
        return PeerLostError(
            f"lost worker '{name}' while {self.label} was under way there: {reason}",
            worker=name,
            reason=reason,
            function=self.label,
        )

    def read(self, outcome: Outcome, worker: Worker, interceptors: Iterable[Interceptor]) -> Any:
        """The value of an outcome, or raise what it says."""
        if self.trace is not None:
            return self._read_observed(outcome, worker, interceptors)
        if not isinstance(outcome, Frame):
            tell_failed(self.peer, interceptors, self.notes)
            # Not itself: it would refer to the frames that it goes through, and they to it and to this call. What the
            # caller holds, a reference to a value say, would stay until the next collection.
            raise copy.copy(outcome) from outcome.__cause__
        if outcome.kind == Kind.FAULT:
            if self.peer.link is not None:
                self.peer.link.arrive(self.channel)
            raise decode_fault(unpack(outcome.body, Fault), outcome.buffers)
        notes: Mapping[str, bytes] = {}
        payload: Payload | None = None
        try:
            reply = unpack(outcome.body, Reply)
            payload, notes, buffers = reply.payload, reply.notes, outcome.buffers
            if self.peer.link is None:
                tensors = tensors_of(payload, buffers)
            else:
                tensors = tensors_of(payload, buffers, self.peer.link.arrive(self.channel))
            for interceptor, kept in self.kept:
                tensors = interceptor.reply_in(self.peer, kept, notes.get(interceptor.key), tensors)
            if not self.kept and may_require_grad(tensors):
                for interceptor in interceptors:
                    tensors = interceptor.reply_in(self.peer, None, notes.get(interceptor.key), tensors)
            (value,) = load(payload, buffers, tensors, worker)
            return value
        except BaseException as error:
            if self.peer.link is not None and payload is not None:
                decline(payload, self.peer.link.answer(self.channel))
            discard(self.peer, interceptors, notes)
            if isinstance(error, LimitError) or interrupts.from_signal(error):
                raise
            raise SerializationError(
                f"the result of {self.label} from worker '{self.peer.info.name}' cannot be decoded here: "
                f"{type(error).__name__}: {error}",
                worker=self.peer.info.name,
                path="result",
            ) from error

    def _read_observed(self, outcome: Outcome, worker: Worker, interceptors: Iterable[Interceptor]) -> Any:
        trace, self.trace = self.trace, None
        assert trace is not None
        trace.opened()
        try:
            value = self.read(outcome, worker, interceptors)
        except BaseException as error:
            trace.done(error)
            raise
        trace.done(None)
        return value


class SyncCall(Pending):
    """A thread waits for the outcome and reads it itself: at the channel, or at the gate once it has made one."""

    one_shot: OneShotEvent | None = None
    outcome: Outcome | None = None

    def settle(self, outcome: Outcome) -> None:
        """Take the outcome."""
        # In this order; who waits sets the gate and then looks for the outcome. So one of them sees the other.
        self.outcome = outcome
        if self.one_shot is not None:
            self.one_shot.open()


class AsyncCall(Pending):
    """A future waits; its callbacks are the user's, so it is completed in a task."""

    def __init__(self, peer: Peer, timeout: float, label: str) -> None:
        self.peer = peer
        self.timeout = timeout
        self.label = label
        self.future: Future[Any] = Future()


def discard(peer: Peer, interceptors: Iterable[Interceptor], notes: Mapping[str, bytes]) -> None:
    """Tell those who put notes on a message that it is not going to be used."""
    for interceptor in interceptors if notes else ():
        note = notes.get(interceptor.key)
        if note is not None:
            interceptor.discard(peer, note)


def tell_failed(peer: Peer, interceptors: Iterable[Interceptor], notes: Mapping[str, bytes]) -> None:
    """Tell those who put notes on a request that it has failed, but may have arrived."""
    for interceptor in interceptors if notes else ():
        note = notes.get(interceptor.key)
        if note is not None:
            interceptor.failed(peer, note)


SMALL = 1 << 15  # bytes of a frame that any worker accepts


class Labelled(Protocol):
    """What has a name for people, which may have to be made."""

    @property
    def label(self) -> str: ...


def check_size(frame: Frame, peer: Peer, what: str, call: Labelled | None = None) -> None:
    """Raise ``FrameTooLargeError`` or ``LimitError`` if ``peer`` would not accept the frame."""
    size, limit, bounds = frame.nbytes, peer.record.limit, peer.record.bounds

    def described() -> str:
        return what if call is None else f"{what} {call.label}"

    if size > limit:
        raise FrameTooLargeError(
            f"{described()} takes {size} bytes; worker '{peer.info.name}' accepts {limit} (max_frame_bytes)",
            worker=peer.info.name,
            nbytes=size,
            limit=limit,
        )
    if bounds is not None and (error := over_bounds(frame, bounds, peer.info.name, described)) is not None:
        raise error


_TEXT = 1 << 12  # characters of an exception's text that are sent to a worker that does not take all of it


def fault_frame(
    peer: Peer,
    kind: int,
    fault: Fault,
    encoded: Encoded | None,
    *,
    number: int = 0,
    inside: Callable[[Fault], msgspec.Struct] = lambda fault: fault,
) -> Frame:
    """A frame that tells ``peer`` of an exception; ``inside`` makes its message. What the peer would refuse is left
    out, so that it learns of the exception in any case: first the exception itself, then most of its text.
    """
    buffers, keep = ((), None) if encoded is None else (encoded.buffers, encoded.keep)
    frame = Frame(kind, number, pack(inside(fault)), buffers, keep)
    for most in (None, _TEXT):
        if _fits(peer, frame):
            break
        less = Fault(fault.worker, fault.type_name, fault.message[:most], fault.traceback[:most])
        frame = Frame(kind, number, pack(inside(less)))
    return frame


def _fits(peer: Peer, frame: Frame) -> bool:
    try:
        check_size(frame, peer, "an exception")
    except (FrameTooLargeError, LimitError):
        return False
    return True
