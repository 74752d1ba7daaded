"""What frames of a peer must be if this worker does not trust the peer. Parts register these checks with handlers.

A check returns False to ignore a frame. It raises ``ProtocolError`` to close the channel, ``LimitError`` to refuse the
frame. The values of a frame are counted before its check runs, see ``untrusted``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from backhaul._options import Options
from backhaul._rpc.cluster.peers import Peer
from backhaul._rpc.interceptors import Interceptors
from backhaul._rpc.security.rate_limits import RateLimits, beyond, over_limits
from backhaul._wire.frames import Frame
from backhaul._wire.memory import Buffer
from backhaul._wire.messages import Fault, Payload, Reply, unpack
from backhaul._wire.strict import check_payload, tensor_count
from backhaul._worker.worker import Worker
from backhaul.errors import LimitError, ProtocolError


def strict_payload(worker: Worker, payload: Payload, buffers: Sequence[Buffer]) -> None:
    """Raise ``ProtocolError`` unless the payload is in a plain form."""
    check_payload(payload, buffers, worker.options.limits.frame_bytes)


def check_fault(worker: Worker, peer: Peer, frame: Frame) -> bool:
    """The exception in a fault, if there is one, must be in a plain form."""
    payload = unpack(frame.body, Fault).payload
    if payload is not None:
        strict_payload(worker, payload, frame.buffers)
    return True


class ReplyCheck:
    """A reply must have known notes only, not too many tensors, and a payload in a plain form."""

    def __init__(self, options: Options, interceptors: Interceptors) -> None:
        self._rate_limits = RateLimits.of(options)
        self._interceptors = interceptors

    def __call__(self, worker: Worker, peer: Peer, frame: Frame) -> bool:
        reply = unpack(frame.body, Reply)
        too_many = excess_notes(worker, self._interceptors, reply.notes) or excess_tensors(
            worker, self._rate_limits, reply.payload, "the result"
        )
        if too_many is not None:
            raise too_many
        strict_payload(worker, reply.payload, frame.buffers)
        return True


def excess_notes(worker: Worker, interceptors: Interceptors, found: Mapping[str, bytes]) -> LimitError | None:
    """The error of notes on a call that have too many values. Raises ``ProtocolError`` if a note is not taken."""
    taken = interceptors.taken_from_untrusted
    if not found.keys() <= taken:
        raise ProtocolError(f"notes on a call that this worker does not take: {', '.join(found.keys() - taken)}")
    errors = (over_limits(worker.name, worker.options, note, "a note on the call") for note in found.values())
    return next((error for error in errors if error is not None), None)


def excess_tensors(worker: Worker, rate_limits: RateLimits, payload: Payload, what: str) -> LimitError | None:
    """The error of a payload that has too many tensors."""
    count, limit = tensor_count(payload), rate_limits.tensors
    if limit is None or count <= limit:
        return None
    return beyond(worker.name, "tensors in one message", "limits.tensors", limit, f"{what} has {count} tensors")
