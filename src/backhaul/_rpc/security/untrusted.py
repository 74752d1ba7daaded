"""What stands between a worker and peers that it does not trust, or does not trust without limit. A worker without
either has none of this in its way.

Every kind of frame has its check here or is not taken at all. A frame that breaks a rule closes its channel; a call
that asks for too much, or for what it may not have, is answered with an error. The values of a frame are counted before
anything is made of it; so are those of messages inside of it, such as notes and records.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from backhaul._rpc.calls.client import PROFILE, CallClient
from backhaul._rpc.calls.server import NO_NOTES, CallServer, ServedCall
from backhaul._rpc.cluster.peers import Peer
from backhaul._rpc.security.policy import Policy, find_internal
from backhaul._rpc.security.rate_limits import PeerUsage, RateLimits, beyond, over_limits
from backhaul._transport.base import Channel
from backhaul._wire.device_link import decline
from backhaul._wire.frames import Frame
from backhaul._wire.memory import Buffer
from backhaul._wire.messages import Fault, Hello, Join, Kind, Payload, Reply, Request, unpack
from backhaul._wire.strict import check_payload, tensor_count
from backhaul._worker.thread_pool import Task
from backhaul._worker.worker import FrameHandler, Worker
from backhaul.errors import BackhaulError, LimitError, PermissionDeniedError, ProtocolError

log = logging.getLogger("backhaul")

_PATIENCE = 10.0  # seconds that a reply waits for a peer to read on, before it is put aside
_MAX_ASIDE = 16 << 20  # bytes that are put aside so for one channel

Check = Callable[[Worker, Peer, Frame], bool]
"""Looks at a frame of a peer that is not trusted. False: leave it; ``ProtocolError``: close its channel."""

checks: dict[int, Check] = {}
"""By kind of frame; layers above add their own."""

notes = {"autograd", PROFILE}
"""Notes that may be on calls. Those of references may not: they make this worker speak for the peer."""


def strict_payload(worker: Worker, payload: Payload, buffers: Sequence[Buffer]) -> None:
    """Raise ``ProtocolError`` unless the payload is in a plain form."""
    check_payload(payload, buffers, worker.options.max_frame_bytes)


def _check_fault(worker: Worker, peer: Peer, frame: Frame) -> bool:
    payload = unpack(frame.body, Fault).payload
    if payload is not None:
        strict_payload(worker, payload, frame.buffers)
    return True


def _taken(worker: Worker, peer: Peer, frame: Frame) -> bool:
    return True  # it has nothing but what its type says


checks[Kind.FAULT] = _check_fault
for _kind in (Kind.CANCEL, Kind.BEAT, Kind.READY, Kind.COUNT, Kind.TALLY, Kind.LEAVE):
    checks[_kind] = _taken


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


def _check_notes(worker: Worker, found: dict[str, bytes]) -> LimitError | None:
    """Why the notes on a call are not read: they have too many values."""
    if not found.keys() <= notes:
        raise ProtocolError(f"notes on a call that this worker does not take: {', '.join(found.keys() - notes)}")
    errors = (over_limits(worker.name, worker.options, note, "a note on the call") for note in found.values())
    return next((error for error in errors if error is not None), None)


def guard_frames(worker: Worker, client: CallClient, quotas: RateLimits) -> None:
    """Let no frame of a peer through unchecked."""

    def check_reply(worker: Worker, peer: Peer, frame: Frame) -> bool:
        reply = unpack(frame.body, Reply)
        too_many = _check_notes(worker, reply.notes) or _too_many_tensors(worker, quotas, reply.payload, "the result")
        if too_many is not None:
            raise too_many
        strict_payload(worker, reply.payload, frame.buffers)
        return True

    def pass_on(check: Check | None, handler: FrameHandler, channel: Channel, frame: Frame) -> Task | None:
        if channel is worker.loopback:
            return handler(channel, frame)
        peer = client.peers.of(channel)
        if frame.kind != Kind.REQUEST and (too_many := _count(worker, frame)) is not None:
            if peer is not None and frame.kind in (Kind.REPLY, Kind.FAULT):
                return client.refuse(channel, frame.number, too_many)
            raise ProtocolError(str(too_many))
        if frame.kind in (Kind.HELLO, Kind.REFUSE, Kind.JOIN):
            if frame.kind != Kind.REFUSE and peer is not None:
                raise ProtocolError(f"'{peer.info.name}' says again who it is")
            return handler(channel, frame)
        if peer is None or (check is None and frame.kind != Kind.REQUEST):
            raise ProtocolError(f"a frame of kind {frame.kind}, which is not taken here, or not before a hello")
        try:
            return handler(channel, frame) if check is None or check(worker, peer, frame) else None
        except LimitError as error:
            return client.refuse(channel, frame.number, error)

    def guarded(kind: int, handler: FrameHandler) -> FrameHandler:
        return functools.partial(pass_on, check_reply if kind == Kind.REPLY else checks.get(kind), handler)

    worker.guard_frames(guarded)


def _too_many_tensors(worker: Worker, quotas: RateLimits, payload: Payload, what: str) -> LimitError | None:
    count, limit = tensor_count(payload), quotas.tensors
    if limit is None or count <= limit:
        return None
    return beyond(worker.name, "tensors in one message", "max_tensors", limit, f"{what} has {count} tensors")


class UntrustedServer(CallServer):
    """Serves no more than a peer may ask for; and, where peers are not trusted, nothing but what is exposed to them."""

    def __init__(self, worker: Worker, client: CallClient) -> None:
        super().__init__(worker, client)
        self._patience = _PATIENCE
        self._quotas = RateLimits.of(worker.options)
        self._ledger = PeerUsage(worker.name, self._quotas)
        self._policy = None if worker.options.trusted else Policy(worker.name, worker.options.allow)
        worker.counters["num_calls_in_flight"] = lambda: self._ledger.calls

    def _on_request(self, channel: Channel, frame: Frame) -> Task:
        peer = self._agent.peers.of(channel)
        if peer is None or channel is self._worker.loopback:
            return super()._on_request(channel, frame)
        if self._policy is not None and (channel, frame.number) in self._agent.under_way:
            raise ProtocolError(f"another call of number {frame.number}, which is under way")
        too_many = over_limits(self._worker.name, self._worker.options, frame.body, "the call")
        if too_many is not None:
            return self._turn_down(peer, channel, frame, too_many)
        request = unpack(frame.body, Request)
        error: BackhaulError | None = _too_many_tensors(self._worker, self._quotas, request.payload, "the call")
        if self._policy is not None:
            if not request.function:
                raise ProtocolError("a function by value, which this worker does not take (trusted=False)")
            error = error or _check_notes(self._worker, request.notes) or self._count_inner(request)
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
            self._ledger.take(peer.record.id, peer.info.name, frame.nbytes, must=must)
        except (LimitError, PermissionDeniedError) as refused:
            return self._turn_down(peer, channel, frame, refused)
        task = super()._on_request(channel, frame)
        accepted = self._agent.under_way[channel, frame.number]
        assert isinstance(accepted, ServedCall)
        accepted.charge = frame.nbytes
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
        self._agent.under_way[channel, frame.number] = answer
        if peer.link is not None and not peer.plain:  # those who do not trust each other share no device memory
            decline(unpack(frame.body, Request).payload, peer.link.answer(channel))
        return functools.partial(self._refuse, answer, error)

    def _refuse(self, answer: ServedCall, error: BackhaulError) -> None:
        log.info("refused a call of %s: %s", answer.channel.peer, error)
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
            log.warning("closing the channel to %s: it does not read its replies", channel.peer)
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
            self._ledger.give_back(answer.peer.record.id, charge)
