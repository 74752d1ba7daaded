"""Outgoing calls: each is sent, waits in the table of pending calls, and ends exactly once: by its reply, by the
loss of its channel, by its deadline, or by shutdown.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from backhaul.crew import Task
from backhaul.errors import (
    BackhaulError,
    CallTimeoutError,
    FrameTooLargeError,
    NotInitializedError,
    PeerLostError,
    SerializationError,
)
from backhaul.observe import CallTrace
from backhaul.rpc.futures import Future
from backhaul.rpc.intercept import Interceptor
from backhaul.rpc.peers import Peer, Peers
from backhaul.rpc.policy import name_for
from backhaul.runtime import Gate
from backhaul.transport.base import Channel, ChannelBrokenError, ChannelClosedError, Lost
from backhaul.wire.callables import label_of, name_of
from backhaul.wire.codec import encode, load, tensors_of
from backhaul.wire.faults import decode_fault
from backhaul.wire.frames import Frame
from backhaul.wire.messages import Fault, Kind, Reply, Request, pack, unpack
from backhaul.worker import Worker

_FOREVER = float("inf")
PROFILE = "profile"
"""Names the note that a profile puts on a request."""

_CLOSELY = 0.0002  # seconds between calls to one worker that make it worth to send them together
_BURST = 4  # calls that follow each other so closely before the first is held back


class Pending:
    """A call under way. Whoever takes it off the table calls ``settle``, once, with a reply frame or an exception."""

    __slots__ = ("channel", "deadline", "kept", "label", "notes", "peer", "timeout", "trace")

    def __init__(self, peer: Peer, timeout: float, label: str) -> None:
        self.peer = peer
        self.timeout = timeout
        self.label = label
        self.deadline = _FOREVER  # set when it is sent
        self.channel: Channel | None = None
        self.kept: list[tuple[Interceptor, Any]] = []
        self.notes: dict[str, bytes] = {}
        self.trace: CallTrace | None = None

    def settle(self, outcome: Frame | BackhaulError) -> Task | None:
        """Take the outcome; return what is left to run."""
        raise NotImplementedError

    def timed_out(self) -> CallTimeoutError:
        """The error of a call whose deadline has passed."""
        name = self.peer.info.name
        return CallTimeoutError(
            f"{self.label} on worker '{name}' gave no reply within {self.timeout:g} s",
            worker=name,
            function=self.label,
            timeout=self.timeout,
        )

    def discard(self, outcome: Frame) -> None:
        """A reply is not going to be used."""
        if outcome.kind == Kind.REPLY:
            discard(self.peer, [interceptor for interceptor, _ in self.kept], unpack(outcome.body, Reply).notes)

    def read(self, outcome: Frame | BackhaulError, worker: Worker) -> Any:
        """The value of an outcome, or raise what it says."""
        if self.trace is not None:
            return self._read_observed(self.trace, outcome, worker)
        return self._read(outcome, worker)

    def _read_observed(self, trace: CallTrace, outcome: Frame | BackhaulError, worker: Worker) -> Any:
        trace.opened()
        try:
            value = self._read(outcome, worker)
        except BaseException as error:
            trace.done(error)
            raise
        trace.done(None)
        return value

    def _read(self, outcome: Frame | BackhaulError, worker: Worker) -> Any:
        if not isinstance(outcome, Frame):
            raise outcome
        if outcome.kind == Kind.FAULT:
            raise decode_fault(unpack(outcome.body, Fault), outcome.buffers)
        try:
            reply = unpack(outcome.body, Reply)
            tensors = tensors_of(reply.payload, outcome.buffers)
            for interceptor, kept in self.kept:
                tensors = interceptor.reply_in(self.peer, kept, reply.notes.get(interceptor.key), tensors)
            (value,) = load(reply.payload, outcome.buffers, tensors, worker)
            return value
        except Exception as error:
            self.discard(outcome)
            raise SerializationError(
                f"the result of {self.label} from worker '{self.peer.info.name}' cannot be decoded here: "
                f"{type(error).__name__}: {error}",
                worker=self.peer.info.name,
                path="result",
            ) from error


class SyncCall(Pending):
    """A thread waits at the gate and reads the outcome itself."""

    __slots__ = ("gate", "outcome")

    def __init__(self, peer: Peer, timeout: float, label: str, gate: Gate) -> None:
        super().__init__(peer, timeout, label)
        self.gate = gate
        self.outcome: Frame | BackhaulError | None = None

    def settle(self, outcome: Frame | BackhaulError) -> Task | None:
        self.outcome = outcome
        self.gate.open()
        return None


class AsyncCall(Pending):
    """A future waits; its callbacks are the user's, so it is completed in a task."""

    __slots__ = ("future", "worker")

    def __init__(self, peer: Peer, timeout: float, label: str, worker: Worker) -> None:
        super().__init__(peer, timeout, label)
        self.worker = worker
        self.future: Future[Any] = Future()

    def settle(self, outcome: Frame | BackhaulError) -> Task | None:
        return lambda: self._complete(outcome)

    def _complete(self, outcome: Frame | BackhaulError) -> None:
        try:
            value = self.read(outcome, self.worker)
        except Exception as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(value)


Outlet = Callable[[Pending, Callable[[], None]], None]
"""What calls go out through, for tests: it sends by calling what it is given, or later, or raises
``ChannelClosedError``.
"""


class Agent:
    """The calling half of a worker. Thread-safe."""

    def __init__(self, worker: Worker, peers: Peers) -> None:
        self.worker = worker
        self.peers = peers
        self.timeout = worker.options.timeout
        self.interceptors: list[Interceptor] = []
        self.outlet: Outlet | None = None
        self.sent = 0  # calls ever started
        self._numbers = itertools.count(1)
        self._pending: dict[int, Pending] = {}
        self._completing: dict[int, Pending] = {}  # taken off the table, but their futures are not done
        self._lock = threading.Lock()  # guards sent, _busy, _check_at
        self._busy = 0  # things under way that may lead to calls: requests served, futures being completed
        self._check_at = _FOREVER  # when deadlines are next looked at
        self._idle_callbacks: list[Callable[[], None]] = []
        self._closed = False
        worker.on_frame(Kind.REPLY, self._on_reply)
        worker.on_frame(Kind.FAULT, self._on_reply)
        peers.on_lost(self._on_lost)

    # Calls.

    def call(
        self,
        to: Any,
        function: Callable[..., Any] | str,
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        timeout: float | None,
        *,
        label: str | None = None,
    ) -> Any:
        """Call and wait. ``label`` names the call in errors, if not by its function."""
        pending = SyncCall(*self._prepare(to, timeout), label or label_of(function), self.worker.runtime.gate())
        if self.worker.observer is None:
            number = self._start(pending, function, args, kwargs)
        else:
            number = self._start_observed("rpc_sync", pending, function, args, kwargs)
        with self.worker.blocking():
            arrived = self._read_reply(pending) or pending.gate.wait(self._left(pending.deadline))
        if not arrived:
            if self._pending.pop(number, None) is not None:
                self._look_idle()
                late = pending.timed_out()
                return pending.read(late, self.worker)  # raises it
            pending.gate.wait()  # the outcome came just now
        assert pending.outcome is not None
        return pending.read(pending.outcome, self.worker)

    def _left(self, deadline: float) -> float | None:
        return None if deadline == _FOREVER else deadline - self.worker.runtime.now()

    def _read_reply(self, pending: SyncCall) -> bool:
        """Read the channel ourselves until our outcome is there, if nobody else does: that saves a hand-off."""
        channel = pending.channel
        assert channel is not None
        if pending.outcome is not None or not channel.hold():
            return False
        while pending.outcome is None:
            event = channel.receive(self._left(pending.deadline))
            if event is None:
                break
            for task in self.worker.accept(event):
                self.worker.crew.submit(task)
            if isinstance(event, Lost):
                return False  # its tasks settle the call
        channel.resume()
        return pending.outcome is not None

    def call_async(
        self,
        to: Any,
        function: Callable[..., Any] | str,
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        timeout: float | None,
        *,
        label: str | None = None,
        mode: str = "rpc_async",
    ) -> Future[Any]:
        """Call and return a future. ``label`` as for ``call``; ``mode`` is how a profile calls it."""
        pending = AsyncCall(*self._prepare(to, timeout), label or label_of(function), self.worker)
        try:
            if self.worker.observer is None:
                self._start(pending, function, args, kwargs)
            else:
                self._start_observed(mode, pending, function, args, kwargs)
        except (PeerLostError, CallTimeoutError) as error:
            pending.future.set_exception(error)
            return pending.future
        if (deadline := pending.deadline) < self._check_at:
            with self._lock:
                sooner = deadline < self._check_at
                self._check_at = min(deadline, self._check_at)
            if sooner:
                self.worker.crew.call_at(deadline, self._expire)
        return pending.future

    def _prepare(self, to: Any, timeout: float | None) -> tuple[Peer, float]:
        peer = self.peers.find(to)
        timeout = self.timeout if timeout is None else timeout
        if timeout < 0:
            raise ValueError(f"timeout must not be negative, got {timeout}; 0 means none")
        return peer, timeout

    def _start_observed(self, mode: str, pending: Pending, *call: Any) -> int:
        observer = self.worker.observer
        if observer is not None:
            pending.trace = observer.call(mode, pending.label, pending.peer.record.id)
        try:
            return self._start(pending, *call)
        except BaseException as error:
            if pending.trace is not None:
                pending.trace.done(error)
            raise

    def _start(
        self,
        pending: Pending,
        function: Callable[..., Any] | str,
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
    ) -> int:
        """Encode and send. On return the arguments may be changed."""
        if not callable(function) and not isinstance(function, str):
            raise TypeError(f"only a callable can be called, not a {type(function).__name__}")
        number = next(self._numbers)
        frame = self._encode(pending, number, function, tuple(args or ()), dict(kwargs or {}))
        peer, runtime = pending.peer, self.worker.runtime
        left = pending.timeout or _FOREVER  # from now on: pickling the arguments was this worker's own business
        pending.deadline = runtime.now() + left
        try:
            pending.channel = self.peers.channel_to(peer, left)
            with self._lock:
                self.sent += 1
            self._pending[number] = pending
            if self._closed:
                raise ChannelClosedError("this worker was shut down")
            limit = None if left == _FOREVER else max(left, 0.0)
            if self.outlet is None:
                self._send(pending, frame, limit)
            else:
                self.outlet(pending, functools.partial(self._send, pending, frame, limit))
        except ChannelClosedError as error:
            self._pending.pop(number, None)
            self._look_idle()
            if not isinstance(error, ChannelBrokenError):
                discard(peer, self.interceptors, pending.notes)
            if self._closed:
                raise NotInitializedError(f"worker '{self.worker.name}' was shut down") from None
            raise _lost(pending, str(error)) from None
        except PeerLostError:
            discard(peer, self.interceptors, pending.notes)
            if pending.deadline <= runtime.now():
                raise pending.timed_out() from None
            raise
        return number

    def _send(self, pending: Pending, frame: Frame, timeout: float | None) -> None:
        """Somebody waits for a ``SyncCall``. Others that follow closely on another go out together: the system call
        costs as much as all else, and lets go of the interpreter.
        """
        channel, peer = pending.channel, pending.peer
        assert channel is not None
        if pending.trace is not None:
            pending.trace.sent(frame.nbytes)
        if not isinstance(pending, AsyncCall):
            channel.send(frame, timeout=timeout)
            return
        now = self.worker.runtime.now()
        peer.closely = peer.closely + 1 if now < peer.called_at + _CLOSELY else 0
        peer.called_at = now
        if peer.closely < _BURST or now >= peer.sent_at + _CLOSELY:
            peer.sent_at = now
            channel.send(frame, timeout=timeout)
        else:
            channel.send_soon(frame, timeout=timeout)

    def _encode(
        self,
        pending: Pending,
        number: int,
        function: Callable[..., Any] | str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Frame:
        peer = pending.peer
        shared = peer.main_shared
        name = name_of(function, main_shared=shared)
        if name is None or peer.plain:
            name = name_for(peer, function, name)
        what = f"call to {pending.label}"
        values = args
        if kwargs or not name:
            values = ((function,) if not name else ()) + ((kwargs,) if kwargs else ()) + args
        try:
            encoded = encode(
                values, names=_Names(not name, bool(kwargs), len(args)), main_shared=shared, plain=peer.plain
            )
        except SerializationError as error:
            raise SerializationError(f"{what}: {error}; nothing was sent", path=error.path) from error.__cause__
        notes = pending.notes
        for interceptor in self.interceptors:
            note, kept = interceptor.request_out(peer, encoded)
            if note is not None:
                notes[interceptor.key] = note
            pending.kept.append((interceptor, kept))
        if pending.trace is not None:
            notes[PROFILE] = pending.trace.encoded()
        request = Request(name or "", encoded.payload, bool(kwargs), notes)
        frame = Frame(Kind.REQUEST, number, pack(request), encoded.buffers, encoded.keep)
        try:
            check_size(frame, peer, what)
        except FrameTooLargeError:
            discard(peer, self.interceptors, notes)
            raise
        return frame

    # Outcomes.

    def _on_reply(self, channel: Channel, frame: Frame) -> Task | None:
        pending = self._pending.get(frame.number)
        if pending is None or pending.channel is not channel:
            self._discard(channel, frame)
            return None  # too late, or for somebody else
        if pending.trace is not None:
            pending.trace.received(frame.nbytes)
        return self._settle(frame.number, frame)

    def refuse(self, channel: Channel, number: int, error: BackhaulError) -> Task | None:
        """The reply to a call came, but is not taken."""
        pending = self._pending.get(number)
        return self._settle(number, error) if pending is not None and pending.channel is channel else None

    def _discard(self, channel: Channel, frame: Frame) -> None:
        peer = self.peers.of(channel)
        if frame.kind == Kind.REPLY and peer is not None:
            discard(peer, self.interceptors, unpack(frame.body, Reply).notes)

    def _settle(self, number: int, outcome: Frame | BackhaulError) -> Task | None:
        pending = self._pending.pop(number, None)
        if pending is None:
            return None  # somebody was faster
        task = pending.settle(outcome)
        if task is None:
            self._look_idle()
            return None
        self.begin()
        self._completing[number] = pending
        return lambda: self._finish(number, task)

    def _finish(self, number: int, task: Task) -> None:
        try:
            if self._completing.pop(number, None) is not None:
                self.worker.run(task)
        finally:
            self.end()

    def _on_lost(self, peer: Peer, channel: Channel, reason: str) -> None:
        for number, pending in list(self._pending.items()):
            if pending.channel is channel:
                task = self._settle(number, _lost(pending, reason))
                if task is not None:
                    self.worker.crew.submit(task)

    def _expire(self) -> None:
        """End the calls whose time is up, and look again when the next one's is."""
        with self._lock:
            self._check_at = _FOREVER
        now = self.worker.runtime.now()
        soonest = _FOREVER
        for number, pending in list(self._pending.items()):
            if not isinstance(pending, AsyncCall):
                continue  # its own thread watches the clock
            if pending.deadline <= now:
                task = self._settle(number, pending.timed_out())
                if task is not None:
                    self.worker.crew.submit(task)
            else:
                soonest = min(soonest, pending.deadline)
        if soonest < _FOREVER:
            with self._lock:
                self._check_at = min(self._check_at, soonest)
            self.worker.crew.call_at(soonest, self._expire)

    # Idleness.

    def begin(self) -> None:
        """Something began that may lead to calls."""
        with self._lock:
            self._busy += 1

    def end(self) -> None:
        """It is over."""
        with self._lock:
            self._busy -= 1
        self._look_idle()

    def when_idle(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, as soon as no call is pending and nothing is under way."""
        self._idle_callbacks.append(callback)
        self._look_idle()

    def _look_idle(self) -> None:
        if self._idle_callbacks and not self._pending and not self._busy:
            try:
                callback = self._idle_callbacks.pop()
            except IndexError:  # another thread took it
                return
            callback()

    def close(self) -> None:
        """Fail what is still pending."""
        self._closed = True
        error = f"worker '{self.worker.name}' was shut down while the call was under way"
        for number in list(self._pending):
            task = self._settle(number, NotInitializedError(error, worker=self.worker.name))
            if task is not None:
                task()

    def abandon(self) -> None:
        """Complete what no thread is left to complete."""
        for number in list(self._completing):
            pending = self._completing.pop(number, None)
            if isinstance(pending, AsyncCall):
                pending.future.set_exception(
                    NotInitializedError(f"worker '{self.worker.name}' was shut down", worker=self.worker.name)
                )

    @property
    def pending(self) -> list[Pending]:
        """The calls under way."""
        return list(self._pending.values())


def discard(peer: Peer, interceptors: Iterable[Interceptor], notes: Mapping[str, bytes]) -> None:
    """Tell those who put notes on a message that it is not going to be used."""
    for interceptor in interceptors if notes else ():
        note = notes.get(interceptor.key)
        if note is not None:
            interceptor.discard(peer, note)


def check_size(frame: Frame, peer: Peer, what: str) -> None:
    """Raise ``FrameTooLargeError`` if ``peer`` would not accept the frame."""
    if frame.nbytes > peer.record.limit:
        raise FrameTooLargeError(
            f"{what} takes {frame.nbytes} bytes; worker '{peer.info.name}' accepts {peer.record.limit} "
            "(max_frame_bytes)",
            worker=peer.info.name,
            nbytes=frame.nbytes,
            limit=peer.record.limit,
        )


def _lost(pending: Pending, reason: str) -> PeerLostError:
    name = pending.peer.info.name
    return PeerLostError(
        f"lost worker '{name}' while {pending.label} was under way there: {reason}",
        worker=name,
        reason=reason,
        function=pending.label,
    )


class _Names(Sequence[str]):
    """What to call the values of a request in an error; made on demand, since there rarely is one."""

    def __init__(self, function: bool, keywords: bool, positional: int) -> None:
        self._head = ["function"] * function + ["kwargs"] * keywords
        self._positional = positional

    def __len__(self) -> int:
        return len(self._head) + self._positional

    def __getitem__(self, index: Any) -> Any:
        if index >= len(self):
            raise IndexError(index)
        return self._head[index] if index < len(self._head) else f"args[{index - len(self._head)}]"
