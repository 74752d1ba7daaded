"""A call under way, as its caller sees it: what it waits for, its errors, and how its reply becomes a value."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from backhaul._rpc.cluster.peers import Peer
from backhaul._rpc.futures import Future
from backhaul._rpc.interceptors import Interceptor, Interceptors
from backhaul._rpc.security.rate_limits import over_bounds
from backhaul._runtime import interrupts
from backhaul._runtime.observer import CallTrace
from backhaul._runtime.runtime import OneShotEvent
from backhaul._transport.base import Channel
from backhaul._wire.call_frames import ReceivedReply, read_reply
from backhaul._wire.codec import Encoded
from backhaul._wire.device_link import Lease
from backhaul._wire.faults import decode_fault
from backhaul._wire.frames import Frame
from backhaul._wire.messages import Fault, Kind, pack, unpack
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
"""The outcome of a call: the reply, or the error that says why there is none."""


class Pending:
    """A call under way. The thread that removes it from ``PendingCalls`` gives it its outcome, once."""

    # Defaults that most calls do not change are attributes of the class: making a call then costs less.
    number = 0
    deadline = FOREVER
    channel: Channel | None = None
    kept: Sequence[tuple[Interceptor, Any]] = ()  # values that interceptors keep for the reply
    notes: Mapping[str, bytes] = {}
    parcels: Sequence[Any] = ()  # what the values of the request have left for carriers, kept until the call is over
    trace: CallTrace | None = None
    scope: CancelScope | None = None  # of the handler or block that made the call
    cut = False  # whether the deadline is that of ``scope``, not the call's own
    lease: Lease | None = None  # slots of device memory that belong to the request

    def __init__(self, peer: Peer, timeout: float, label: str) -> None:
        self.peer = peer
        self.timeout = timeout
        self.label = label

    def timed_out(self) -> CallTimeoutError:
        """The error of a call whose deadline has passed."""
        name, suspicion = self.peer.info.name, self.peer.suspicion
        doubt = f"; that worker is suspected to be lost: {suspicion}" if suspicion else ""
        cut_by = self.scope.label if self.cut and self.scope is not None else None
        of_another = "" if cut_by is None else f", the time that was left until the deadline of {cut_by}"
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

    def read(self, outcome: Outcome, worker: Worker, interceptors: Interceptors) -> Any:
        """The value of an outcome; raises the error if the outcome is one."""
        if self.trace is not None:
            return self._read_observed(outcome, worker, interceptors)
        if not isinstance(outcome, Frame):
            interceptors.tell_failed(self.peer, self.notes)
            # A copy: the error would refer to the frames that it passes, and these to the error and to this call. Then
            # objects of the caller, such as a remote reference, would live until the next garbage collection.
            raise copy.copy(outcome) from outcome.__cause__
        if outcome.kind == Kind.FAULT:
            self.peer.link.arrive(self.channel)
            raise decode_fault(unpack(outcome.body, Fault), outcome.buffers)
        reply: ReceivedReply | None = None
        try:
            reply = read_reply(outcome)
            tensors = reply.tensors(self.peer.link.arrive(self.channel))
            if self.kept:
                for interceptor, kept in self.kept:
                    tensors = interceptor.reply_in(self.peer, kept, reply.notes.get(interceptor.key), tensors)
            elif reply.requires_grad:
                for interceptor in interceptors.of_calls:
                    tensors = interceptor.reply_in(self.peer, None, reply.notes.get(interceptor.key), tensors)
            return reply.value(tensors, worker)
        except BaseException as error:
            if reply is not None:
                reply.decline(self.peer.link.answer(self.channel))
                interceptors.discard(self.peer, reply.notes)
            if isinstance(error, LimitError) or interrupts.from_signal(error):
                raise
            raise SerializationError(
                f"the result of {self.label} from worker '{self.peer.info.name}' cannot be decoded here: "
                f"{type(error).__name__}: {error}",
                worker=self.peer.info.name,
                path="result",
            ) from error

    def _read_observed(self, outcome: Outcome, worker: Worker, interceptors: Interceptors) -> Any:
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
    """A thread waits for the outcome: it reads the channel itself, or waits at ``one_shot`` once it has set that."""

    one_shot: OneShotEvent | None = None
    outcome: Outcome | None = None

    def settle(self, outcome: Outcome) -> None:
        """Take the outcome."""
        # In this order: the waiting thread sets ``one_shot`` and then reads ``outcome``, so one of them sees the other.
        self.outcome = outcome
        if self.one_shot is not None:
            self.one_shot.open()


class AsyncCall(Pending):
    """A future waits for the outcome. It is completed in a task, because its callbacks are the user's code."""

    def __init__(self, peer: Peer, timeout: float, label: str, future: Future[Any] | None = None) -> None:
        self.peer = peer
        self.timeout = timeout
        self.label = label
        self.future: Future[Any] = Future() if future is None else future


class Labelled(Protocol):
    """Something with a label for people. Making the label may take time."""

    @property
    def label(self) -> str: ...


def check_size(frame: Frame, peer: Peer, what: str, call: Labelled | None = None) -> None:
    """Raise ``FrameTooLargeError`` or ``LimitError`` if ``peer`` would not accept the frame."""
    size, limit, bounds = frame.nbytes, peer.record.limit, peer.record.bounds

    def described() -> str:
        return what if call is None else f"{what} {call.label}"

    if size > limit:
        raise FrameTooLargeError(
            f"{described()} takes {size} bytes; worker '{peer.info.name}' accepts {limit} (limits.frame_bytes)",
            worker=peer.info.name,
            nbytes=size,
            limit=limit,
        )
    if bounds is not None and (error := over_bounds(frame, bounds, peer.info.name, described)) is not None:
        raise error


_MAX_TEXT = 1 << 12  # characters of an exception's text, if the receiver does not take all of it


def fault_frame(
    peer: Peer,
    kind: int,
    fault: Fault,
    encoded: Encoded | None,
    *,
    number: int = 0,
    inside: Callable[[Fault], msgspec.Struct] = lambda fault: fault,
) -> Frame:
    """A frame that tells ``peer`` of an exception; ``inside`` makes its message.

    The peer must learn of the exception in any case. So parts that it would refuse are left out: first the exception
    object, then most of its text.
    """
    buffers, keep = ((), None) if encoded is None else (encoded.buffers, encoded.keep)
    frame = Frame(kind, number, pack(inside(fault)), buffers, keep)
    for most in (None, _MAX_TEXT):
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
