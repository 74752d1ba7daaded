"""The wire format of distributed autograd: its messages, and the notes that it puts on calls."""

from __future__ import annotations

import enum
from collections.abc import Iterator

import msgspec

from backhaul._autograd.ids import ROOTS, ContextId, MessageId
from backhaul._wire.messages import Fault, Payload, prepare
from backhaul._wire.plain import register


class AutogradKind(enum.IntEnum):
    """Kinds of frames. Kinds below 16 belong to RPC."""

    GRADIENT = 16
    REPORT = 17
    ABORT = 18
    RELEASE = 19
    KNOW = 20
    DROP = 21


class AutogradNote(msgspec.Struct, array_like=True, frozen=True):
    """The note on a request, a reply or a gradient message: its context, and how it was recorded.

    ``message`` is ``ROOTS`` if no tensor of the message requires grad: then it was not recorded.
    """

    context: ContextId
    message: MessageId = ROOTS
    positions: tuple[int, ...] = ()  # indices of the recorded tensors in the message's table
    order: tuple[int, ...] = ()  # place in program order
    replay: int = -1  # 0: keep requests of this context; above 0: also record the reply under this id; see replay
    epoch: int = 0  # with replay: the epoch when the context was entered; members with a later one joined afterwards
    anomaly: int = 0  # on a request: the level of anomaly mode at the caller


class PassSpec(msgspec.Struct, array_like=True, frozen=True):
    """What every worker must know about a pass. ``context``, ``driver`` and ``number`` name the pass."""

    context: ContextId
    driver: int
    number: int
    retain: bool = False
    create: bool = False
    fast: bool = False
    into_grad: bool = False
    deterministic: bool = False
    restricted: bool = False  # ``inputs`` were given: compute only what leads to them
    oldest: int = 0  # all passes of this driver on this context with smaller numbers are over
    profiles: tuple[int, ...] = ()  # the profiles that the pass belongs to
    anomaly: int = 0  # the level of anomaly mode at the driver


class PassTally(msgspec.Struct, array_like=True, frozen=True):
    """Messages that groups consumed, and all messages that those groups produced, with the workers they went to."""

    consumed: tuple[int, ...] = ()
    produced: dict[int, int] = {}


class Gradients(msgspec.Struct, array_like=True, frozen=True):
    """Gradients for the worker that sent the messages: those of all tensors of the first message, then those of the
    second, and so on. None stands for a tensor that has none.
    """

    spec: PassSpec
    messages: list[MessageId]
    counts: list[int]  # how many of the values belong to each message
    payload: Payload
    note: AutogradNote | None = None  # under create_graph, if the gradients require grad; then there is one message
    tally: PassTally | None = None  # for the driver; the receiver passes it on


class GradientsEnvelope(msgspec.Struct, array_like=True, frozen=True):
    """``Gradients`` whose payload has not been read yet."""

    spec: PassSpec
    messages: list[MessageId]
    counts: list[int]
    payload: msgspec.Raw
    note: AutogradNote | None = None
    tally: PassTally | None = None


class Report(msgspec.Struct, array_like=True, frozen=True):
    """For the driver: what groups have done, that ``message`` failed, or that a worker that gradients were sent to is
    ``lost``.
    """

    spec: PassSpec
    tally: PassTally = PassTally()
    message: int = 0
    fault: Fault | None = None
    lost: int = -1
    reason: str = ""  # why the worker is thought to be lost


_MAX_MESSAGES = 1024  # in one part of a report; every worker accepts a frame of that size


def in_parts(report: Report, most: int = _MAX_MESSAGES) -> Iterator[Report]:
    """Split a report into small ones, in the order in which the driver must get them: produced messages come first. So
    no message counts as consumed before the driver knows all that its group produced, and no pass ends too early.
    """
    consumed, produced = report.tally.consumed, list(report.tally.produced.items())
    if len(consumed) + len(produced) <= most:
        yield report
        return
    for start in range(0, len(produced), most):
        yield Report(report.spec, PassTally(produced=dict(produced[start : start + most])))
    for start in range(0, len(consumed), most):
        yield Report(report.spec, PassTally(consumed[start : start + most]))
    if report.fault is not None or report.lost >= 0:
        yield msgspec.structs.replace(report, tally=PassTally())


class Abort(msgspec.Struct, array_like=True, frozen=True):
    """From the driver: the pass has failed; drop it."""

    spec: PassSpec


class Release(msgspec.Struct, array_like=True, frozen=True):
    """The context is over. The receiver releases it, and tells the workers that it knows."""

    context: int


class Know(msgspec.Struct, array_like=True, frozen=True):
    """To the worker that made a context: the sender has the context too, and must be told when it is over."""

    context: int


class Drop(msgspec.Struct, array_like=True, frozen=True):
    """Outside contexts: the receiver of these messages has no use for them any more. Their sender drops its records."""

    messages: list[MessageId]


prepare(AutogradNote, Gradients, GradientsEnvelope, Report, Abort, Release, Know, Drop)
register(PassSpec, PassTally)
