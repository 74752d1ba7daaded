"""The observer of a worker while profiles are open: turns what the worker does into records.

Which profiles are open, and which workers take part in them, is in ``open_profiles``.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import time
from collections.abc import Iterator

import msgspec

from backhaul._rpc.node import Node
from backhaul._runtime.observer import ArrivedCall, CallTrace, GradientKey, ServeTrace, Sessions
from backhaul.profiler.open_profiles import OpenProfiles, unprofiled
from backhaul.profiler.records import (
    CallRecord,
    GradientRecord,
    GroupRecord,
    PassRecord,
    ReportRecord,
    ServeRecord,
    StepRecord,
    WaitRecord,
)

_served: contextvars.ContextVar[tuple[Sessions, int]] = contextvars.ContextVar("backhaul_profiled", default=((), 0))
"""The profiles, and the id of the call, that the current code runs for."""


class ProfileNote(msgspec.Struct, array_like=True, frozen=True):
    """Travels with a request: the profiles that it belongs to, and the id of the call."""

    sessions: Sessions
    call: int


_encode_note = msgspec.msgpack.Encoder().encode
_decode_note = msgspec.msgpack.Decoder(ProfileNote).decode


class ProfileRecorder:
    """Implements ``Observer`` for one worker. Thread-safe."""

    def __init__(self, node: Node) -> None:
        self._open = OpenProfiles(node, self)
        self._numbers = itertools.count(1)

    @staticmethod
    def now() -> int:
        """Return the time on the clock that torch's profiler uses."""
        return time.time_ns()

    def arrived(self, call: ArrivedCall) -> int:
        """Return the time. Whether the call belongs to a profile is in its note, see ``serve``."""
        return time.time_ns()

    def sessions(self) -> Sessions:
        inherited, _ = _served.get()
        own = self._open.own
        if not inherited or inherited == own:
            return own
        return (*own, *(each for each in inherited if each not in own and each in self._open))

    # Calls.

    def call(self, mode: str, label: str, callee: int) -> CallTrace | None:
        if unprofiled.get():
            return None
        sessions = self.sessions()
        if not sessions:
            return None
        self._open.invite(sessions, callee)
        number = self._open.id << 48 | next(self._numbers)
        record = CallRecord(number, _served.get()[1], mode, label, callee, self._open.thread(), self.now())
        self._open.keep(sessions, "calls", record)
        return _CallRecorder(self._open, sessions, record)

    def serve(self, note: bytes, caller: int, arrived: int) -> ServeTrace | None:
        begun = self.now()
        read = _decode_note(note)
        sessions = tuple(each for each in read.sessions if each in self._open)
        if not sessions:
            return None
        self._open.note_member(sessions, caller)
        _served.set((sessions, read.call))
        record = ServeRecord(read.call, caller, self._open.thread(), arrived, begun)
        self._open.keep(sessions, "serves", record)
        return _ServeRecorder(self._open, record)

    @contextlib.contextmanager
    def waiting(self, inner: contextlib.AbstractContextManager[None]) -> Iterator[None]:
        sessions, start = self.sessions(), self.now()
        try:
            with inner:
                yield
        finally:
            if sessions:
                record = WaitRecord(self._open.thread(), start, self.now(), unprofiled.get())
                self._open.keep(sessions, "waits", record)

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        sessions, call = _served.get()
        if not call:
            yield
            return
        record = StepRecord(call, self._open.thread(), self.now(), 0)
        self._open.keep(sessions, "steps", record)
        try:
            yield
        finally:
            record.end = self.now()

    # Backward passes.

    @contextlib.contextmanager
    def drive(self, sessions: Sessions, context: int, number: int) -> Iterator[None]:
        record = PassRecord(context, number, self._open.thread(), self.now(), 0, _served.get()[1])
        self._open.keep(sessions, "passes", record)
        try:
            yield
        finally:
            record.end = self.now()

    @contextlib.contextmanager
    def group(self, sessions: Sessions, key: GradientKey, sender: int, arrived: int) -> Iterator[None]:
        self._open.note_member(sessions, sender)
        token = _served.set((sessions, _served.get()[1]))
        begun = self.now()
        record = GroupRecord(key, sender, self._open.thread(), arrived or begun, begun, 0)
        self._open.keep(sessions, "groups", record)
        try:
            yield
        finally:
            record.end = self.now()
            _served.reset(token)

    def gradient(self, sessions: Sessions, key: GradientKey, to: int, begun: int, nbytes: int) -> None:
        record = GradientRecord(key, to, self._open.thread(), begun, self.now(), nbytes)
        self._open.keep(sessions, "gradients", record)

    def report(self, sessions: Sessions, worker: int, *, out: bool) -> None:
        self._open.keep(sessions, "reports", ReportRecord(worker, self._open.thread(), self.now(), out))

    def prepare(self, sessions: Sessions, worker: int) -> None:
        self._open.invite(sessions, worker)


class _CallRecorder:
    """Implements ``CallTrace``: fills in the record of one call at its caller."""

    __slots__ = ("_open", "_record", "_sessions")

    def __init__(self, profiles: OpenProfiles, sessions: Sessions, record: CallRecord) -> None:
        self._open, self._sessions, self._record = profiles, sessions, record

    def encoded(self) -> bytes:
        self._record.encoded = time.time_ns()
        return _encode_note(ProfileNote(self._sessions, self._record.id))

    def sent(self, nbytes: int) -> None:
        self._record.sent = time.time_ns()
        self._record.bytes_out = nbytes

    def received(self, nbytes: int) -> None:
        self._record.received = time.time_ns()
        self._record.bytes_in = nbytes

    def opened(self) -> None:
        self._record.opened = time.time_ns()
        self._record.end_thread = self._open.thread()

    def done(self, error: BaseException | None) -> None:
        self._record.done = time.time_ns()
        if error is not None:
            self._record.failed = type(error).__name__


class _ServeRecorder:
    """Implements ``ServeTrace``: fills in the record of one call at the worker that serves it."""

    __slots__ = ("_open", "_record")

    def __init__(self, profiles: OpenProfiles, record: ServeRecord) -> None:
        self._open, self._record = profiles, record

    def decoded(self, label: str) -> None:
        self._record.label = label
        self._record.decoded = time.time_ns()

    def ran(self) -> None:
        self._record.ran = time.time_ns()

    def resumed(self) -> None:
        self._record.resumed = time.time_ns()
        self._record.reply_thread = self._open.thread()

    def replied(self, nbytes: int) -> None:
        self._record.replied = time.time_ns()
        self._record.nbytes = nbytes
