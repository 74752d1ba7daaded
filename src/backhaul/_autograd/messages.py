"""The messages of distributed autograd, and the notes it puts on calls."""

from __future__ import annotations

import enum
from collections.abc import Iterator

import msgspec

from backhaul._autograd.ids import ROOTS, ContextId, MessageId
from backhaul._wire.messages import Fault, Payload, prepare
from backhaul._wire.plain import register


class AutogradKind(enum.IntEnum):
    """Kinds of frames; those below 16 are RPC's."""

    GRADIENT = 16
    REPORT = 17
    ABORT = 18
    RELEASE = 19
    KNOW = 20


class AutogradNote(msgspec.Struct, array_like=True, frozen=True):
    """On a request, a reply or a gradient message: which context it belongs to, and how it was recorded.

    ``message`` 0: nothing in it requires grad, so it was not recorded.
    """

    context: ContextId
    message: MessageId = ROOTS
    positions: tuple[int, ...] = ()  # which tensors of the message's table are recorded
    order: tuple[int, ...] = ()
    replay: int = -1  # 0: keep requests of this context; above: and record the reply under this id; see replay
    epoch: int = 0  # with replay: workers that joined later were not there when the context was entered
    anomaly: int = 0  # on a request: the level of anomaly mode at the caller


class PassSpec(msgspec.Struct, array_like=True, frozen=True):
    """What every worker must know of a pass. ``context``, ``driver`` and ``number`` name it."""

    context: ContextId
    driver: int
    number: int
    retain: bool = False
    create: bool = False
    fast: bool = False
    into_grad: bool = False
    deterministic: bool = False
    restricted: bool = False  # ``inputs`` were given: nothing but what leads to them is computed
    oldest: int = 0  # passes of this driver on this context before that one are over
    profiles: tuple[int, ...] = ()  # the profiles it belongs to
    anomaly: int = 0  # the level of anomaly mode at the driver


class PassTally(msgspec.Struct, array_like=True, frozen=True):
    """Messages that groups consumed, and all that those groups produced: message -> worker it went to."""

    consumed: tuple[int, ...] = ()
    produced: dict[int, int] = {}


class Gradient(msgspec.Struct, array_like=True, frozen=True):
    """Gradients of the tensors of ``message``; None where there is none."""

    message: MessageId
    payload: Payload
    buffers: int  # of the frame's, how many are this one's
    note: AutogradNote | None = None  # under create_graph


class Gradients(msgspec.Struct, array_like=True, frozen=True):
    """Gradients on their way to where their messages were sent from."""

    spec: PassSpec
    gradients: list[Gradient]
    tally: PassTally | None = None  # for the driver; whoever gets it passes it on


class Report(msgspec.Struct, array_like=True, frozen=True):
    """To the driver: what has been done, that ``message`` failed, or that a worker to which gradients went is
    ``lost``.
    """

    spec: PassSpec
    tally: PassTally = PassTally()
    message: int = 0
    fault: Fault | None = None
    lost: int = -1
    reason: str = ""  # why it is thought lost


_MOST = 1024  # messages in one part of a report, which is less than any worker takes


def in_parts(report: Report, most: int = _MOST) -> Iterator[Report]:
    """A report as several small ones, in the order in which they are to be heard: what was produced comes first. So no
    message counts as consumed while the driver does not know all that its group produced, and no pass ends too early.
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
    """From the driver: the pass has failed; let go of it."""

    spec: PassSpec


class Release(msgspec.Struct, array_like=True, frozen=True):
    """The context is over; forget it and tell those you know."""

    context: int


class Know(msgspec.Struct, array_like=True, frozen=True):
    """To the worker that made a context: I have it too, tell me when it is over."""

    context: int


prepare(AutogradNote, Gradients, Report, Abort, Release, Know)
register(PassSpec, PassTally)
