"""Answers monitors: the worker's side. Monitors know the cluster's secret, are no members, and can only ask.

A question is the first frame of a connection, in place of a hello. Nothing waits for a monitor: its channel belongs to
no peer, so that no shutdown, no heartbeat and no pass knows of it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading

import msgspec

from backhaul._monitoring.function_times import FunctionTimes
from backhaul._monitoring.snapshot import take_status
from backhaul._monitoring.status import MonitoringKind, Query, Record, Refused, WorkerStatus
from backhaul._rpc.node import Node
from backhaul._transport.base import Channel, ChannelClosedError
from backhaul._wire.frames import Frame
from backhaul._wire.messages import pack, unpack
from backhaul._worker.frame_receiver import before_hello
from backhaul._worker.thread_pool import Task
from backhaul.errors import ProtocolError
from backhaul.profiler.session import profile

log = logging.getLogger("backhaul")

_MAX_WATCH_SECONDS = 60.0  # for which one question makes the worker count
_MAX_RECORD_SECONDS = 60.0
_MAX_BACKLOG_BYTES = 4 << 20  # of answers that a monitor has not read
_SEND_SECONDS = 30.0  # for a monitor to read a profile


class StatusServer:
    """One worker's answers to monitors. Thread-safe.

    Attributes:
        times: Counts while a monitor watches.
    """

    def __init__(self, node: Node) -> None:
        worker = node.worker
        self._node = node
        self._worker = worker
        self._open = worker.options.security.allows_monitors
        self._started = worker.runtime.now()
        self.times = FunctionTimes(worker.runtime.now)
        self._lock = threading.Lock()  # guards the three below
        self._watched_until = 0.0
        self._watching = False
        self._recording = False
        worker.attach(self)
        worker.on_frame(MonitoringKind.QUERY, self._on_query, check=before_hello)
        worker.on_frame(MonitoringKind.RECORD, self._on_record, check=before_hello)

    # The status.

    def _on_query(self, channel: Channel, frame: Frame) -> None:
        if not self._admit(channel, frame):
            return
        query = unpack(frame.body, Query)
        if not query.watch >= 0:
            raise ProtocolError(f"a monitor that watches for {query.watch} s")
        if channel.backlog > _MAX_BACKLOG_BYTES:
            raise ProtocolError("a monitor that does not read its answers")
        self._watch(min(query.watch, _MAX_WATCH_SECONDS))
        _answer(channel, Frame(MonitoringKind.STATUS, frame.number, pack(self.status())), timeout=0)

    def status(self) -> WorkerStatus:
        """What this worker says about itself now."""
        version = getattr(sys.modules.get("backhaul"), "__version__", "")
        return take_status(self._node, self.times, self._started, version)

    def _admit(self, channel: Channel, frame: Frame) -> bool:
        if not self._open:
            reason = (
                f"worker '{self._worker.name}' answers no monitors, because it does not trust its peers; start it with "
                "Options(security=Security(monitors=True)) to allow them"
            )
            _answer(channel, Frame(MonitoringKind.REFUSED, frame.number, pack(Refused(reason))), timeout=0)
        return self._open

    def _watch(self, seconds: float) -> None:
        """Count calls of functions for so long."""
        until = self._worker.runtime.now() + seconds
        with self._lock:
            self._watched_until = max(until, self._watched_until)
            start, self._watching = seconds > 0 and not self._watching, self._watching or seconds > 0
        if start:
            self._worker.observe(self.times)
            self._worker.thread_pool.call_at(until, self._look_whether_watched)

    def _look_whether_watched(self) -> None:
        with self._lock:
            until = self._watched_until
            over = self._worker.runtime.now() >= until
            self._watching = not over
        if over:
            self._worker.stop_observing(self.times)
        else:
            self._worker.thread_pool.call_at(until, self._look_whether_watched)

    # Profiles.

    def _on_record(self, channel: Channel, frame: Frame) -> Task | None:
        if not self._admit(channel, frame):
            return None
        record = unpack(frame.body, Record)
        reason = ""
        if not 0 < record.seconds <= _MAX_RECORD_SECONDS:
            reason = f"a profile takes more than 0 and at most {_MAX_RECORD_SECONDS:g} s, not {record.seconds:g} s"
        elif not self._worker.options.security.trusted:
            reason = f"worker '{self._worker.name}' cannot profile others, because it does not trust its peers"
        with self._lock:
            if not reason and self._recording:
                reason = f"worker '{self._worker.name}' records a profile for another monitor now; try again later"
            self._recording = self._recording or not reason
        if reason:
            _answer(channel, Frame(MonitoringKind.REFUSED, frame.number, pack(Refused(reason))), timeout=0)
            return None
        return functools.partial(self._worker.run, self._record, channel, frame.number, record)

    def _record(self, channel: Channel, number: int, record: Record) -> None:
        """Profile all workers, and send the timeline."""
        try:
            recorded = profile(ops=record.ops)
            with self._worker.blocking():
                recorded.start_everywhere()
                try:
                    self._worker.runtime.one_shot().wait(record.seconds)
                finally:
                    recorded.stop()
            body = msgspec.msgpack.encode(recorded.timeline, enc_hook=repr)
            answer = Frame(MonitoringKind.TIMELINE, number, body)
        except Exception as error:
            log.exception("worker '%s' could not record a profile for a monitor", self._worker.name)
            reason = f"worker '{self._worker.name}' could not record: {type(error).__name__}: {error}"
            answer = Frame(MonitoringKind.REFUSED, number, pack(Refused(reason)))
        finally:
            with self._lock:
                self._recording = False
        with self._worker.blocking():
            _answer(channel, answer, timeout=_SEND_SECONDS)


def _answer(channel: Channel, frame: Frame, *, timeout: float) -> None:
    with contextlib.suppress(ChannelClosedError):  # the monitor is gone
        channel.send(frame, timeout=timeout)
