"""Guards a worker against peers that it does not trust, or for which it has limits. A worker that trusts its peers
without limits does not use this module.

Each kind of frame has a check, given at its registration (``Worker.on_frame``); a frame without a check is refused. A
frame that breaks a rule closes its channel. A call that exceeds a limit, or that the policy (``policy``) forbids, is
answered with an error. The values of a frame, and of the messages inside it such as notes and records, are counted
before anything is decoded.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from backhaul._rpc.calls.client import CallClient
from backhaul._rpc.calls.served_call import ServedCall
from backhaul._rpc.calls.server import NO_NOTES, CallServer
from backhaul._rpc.cluster.peers import Peer
from backhaul._rpc.security.frame_checks import excess_notes, excess_tensors, strict_payload
from backhaul._rpc.security.policy import Policy, find_internal
from backhaul._rpc.security.rate_limits import PeerUsage, RateLimits, over_limits
from backhaul._transport.base import Channel
from backhaul._wire.device_link import decline
from backhaul._wire.frames import Frame
from backhaul._wire.messages import Hello, Join, Kind, Request, unpack
from backhaul._wire.strict import restored_bytes
from backhaul._worker.frame_receiver import FrameCheck, FrameHandler, before_hello
from backhaul._worker.thread_pool import Task
from backhaul._worker.worker import Worker
from backhaul.errors import BackhaulError, LimitError, PermissionDeniedError, ProtocolError

log = logging.getLogger("backhaul")

_SEND_SECONDS = 10.0  # seconds that a reply waits for a peer to read on, before it is put aside
_MAX_ASIDE = 16 << 20  # bytes that are put aside so for one channel

_inner: dict[int, Callable[[Frame], bytes]] = {
    Kind.HELLO: lambda frame: unpack(frame.body, Hello).record,
    Kind.JOIN: lambda frame: unpack(frame.body, Join).record,
}
"""By kind of frame: the message that stands inside of its own."""


def _count(worker: Worker, frame: Frame) -> LimitError | None:
    """Why a frame is not looked at: it has too many values."""
    error = over_limits(worker.name, worker.options, frame.body, "a message")
    if error is None and (inner := _inner.get(frame.kind)) is not None:
        error = over_limits(worker.name, worker.options, inner(frame), "a record")
    return error


def guard_frames(worker: Worker, client: CallClient) -> None:
    """Let no frame of a peer through unchecked. Called after all parts have registered their handlers."""

    def guard(handler: FrameHandler, check: FrameCheck | None, channel: Channel, frame: Frame) -> Task | None:
        if channel is worker.loopback:
            return handler(channel, frame)
        peer = client.peers.of(channel)
        if frame.kind != Kind.REQUEST and (too_many := _count(worker, frame)) is not None:
            if peer is not None and frame.kind in (Kind.REPLY, Kind.FAULT):
                return client.pending.refuse(channel, frame.number, too_many)
            raise ProtocolError(str(too_many))
        if check is before_hello:
            if frame.kind != Kind.REFUSE and peer is not None:
                raise ProtocolError(f"worker '{peer.info.name}' sent a second hello")
            return handler(channel, frame)
        if peer is None or check is None:
            raise ProtocolError(f"a frame of kind {frame.kind} is not accepted here, or not before a hello")
        try:
            return handler(channel, frame) if check(worker, peer, frame) else None
        except LimitError as error:
            return client.pending.refuse(channel, frame.number, error)

    worker.receiver.guard(guard)


class UntrustedServer(CallServer):
    """Serves no more than a peer may ask for; and, where peers are not trusted, nothing but what is exposed to them."""

    def __init__(self, worker: Worker, client: CallClient) -> None:
        super().__init__(worker, client)
        self._send_timeout = _SEND_SECONDS
        self._rate_limits = RateLimits.of(worker.options)
        self._usage = PeerUsage(worker.name, self._rate_limits)
        self._policy = None if worker.options.security.trusted else Policy(worker.name, worker.options.security.allow)
        worker.counters["num_calls_in_flight"] = lambda: self._usage.calls

    def _on_request(self, channel: Channel, frame: Frame) -> Task:
        peer = self._client.peers.of(channel)
        if peer is None or channel is self._worker.loopback:
            return super()._on_request(channel, frame)
        if self._policy is not None and (channel, frame.number) in self._requests:
            raise ProtocolError(f"another call of number {frame.number}, which is under way")
        too_many = over_limits(self._worker.name, self._worker.options, frame.body, "the call")
        if too_many is not None:
            return self._turn_down(peer, channel, frame, too_many)
        request = unpack(frame.body, Request)
        error: BackhaulError | None = excess_tensors(self._worker, self._rate_limits, request.payload, "the call")
        if self._policy is not None:
            if not request.function:
                raise ProtocolError(
                    "a function by value, which this worker refuses because it does not trust its peers"
                )
            error = (
                error
                or excess_notes(self._worker, self._client.interceptors, request.notes)
                or self._count_inner(request)
            )
            if not request.left >= 0:
                raise ProtocolError(f"a call to end within {request.left} s")
            if error is None:  # what it asks for is bounded, so it may be looked at
                strict_payload(self._worker, request.payload, frame.buffers)
        try:
            if error is not None:
                raise error
            if self._policy is not None:
                self._policy.find(request.function, peer.info.name)
            # Our own calls are counted and not refused: passes that are under way must be able to end.
            must = find_internal(request.function) is not None
            nbytes = frame.nbytes + restored_bytes(request.payload.tensors)
            self._usage.take(peer.record.id, peer.info.name, nbytes, must=must)
        except (LimitError, PermissionDeniedError) as refused:
            return self._turn_down(peer, channel, frame, refused)
        task = super()._on_request(channel, frame)
        self._requests[channel, frame.number].charge = nbytes
        return task

    def _count_inner(self, request: Request) -> LimitError | None:
        """Why a call of one of our own functions is refused: the messages that it is given have too many values."""
        if find_internal(request.function) is None:
            return None
        given = (value for value in request.payload.plain or () if type(value) is bytes)
        errors = (over_limits(self._worker.name, self._worker.options, value, "an argument") for value in given)
        return next((error for error in errors if error is not None), None)

    def _turn_down(self, peer: Peer, channel: Channel, frame: Frame, error: BackhaulError) -> Task:
        answer = ServedCall(peer, channel, frame.number, self._worker.runtime.now)
        self._requests[channel, frame.number] = answer
        link = None if peer.plain else peer.link.answer(channel)  # without trust there is no shared device memory
        if link is not None:  # else the message has no slots, and is not decoded: it may exceed a limit
            decline(unpack(frame.body, Request).payload, link)
        return functools.partial(self._refuse, answer, error)

    def _refuse(self, answer: ServedCall, error: BackhaulError) -> None:
        fields = {"worker": self._worker.name, "peer": answer.peer.info.name, "call": answer.number}
        log.info("refused a call of %s: %s", answer.channel.peer, error, extra=fields)
        self._reply_fault(answer, error)

    def _find(self, name: str, answer: ServedCall) -> Callable[..., Any]:
        if self._policy is None or answer.channel is self._worker.loopback:
            return super()._find(name, answer)
        return self._policy.find(name, answer.peer.info.name)

    def _send(self, answer: ServedCall, frame: Frame, notes: Mapping[str, bytes] = NO_NOTES) -> None:
        channel = answer.channel
        if not channel.backlog:
            self._give_back(answer)  # before: who has the reply may call again at once
        try:
            super()._send(answer, frame, notes)
        finally:
            self._give_back(answer)
        if channel.backlog > _MAX_ASIDE:
            fields = {"worker": self._worker.name, "peer": answer.peer.info.name}
            log.warning("closing the channel to %s: it does not read its replies", channel.peer, extra=fields)
            channel.close()

    def _reply_with_future(self, answer: ServedCall, done: torch.futures.Future[Any]) -> None:
        super()._reply_with_future(answer, done)
        self._give_back(answer)

    def _finish(self, answer: ServedCall) -> None:
        super()._finish(answer)
        if not answer.later:  # else something goes on for it: cancelling is no way to have more of that at once
            self._give_back(answer)

    def _give_back(self, answer: ServedCall) -> None:
        charge = vars(answer).pop("charge", 0)  # at once: a call may end, and be cancelled, on two threads
        if charge:
            self._usage.give_back(answer.peer.record.id, charge)
