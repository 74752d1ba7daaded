"""What passes send besides gradients: reports, errors and aborts. Frames go to workers that may be gone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from backhaul._autograd.backward import pass_errors
from backhaul._autograd.container import Container
from backhaul._autograd.context import Context
from backhaul._autograd.forward.recording import enter, leave
from backhaul._autograd.ids import NO_CONTEXT, MessageId
from backhaul._autograd.messages import Abort, AutogradKind, PassSpec, Report, in_parts
from backhaul._devices import seam
from backhaul._rpc.calls.client import CallClient
from backhaul._rpc.calls.pending_call import fault_frame
from backhaul._rpc.futures import Future
from backhaul._transport.base import Channel, ChannelClosedError
from backhaul._wire.faults import encode_fault
from backhaul._wire.frames import Frame
from backhaul._wire.messages import pack
from backhaul._worker import deadlines
from backhaul._worker.worker import Worker
from backhaul.errors import BackhaulError, ForeignGraphError, UnknownWorkerError

log = logging.getLogger("backhaul")

T = TypeVar("T")


class PassMessenger:
    """Of one worker. Thread-safe."""

    def __init__(self, worker: Worker, client: CallClient, container: Container) -> None:
        self._worker = worker
        self._id = worker.info.id
        self._client = client
        self._container = container

    def name_of(self, worker: int) -> str:
        """The name of a worker; of this one for -1."""
        if worker < 0:
            return self._worker.name
        peer = self._client.peers.with_id(worker)
        return f"{worker}" if peer is None else peer.info.name

    def channels_of(self, worker: int) -> Sequence[Channel]:
        """The channels to a worker; none if it is gone."""
        peer = self._client.peers.with_id(worker)
        return () if peer is None else peer.channels

    def call(self, worker: int, function: Callable[..., T], *args: Any, timeout: float | None = None) -> T:
        """Call one of our own functions on a worker, outside any context."""
        token = enter(None)
        try:
            with deadlines.deadline(None):
                return self._client.call_async(worker, function, args, None, timeout, mode="internal").wait()  # type: ignore[no-any-return]
        finally:
            leave(token)

    def ask(self, worker: int, function: Callable[..., T], *args: Any) -> Future[T]:
        """As ``call``, without waiting. The call ends when the other worker answers, or with a lost channel."""
        token = enter(None)
        try:
            return self._client.call_async(worker, function, args, None, 0, mode="internal")
        finally:
            leave(token)

    def hint(self, worker: int, frame: Frame, *, soon: bool = False) -> None:
        """Send a frame through every channel to a worker; never blocks. ``soon``: as for ``send_hint``.

        A worker that has lost a channel asks by itself, see ``peer_failure`` and ``record_lifetimes``. A worker with
        several channels may have lost any of them, and asked through another.
        """
        for channel in self.channels_of(worker):
            self.send_hint(worker, channel, frame, soon=soon)

    @staticmethod
    def send_hint(worker: int, channel: Channel, frame: Frame, *, soon: bool = False) -> bool:
        """Send a frame without blocking; False if the channel is closed. ``soon``: nobody waits for the frame, so it
        may go together with others.
        """
        try:
            if soon:
                channel.send_soon(frame, timeout=0)
            else:
                channel.send(frame, timeout=0)
        except ChannelClosedError as error:
            log.debug("worker %d was not told: %s", worker, error)
            return False
        return True

    def post(self, worker: int, frame: Frame) -> bool:
        """Send a frame to a worker that may be gone; False if this worker cannot reach it. May block to connect."""
        try:
            peer = self._client.peers.find(worker)
            channel = peer.channel or self._client.peers.channel_to(peer, self._worker.options.connect_timeout)
            channel.send(frame, timeout=0)
        except (ChannelClosedError, BackhaulError) as error:
            log.debug("worker %d was not told: %s", worker, error)
            return isinstance(error, ChannelClosedError)  # there was a channel, and its loss will be noticed
        return True

    def report(self, report: Report) -> None:
        """Send a report to the driver of a pass, which may be gone."""
        driver = report.spec.driver
        for part in in_parts(report) if driver in self._client.peers.plain else (report,):
            self.post(driver, Frame(AutogradKind.REPORT, 0, pack(part)))

    def abort(self, spec: PassSpec, workers: Iterable[int]) -> None:
        """Tell workers that a pass is over before its end; never blocks."""
        for worker in set(workers) - {self._id}:
            self.hint(worker, Frame(AutogradKind.ABORT, 0, pack(Abort(spec))))

    def complaint(self, spec: PassSpec, source: MessageId, error: BaseException) -> Frame | None:
        """The frame that tells the driver of a pass what went wrong here; None if there is nobody to tell."""
        name, options = self._worker.name, self._worker.options
        pass_errors.add_place(error, spec, source, name)
        if spec.driver == self._id:
            return None
        shown = options.security.trusted if options.security.tracebacks is None else options.security.tracebacks
        plain = spec.driver in self._client.peers.plain
        seam.streams.explain(error, name)
        fault, encoded = encode_fault(error, name, plain=plain, tracebacks=shown)
        try:
            driver = self._client.peers.find(spec.driver)
        except UnknownWorkerError:  # it is gone
            return None
        return fault_frame(
            driver, AutogradKind.REPORT, fault, encoded, inside=lambda fault: Report(spec, message=source, fault=fault)
        )

    def foreign_graph(self, context: Context, found: pass_errors.ForeignGraph) -> ForeignGraphError:
        """The error for a gradient that would have to leave its context."""
        origin = found.recv.context
        released = origin != NO_CONTEXT and self._container.find(origin) is None
        return pass_errors.foreign_graph(found, context, self._worker.name, self.name_of, released=released)
