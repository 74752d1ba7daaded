"""A worker's eyes while profiles are open: writes down what the worker does for them, and lets the workers it calls
look on, too.

A profile is one id. It spreads with calls and gradient messages: before the first of them goes to a worker, that worker
is asked to join. What is written down stays where it is until the profiling worker collects it.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
import torch

from backhaul._rpc.cluster.peers import Peer
from backhaul._rpc.node import Node
from backhaul._runtime.observer import CallTrace, GradientKey, ServeTrace, Sessions
from backhaul._transport.base import Channel
from backhaul._worker.deadlines import deadline
from backhaul._worker.worker import current_worker
from backhaul.profiler import kineto
from backhaul.profiler.records import (
    CallRecord,
    GradientRecord,
    GroupRecord,
    PassRecord,
    Records,
    ReportRecord,
    ServeRecord,
    Share,
    StepRecord,
    WaitRecord,
    encode,
)
from backhaul.profiler.spans import during, threads_of

log = logging.getLogger("backhaul")

T = TypeVar("T")

_served: contextvars.ContextVar[tuple[Sessions, int]] = contextvars.ContextVar("backhaul_profiled", default=((), 0))
"""The profiles and the call that what runs here is done for."""

_quiet: contextvars.ContextVar[bool] = contextvars.ContextVar("backhaul_unprofiled", default=False)
_LIMIT = 1_000_000  # records of one kind that a worker keeps for a profile
_JOINING = 30.0  # seconds that a worker has to join: the first time it imports much, which a busy machine draws out


class ProfileNote(msgspec.Struct, array_like=True, frozen=True):
    """On a request: the profiles it belongs to, and the call's id."""

    sessions: Sessions
    call: int


_encode_note = msgspec.msgpack.Encoder().encode
_decode_note = msgspec.msgpack.Decoder(ProfileNote).decode


class Settings(msgspec.Struct, array_like=True, frozen=True):
    """What a profile looks at."""

    ops: bool = True
    shapes: bool = False
    memory: bool = False


class _Open:
    """A profile, on one worker that takes part."""

    def __init__(self, owner: int, parent: int, settings: Settings) -> None:
        self.owner = owner
        self.parent = parent  # who asked us to join
        self.settings = settings
        self.records = Records()
        self.joining = threading.Lock()  # held while others are asked to join
        self.joined = {owner: "", parent: ""}  # who takes part, as far as is known here, or why it did not work
        self.note = ""


class ProfileRecorder:
    """The observer of one worker. Thread-safe."""

    def __init__(self, node: Node) -> None:
        self._worker = node.worker
        self._node = node
        self.id = node.worker.info.id
        self._numbers = itertools.count(1)
        self._joining = threading.Lock()  # held until what records operations runs
        self._lock = threading.Lock()  # guards what profiles are open
        self._open: dict[int, _Open] = {}
        self._threads: dict[int, str] = {}  # those that did something for a profile
        self._own: Sessions = ()
        node.worker.attach(self)
        node.peers.on_lost(self._on_lost)
        node.worker.on_close(self._close)
        node.worker.counters["num_profiles"] = lambda: len(self._open)

    # Profiles.

    def join(self, session: int, owner: int, parent: int, settings: Settings, *, local_ops: bool = True) -> None:
        """Begin to write down what belongs to a profile. Without ``local_ops`` somebody else records operations."""
        made = _Open(owner, parent, settings)
        with self._joining:
            if session in self._open:
                return
            if settings.ops and local_ops:
                key = session, self.id
                made.note = kineto.process.hold(key, shapes=settings.shapes, memory=settings.memory)
            with self._lock:
                self._open[session] = made
                if owner == self.id:
                    self._own = (*self._own, session)
                self._worker.observer = self

    def leave(self, session: int) -> Share | None:
        """Stop; return what was written down. None if the profile was not known here."""
        with self._lock:
            threads = self._threads
            left = self._open.pop(session, None)
            self._own = tuple(each for each in self._own if each != session)
            if not self._open:
                self._worker.observer = None
                self._threads = {}
        if left is None:
            return None
        ops, problem = kineto.process.take((session, self.id))
        left.note = left.note or problem
        records = left.records
        names = {thread.native_id or 0: thread.name for thread in threading.enumerate()} | threads
        if left.owner == self.id:
            others = {number for number, name in names.items() if self._is_of_another(name)}
            ops = [op for op in ops if op.device or op.thread not in others]
        else:
            ops = list(during(ops, records, set(names)))
        return Share(
            self.id,
            self._worker.name,
            socket.gethostname(),
            os.getpid(),
            sorted(left.joined),
            {thread: names[thread] for thread in threads_of(records, ops) if thread in names},
            records,
            ops,
            left.note,
        )

    def _is_of_another(self, thread: str) -> bool:
        """Whether a thread of that name works for another worker of this process."""
        return thread.startswith("backhaul-") and not thread.startswith(f"backhaul-{self._worker.name}-")

    def failures(self, session: int) -> dict[int, str]:
        """Workers that could not be asked to join, and why."""
        found = self._open.get(session)
        return {} if found is None else {worker: why for worker, why in found.joined.items() if why}

    def _on_lost(self, peer: Peer, channel: Channel, reason: str) -> None:
        """A profile whose owner is gone is nobody's. If who brought it here is gone, its owner must know us itself."""
        lost = peer.record.id
        for session, each in list(self._open.items()):
            if lost == each.owner != self.id:
                self.drop(session)
            elif lost == each.parent != self.id:
                with _unseen():
                    known = self._node.client.call_async(each.owner, adopt, (session, self.id), None, _JOINING)
                known._when_done(functools.partial(self._hear, session))

    def _hear(self, session: int, known: Any) -> None:
        with contextlib.suppress(Exception):
            if known.value():
                return
        self.drop(session)

    def adopt(self, session: int, worker: int) -> bool:
        """At the owner: a worker takes part that nobody else may know of. Whether the profile is open."""
        found = self._open.get(session)
        if found is not None:
            found.joined.setdefault(worker, "")
        return found is not None

    def drop(self, session: int) -> None:
        """Forget a profile, and let those forget it who may know of it only from here."""
        found = self._open.get(session)
        if found is None or found.owner == self.id:
            return
        self.leave(session)
        for worker in set(found.joined) - {self.id, found.owner, found.parent}:
            with contextlib.suppress(Exception), _unseen():
                self._node.client.call_async(worker, drop, (session,), None, _JOINING)

    def _close(self) -> None:
        for session in list(self._open):
            self.leave(session)

    # What it sees; see ``observe.Observer``.

    @staticmethod
    def now() -> int:
        """The clock that torch's profiler has, too."""
        return time.time_ns()

    def sessions(self) -> Sessions:
        inherited, _ = _served.get()
        own = self._own
        if not inherited or inherited == own:
            return own
        return (*own, *(each for each in inherited if each not in own and each in self._open))

    def call(self, mode: str, label: str, callee: int) -> CallTrace | None:
        if _quiet.get():
            return None
        sessions = self.sessions()
        if not sessions:
            return None
        self.prepare(sessions, callee)
        number = self.id << 48 | next(self._numbers)
        parent = _served.get()[1]
        record = CallRecord(number, parent, mode, label, callee, self._thread(), self.now())
        self.keep(sessions, "calls", record)
        return _Call(self, sessions, record)

    def serve(self, note: bytes, caller: int, arrived: int) -> ServeTrace | None:
        begun = self.now()
        read = _decode_note(note)
        sessions = tuple(each for each in read.sessions if each in self._open)
        if not sessions:
            return None
        self._meet(sessions, caller)
        _served.set((sessions, read.call))
        record = ServeRecord(read.call, caller, self._thread(), arrived, begun)
        self.keep(sessions, "serves", record)
        return _Serve(self, record)

    @contextlib.contextmanager
    def waiting(self, inner: contextlib.AbstractContextManager[None]) -> Iterator[None]:
        sessions, start = self.sessions(), self.now()
        try:
            with inner:
                yield
        finally:
            if sessions:
                self.keep(sessions, "waits", WaitRecord(self._thread(), start, self.now(), _quiet.get()))

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        sessions, call = _served.get()
        if not call:
            yield
            return
        record = StepRecord(call, self._thread(), self.now(), 0)
        self.keep(sessions, "steps", record)
        try:
            yield
        finally:
            record.end = self.now()

    @contextlib.contextmanager
    def drive(self, sessions: Sessions, context: int, number: int) -> Iterator[None]:
        record = PassRecord(context, number, self._thread(), self.now(), 0, _served.get()[1])
        self.keep(sessions, "passes", record)
        try:
            yield
        finally:
            record.end = self.now()

    @contextlib.contextmanager
    def group(self, sessions: Sessions, key: GradientKey, sender: int, arrived: int) -> Iterator[None]:
        self._meet(sessions, sender)
        token = _served.set((sessions, _served.get()[1]))
        begun = self.now()
        record = GroupRecord(key, sender, self._thread(), arrived or begun, begun, 0)
        self.keep(sessions, "groups", record)
        try:
            yield
        finally:
            record.end = self.now()
            _served.reset(token)

    def gradient(self, sessions: Sessions, key: GradientKey, to: int, begun: int, nbytes: int) -> None:
        self.keep(sessions, "gradients", GradientRecord(key, to, self._thread(), begun, self.now(), nbytes))

    def report(self, sessions: Sessions, worker: int, *, out: bool) -> None:
        self.keep(sessions, "reports", ReportRecord(worker, self._thread(), self.now(), out))

    def prepare(self, sessions: Sessions, worker: int) -> None:
        for session in sessions:
            found = self._open.get(session)
            if found is not None and worker != self.id and worker not in found.joined:
                self._invite(session, found, [worker])

    def invite_connected(self, session: int) -> None:
        """Ask all workers that this one is connected with to join, before anything goes there."""
        found = self._open[session]
        peers = [peer.record.id for peer in self._node.peers if peer.channel is not None]
        self._invite(session, found, [worker for worker in peers if worker != self.id])

    def _invite(self, session: int, found: _Open, workers: list[int]) -> None:
        arguments = session, found.owner, self.id, found.settings
        for worker in workers:
            if self._node.peers.find(worker).plain:
                found.joined.setdefault(worker, "it takes no part in profiles: one of the two does not trust the other")
        with found.joining, _unseen():
            calls = {
                worker: self._node.client.call_async(worker, join, arguments, None, _JOINING)
                for worker in workers
                if worker not in found.joined
            }
            for worker, call in calls.items():
                try:
                    call.wait()
                    found.joined[worker] = ""
                except Exception as error:  # what was about to go there finds out by itself
                    found.joined[worker] = f"it did not join: {error}"

    def _meet(self, sessions: Sessions, worker: int) -> None:
        """Something came from there, so it takes part."""
        for session in sessions if worker >= 0 else ():
            found = self._open.get(session)
            if found is not None:
                found.joined.setdefault(worker, "")

    def keep(self, sessions: Sessions, kind: str, record: Any) -> None:
        """Write something down for some profiles."""
        for session in sessions:
            found = self._open.get(session)
            if found is not None:
                records = getattr(found.records, kind)
                if len(records) < _LIMIT:
                    records.append(record)
                else:
                    found.note = f"only the first {_LIMIT} {kind} were kept"

    def _thread(self) -> int:
        number = threading.get_native_id()
        if number not in self._threads:
            self._threads[number] = threading.current_thread().name
        return number


class _Call:
    __slots__ = ("_record", "_recorder", "_sessions")

    def __init__(self, recorder: ProfileRecorder, sessions: Sessions, record: CallRecord) -> None:
        self._recorder, self._sessions, self._record = recorder, sessions, record

    def encoded(self) -> bytes:
        self._record.encoded = self._recorder.now()
        return _encode_note(ProfileNote(self._sessions, self._record.id))

    def sent(self, nbytes: int) -> None:
        self._record.sent = self._recorder.now()
        self._record.bytes_out = nbytes

    def received(self, nbytes: int) -> None:
        self._record.received = self._recorder.now()
        self._record.bytes_in = nbytes

    def opened(self) -> None:
        self._record.opened = self._recorder.now()
        self._record.end_thread = self._recorder._thread()

    def done(self, error: BaseException | None) -> None:
        self._record.done = self._recorder.now()
        if error is not None:
            self._record.failed = type(error).__name__


class _Serve:
    __slots__ = ("_record", "_recorder")

    def __init__(self, recorder: ProfileRecorder, record: ServeRecord) -> None:
        self._recorder, self._record = recorder, record

    def decoded(self, label: str) -> None:
        self._record.label = label
        self._record.decoded = self._recorder.now()

    def ran(self) -> None:
        self._record.ran = self._recorder.now()

    def resumed(self) -> None:
        self._record.resumed = self._recorder.now()
        self._record.reply_thread = self._recorder._thread()

    def replied(self, nbytes: int) -> None:
        self._record.replied = self._recorder.now()
        self._record.nbytes = nbytes


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """Calls made inside are part of no profile and of no context, and have their own time."""
    token = _quiet.set(True)
    try:
        with torch.no_grad(), deadline(None):
            yield
    finally:
        _quiet.reset(token)


def unseen(function: Callable[..., T], *args: Any) -> T:
    """Call a function whose calls are not to be looked at."""
    with _unseen():
        return function(*args)


# What other workers call.


def join(session: int, owner: int, parent: int, settings: Settings) -> None:
    """Called by a worker that is about to send something of a profile here."""
    current_worker().part(ProfileRecorder).join(session, owner, parent, settings)


def collect(session: int) -> bytes | None:
    """Called by the worker that profiles: its share, encoded."""
    share = current_worker().part(ProfileRecorder).leave(session)
    return None if share is None else encode(share)


def adopt(session: int, worker: int) -> bool:
    """Called on the owner of a profile; see ``ProfileRecorder.adopt``."""
    return current_worker().part(ProfileRecorder).adopt(session, worker)


def drop(session: int) -> None:
    """Called by who asked us to join, if the profile is nobody's any more."""
    current_worker().part(ProfileRecorder).drop(session)


def clock() -> int:
    """The time here."""
    return time.time_ns()
