"""Outgoing calls: each is sent, waits in the table of pending calls, and ends exactly once: by its reply, by the
loss of its channel, by its deadline, by being cancelled, or by shutdown.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import torch

from backhaul._devices.links import DeviceLink, hand_over
from backhaul._rpc.arguments import keywords as keyword_arguments
from backhaul._rpc.arguments import positional
from backhaul._rpc.calls.pending import SMALL, AsyncCall, Outcome, Pending, SyncCall, check_size, discard, tell_failed
from backhaul._rpc.cluster.peers import Peer, Peers
from backhaul._rpc.futures import Future, set_result
from backhaul._rpc.interceptors import Interceptor, ReplayHook
from backhaul._rpc.security.policy import name_for
from backhaul._runtime import interrupts
from backhaul._transport.base import Channel, ChannelBrokenError, ChannelClosedError, Lost
from backhaul._wire.callables import Named, label_of, named
from backhaul._wire.codec import Encoded, encode
from backhaul._wire.device_link import decline
from backhaul._wire.frames import Frame
from backhaul._wire.messages import Cancel, Kind, Reply, Request, pack, unpack
from backhaul._worker import deadlines
from backhaul._worker.deadlines import FOREVER, CancelScope
from backhaul._worker.thread_pool import Task
from backhaul._worker.worker import Worker
from backhaul.errors import (
    BackhaulError,
    CallCancelledError,
    CallTimeoutError,
    FrameTooLargeError,
    LimitError,
    NotInitializedError,
    PeerLostError,
    SerializationError,
    UnknownWorkerError,
)

PROFILE = "profile"
"""Names the note that a profile puts on a request."""

_CANCELLED = 1024  # calls that one message cancels at most: no worker takes any number of values, see MIN_VALUES
_SHORT = 0.05  # seconds within which a nested call is not disturbed: most are over, and to be woken costs some time


Outlet = Callable[[Pending, Callable[[], None]], None]
"""What calls go out through, for tests: it sends by calling what it is given, or later, or raises
``ChannelClosedError``.
"""


class CallClient:
    """The calling half of a worker. Thread-safe."""

    def __init__(self, worker: Worker, peers: Peers) -> None:
        self.worker = worker
        self.peers = peers
        self.timeout = worker.options.timeout
        self.interceptors: list[Interceptor] = []
        self.outlet: Outlet | None = None
        self.guard: ReplayHook | None = None
        self.sent = 0  # the number of a call that was started last; no other has it
        self.served = 0  # requests ever answered
        self._numbers = itertools.count(1)
        self._pending: dict[int, Pending] = {}
        self._completing: dict[int, AsyncCall] = {}  # taken off the table, but their futures are not done
        self._lock = threading.Lock()  # guards served, cancels, retries, _busy, _check_at
        self.under_way: dict[object, object] = {}  # what may lead to calls: requests served, futures being completed
        self._busy = 0  # and other things
        self._check_at = FOREVER  # when deadlines are next looked at
        self._idle_callbacks: list[Callable[[], None]] = []
        self._closed = False
        self._itself = weakref.ref(self)  # for futures, which may outlive their worker
        self.cancels = 0  # calls that were cancelled here, for people
        self.retries = 0  # calls that were made again, likewise
        self.paused: set[Future[Any]] = set()  # of calls that are going to be made again
        self.recoveries: dict[
            int, Callable[[], bool]
        ] = {}  # by the number of a call that is being rescued: cancels that
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
        mode: str = "rpc_sync",
    ) -> Any:
        """Call and wait. ``label`` names the call in errors, if not by its function; ``mode`` is how a profile calls
        it.
        """
        worker = self.worker
        known = named(function)
        pending = SyncCall(
            self.peers.find(to),
            self.timeout if timeout is None else timeout,
            label or (label_of(function) if known is None else known.label),
        )
        limit = deadlines.current.get()
        if limit is not None:
            pending.limit = limit
        try:
            if worker.observer is None:
                self._start(pending, function, known, args, kwargs)
            else:
                self._start_observed(mode, pending, function, known, args, kwargs)
            return self._await_value(pending)
        except BaseException as error:
            if self._abandon_call(pending):  # after an interrupt of the user's: nobody waits any more
                tell_failed(pending.peer, self.interceptors, pending.notes)
            if self.guard is None or not isinstance(error, PeerLostError):
                raise
            return self.guard.recover_call(pending, error)

    def has_place_for(self, worker: str, device: torch.device) -> bool:
        """Whether results of a worker on a CUDA device of its can arrive here as they are."""
        if device.type != "cuda":
            return False
        try:
            peer = self.peers.find(worker)
        except UnknownWorkerError:
            return False  # who calls it is told so
        return peer is self.peers.own or (peer.link is not None and peer.link.takes_from(f"cuda:{device.index or 0}"))

    def repeat(self, pending: SyncCall, frame: Frame) -> Any:
        """Send a request that was kept, as a call of its own, and wait for its value."""
        self.sent = pending.number = next(self._numbers)
        pending.limit = deadlines.current.get()
        body = frame.body
        if pending.limit is not None:
            self._shorten(pending, pending.limit)
            body = pack(msgspec.structs.replace(unpack(body, Request), left=pending.timeout))
        try:
            self._launch(pending, Frame(frame.kind, pending.number, body, frame.buffers, frame.keep))
            return self._await_value(pending)
        except BaseException:
            self._abandon_call(pending)
            raise

    def _await_value(self, pending: SyncCall) -> Any:
        with self.worker.blocking():
            outcome = self._read_outcome(pending) or self._await_outcome(pending)
        return pending.read(outcome, self.worker, self.interceptors)

    def _read_outcome(self, pending: SyncCall) -> Outcome | None:
        """Read the channel ourselves until our outcome is there, if nobody else does: that saves a hand-off."""
        channel, deadline = pending.channel, pending.deadline
        assert channel is not None
        try:
            if pending.outcome is not None or not channel.acquire(pending):
                return pending.outcome
            while pending.outcome is None:
                left = None if deadline == FOREVER else deadline - self.worker.runtime.now()
                if pending.limit is not None and (left is None or left > _SHORT):
                    left = _SHORT
                event = channel.receive(left)
                if event is None:
                    break
                self.worker.take_in(event)
                if isinstance(event, Lost):
                    return pending.outcome  # its tasks settle the call
            channel.release()
        except BaseException as error:
            self.recover_after_interrupt(error, pending, channel)
            raise
        return pending.outcome

    def recover_after_interrupt(self, error: BaseException, holder: object, *channels: Channel) -> None:
        """A thread that read channels, or was about to, was interrupted; see ``Channel.mend``."""
        for channel in channels:
            loss = channel.recover_after_interrupt(holder, whole=interrupts.in_wait(error))
            if loss is not None:
                self.worker.see_to(loss)  # now: what the program does next is not to be taken for a part of it

    def _await_outcome(self, pending: SyncCall) -> Outcome:
        """Somebody else reads the channel, or our time is over."""
        deadline, runtime = pending.deadline, self.worker.runtime
        pending.one_shot = one_shot = runtime.one_shot()
        left = None if deadline == FOREVER else deadline - runtime.now()
        if pending.outcome is None and pending.limit is not None and (left is None or left > 0):
            # It takes long, and may be cancelled: read on as one who can be woken.
            channel = pending.channel
            assert channel is not None
            try:
                if channel.acquire(pending):
                    self.worker.attend([channel], one_shot, left, ())
            except BaseException as error:
                self.recover_after_interrupt(error, pending, channel)
                raise
            left = None if deadline == FOREVER else deadline - runtime.now()
        if pending.outcome is None and not one_shot.wait(left):
            if self._abandon_call(pending):
                return pending.timed_out()
            one_shot.wait()  # the outcome came just now
        assert pending.outcome is not None
        return pending.outcome

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
        """Call and return a future. ``label`` and ``mode`` as for ``call``."""
        known = named(function)
        pending = AsyncCall(
            self.peers.find(to),
            self.timeout if timeout is None else timeout,
            label or (label_of(function) if known is None else known.label),
        )
        limit = deadlines.current.get()
        if limit is not None and mode != "internal":
            pending.limit = limit
        try:
            if self.worker.observer is None:
                self._start(pending, function, known, args, kwargs)
            else:
                self._start_observed(mode, pending, function, known, args, kwargs)
            pending.future._call = self._itself, pending.number
            if pending.deadline < self._check_at:
                self._watch(pending.deadline)
        except (PeerLostError, CallTimeoutError, CallCancelledError) as error:
            pending.future._call = self._itself, pending.number
            self._fail(pending, error)
            return pending.future
        except BaseException:
            if self._abandon_call(pending):  # after an interrupt of the user's: nobody gets the future
                tell_failed(pending.peer, self.interceptors, pending.notes)
            raise
        return pending.future

    def _watch(self, deadline: float) -> None:
        """Look at deadlines then, if not before."""
        with self._lock:
            sooner = deadline < self._check_at
            self._check_at = min(deadline, self._check_at)
        if sooner:
            self.worker.thread_pool.call_at(deadline, self._expire)

    def _start_observed(self, mode: str, pending: Pending, *call: Any) -> None:
        observer = self.worker.observer
        if observer is not None:
            pending.trace = observer.call(mode, pending.label, pending.peer.record.id)
        try:
            self._start(pending, *call)
        except BaseException as error:
            if pending.trace is not None:
                pending.trace.done(error)
            raise

    def _start(
        self,
        pending: Pending,
        function: Callable[..., Any] | str,
        known: Named | None,
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
    ) -> None:
        """Encode and send. On return the arguments may be changed."""
        if pending.timeout < 0:
            raise ValueError(f"timeout must not be negative, got {pending.timeout}; 0 means none")
        if not callable(function) and not isinstance(function, str):
            raise TypeError(f"only a callable can be called, not a {type(function).__name__}")
        if pending.limit is not None:
            self._shorten(pending, pending.limit)
        self.sent = pending.number = next(self._numbers)
        frame = self._encode(pending, function, known, args, kwargs)
        if self.guard is not None:
            self.guard.keep(pending, frame)
        self._launch(pending, frame)

    def _launch(self, pending: Pending, frame: Frame) -> None:
        number, peer, left = pending.number, pending.peer, pending.timeout
        limit = left or None
        if limit is not None and not pending.cut:
            # From now on: pickling the arguments was this worker's own business.
            pending.deadline = self.worker.runtime.now() + left
        try:
            pending.channel = channel = peer.channel or self.peers.channel_to(peer, left or FOREVER)
            self._pending[number] = pending
            if self._closed:
                raise ChannelClosedError("this worker was shut down")
            if pending.lease is not None:
                hand_over(pending.lease, channel)
            if self.outlet is not None:
                self.outlet(pending, functools.partial(self._send_late, pending, channel, frame, limit))
            else:
                self._send(pending, channel, frame, limit)
        except ChannelClosedError as error:
            if self._pending.pop(number, None) is None:
                return  # whoever noticed the loss first has settled it
            self._look_idle()
            give_up = tell_failed if isinstance(error, ChannelBrokenError) else discard
            give_up(peer, self.interceptors, pending.notes)
            if self._closed:
                raise NotInitializedError(f"worker '{self.worker.name}' was shut down") from None
            raise pending.lost(str(error)) from None
        except PeerLostError:
            discard(peer, self.interceptors, pending.notes)
            if pending.deadline <= self.worker.runtime.now():
                raise pending.timed_out() from None
            raise

    def _encode_linked(
        self, pending: Pending, link: DeviceLink, values: Sequence[Any], names: Sequence[str]
    ) -> Encoded:
        """As ``encode``, where there are devices."""
        peer = pending.peer
        # A request that is kept may go out again, over another channel; slots could not.
        way = link.request(peer.channel if self.guard is None else None)
        encoded = encode(values, names=names, main_shared=peer.main_shared, plain=peer.plain, link=way)
        pending.lease = encoded.lease
        link.depart()
        return encoded

    def _shorten(self, pending: Pending, limit: CancelScope) -> None:
        """A call has no more time than what it is made for."""
        if limit.root.cancelled:
            raise pending.cancelled(f" before it was sent: {limit.root.label}, for which it was, was cancelled")
        left = limit.until - self.worker.runtime.now()
        if not pending.timeout or left < pending.timeout:
            if left == FOREVER:
                return
            pending.cut, pending.timeout, pending.deadline = True, max(left, 0.0), limit.until
            if left <= 0:
                raise pending.timed_out()

    def _send_late(self, pending: Pending, *rest: Any) -> None:
        """Send a call that an outlet may have kept for some time, if somebody still waits for it."""
        if pending.number in self._pending:
            self._send(pending, *rest)
        else:
            discard(pending.peer, self.interceptors, pending.notes)

    def _send(self, pending: Pending, channel: Channel, frame: Frame, timeout: float | None) -> None:
        """Somebody waits for a ``SyncCall``. Others that follow closely on another go out together: the system call
        costs as much as all else, and lets go of the interpreter.
        """
        if pending.trace is not None:
            pending.trace.sent(frame.nbytes)
        if not isinstance(pending, AsyncCall):
            channel.send(frame, timeout=timeout)
            return
        if pending.peer.pacing.sends_at_once(self.worker.runtime.now()):
            channel.send(frame, timeout=timeout)
        else:
            channel.send_soon(frame, timeout=timeout)

    def _encode(
        self,
        pending: Pending,
        function: Callable[..., Any] | str,
        known: Named | None,
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
    ) -> Frame:
        peer = pending.peer
        values = args if type(args) is tuple else positional(args)
        named = None if kwargs is None else keyword_arguments(kwargs)
        count, keywords = len(values), bool(named)
        if named:
            values = (named, *values)
        if known is not None and not peer.plain and (peer.main_shared or not known.in_main):
            name, names = known.name, _names(False, keywords, count)
        else:
            found = known.name if known is not None and (peer.main_shared or not known.in_main) else None
            name = name_for(peer, function, found) or ""
            names = _names(not name, keywords, count)
            values = values if name else (function, *values)
        try:
            encoded = (
                encode(values, names=names, main_shared=peer.main_shared, plain=peer.plain)
                if peer.link is None
                else self._encode_linked(pending, peer.link, values, names)
            )
        except SerializationError as error:
            raise SerializationError(
                f"call to {pending.label}: {error}; nothing was sent", path=error.path, device=error.device
            ) from error.__cause__
        notes: dict[str, bytes] = {}
        for interceptor in self.interceptors:
            note, kept = interceptor.request_out(peer, encoded)
            if note is not None:
                notes[interceptor.key] = note
            if kept is not None:
                pending.kept = (*pending.kept, (interceptor, kept))
        if pending.trace is not None:
            notes[PROFILE] = pending.trace.encoded()
        if notes:
            pending.notes = notes
        left = pending.timeout
        if pending.cut:
            left = max(pending.deadline - self.worker.runtime.now(), 0.001)
        body = pack(Request(name, encoded.payload, keywords, notes, left))
        frame = Frame(Kind.REQUEST, pending.number, body, encoded.buffers, encoded.keep)
        if encoded.buffers or len(body) > SMALL or peer.plain:
            try:
                check_size(frame, peer, "call to", pending)
            except (FrameTooLargeError, LimitError):
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
        return self._settle(pending, frame)

    def refuse(self, channel: Channel, number: int, error: BackhaulError) -> Task | None:
        """The reply to a call came, but is not taken."""
        pending = self._pending.get(number)
        return self._settle(pending, error) if pending is not None and pending.channel is channel else None

    def _discard(self, channel: Channel, frame: Frame) -> None:
        peer = self.peers.of(channel)
        if frame.kind == Kind.REPLY and peer is not None:
            reply = unpack(frame.body, Reply)
            if peer.link is not None:
                decline(reply.payload, peer.link.answer(channel))
            discard(peer, self.interceptors, reply.notes)

    def _settle(self, pending: Pending, outcome: Outcome) -> Task | None:
        """End a call, if nobody was faster; return what is left to run."""
        number = pending.number
        if self._pending.pop(number, None) is None:
            return None
        if isinstance(pending, AsyncCall):
            self.under_way[pending] = pending
            self._completing[number] = pending
            return functools.partial(self.worker.context.copy().run, self._complete, pending, outcome)
        assert isinstance(pending, SyncCall)
        pending.settle(outcome)
        if self._idle_callbacks:
            self._look_idle()
        return None

    def _complete(self, pending: AsyncCall, outcome: Outcome) -> None:
        try:
            if self._completing.pop(pending.number, None) is None:
                return  # abandoned
            value = pending.read(outcome, self.worker, self.interceptors)
        except BaseException as error:
            self._fail(pending, error if isinstance(error, Exception) else pending.interrupted(error))
            if not isinstance(error, Exception):
                raise
        else:
            if pending.peer.link is not None:
                pending.future._note_streams()
            set_result(pending.future, value)
        finally:
            self.under_way.pop(pending, None)
            if self._idle_callbacks:
                self._look_idle()

    def _fail(self, pending: AsyncCall, error: Exception) -> None:
        guard = self.guard
        if (
            guard is None
            or not isinstance(error, PeerLostError)
            or not guard.rescue_later(pending, error, pending.future)
        ):
            pending.future.set_exception(error)

    def _on_lost(self, peer: Peer, channel: Channel, reason: str) -> None:
        for pending in self.pending:
            if pending.channel is channel:
                task = self._settle(pending, pending.lost(reason))
                if task is not None:
                    self.worker.thread_pool.submit(task)

    def _expire(self) -> None:
        """End the calls whose time is up, and look again when the next one's is."""
        with self._lock:
            self._check_at = FOREVER
        now = self.worker.runtime.now()
        soonest = FOREVER
        over = []
        for pending in self.pending:
            if not isinstance(pending, AsyncCall):
                continue  # its own thread watches the clock
            if pending.deadline <= now:
                task = self._settle(pending, pending.timed_out())
                if task is not None:
                    over.append(pending)
                    self.worker.thread_pool.submit(task)
            else:
                soonest = min(soonest, pending.deadline)
        self._tell_cancelled(over)
        if soonest < FOREVER:
            self._watch(soonest)

    # Cancelling.

    def cancel(self, number: int) -> bool:
        """Cancel an asynchronous call; False if it had its outcome. Once this returns, its future is done."""
        pending = self._pending.get(number)
        task = None if pending is None else self._settle(pending, pending.cancelled())
        if pending is None or task is None:
            recover_call = self.recoveries.get(number)
            return recover_call is not None and recover_call()
        with self._lock:
            self.cancels += 1
        self._tell_cancelled([pending])
        task()
        return True

    def cancel_within(self, roots: Collection[CancelScope]) -> None:
        """Cancel all calls that were made within these limits."""
        over = []
        for pending in self.pending:
            limit = pending.limit
            if limit is None or limit.root not in roots:
                continue
            task = self._settle(pending, pending.cancelled(f", as was {limit.root.label}, for which it was"))
            if task is not None:
                self.worker.thread_pool.submit(task)
            elif not isinstance(pending, SyncCall) or not isinstance(pending.outcome, CallCancelledError):
                continue  # its outcome was faster
            over.append(pending)
        with self._lock:
            self.cancels += len(over)
        self._tell_cancelled(over)

    def count_cancel(self) -> None:
        """A call that was being rescued is cancelled."""
        with self._lock:
            self.cancels += 1

    def count_retry(self) -> None:
        """A call is made again."""
        with self._lock:
            self.retries += 1

    def _abandon_call(self, pending: Pending) -> bool:
        """Nobody waits for a call any more; False if its outcome is there."""
        if self._pending.pop(pending.number, None) is None:
            return False
        self._tell_cancelled([pending])
        self._look_idle()
        return True

    def _tell_cancelled(self, calls: Iterable[Pending]) -> None:
        """Let the workers that were called know that nobody waits."""
        by_channel: dict[Channel, list[int]] = {}
        for pending in calls:
            if pending.channel is not None:
                by_channel.setdefault(pending.channel, []).append(pending.number)
        batches = [
            (channel, numbers[start : start + _CANCELLED])
            for channel, numbers in by_channel.items()
            for start in range(0, len(numbers), _CANCELLED)
        ]
        for channel, batch in batches:
            try:
                channel.send(Frame(Kind.CANCEL, 0, pack(Cancel(tuple(batch)))), timeout=0)
            except ChannelClosedError:  # then so are they
                pass

    # Idleness.

    def begin(self) -> None:
        """Something began that may lead to calls."""
        with self._lock:
            self._busy += 1

    def end(self) -> None:
        """It is over."""
        with self._lock:
            self._busy -= 1
        if self._idle_callbacks:
            self._look_idle()

    def answered(self, request: object) -> None:
        """A request that was under way has its reply, or needs none any more."""
        if self.under_way.pop(request, None) is None:
            return
        with self._lock:
            self.served += 1
        if self._idle_callbacks:
            self._look_idle()

    def when_idle(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, as soon as no call is pending and nothing is under way."""
        self._idle_callbacks.append(callback)
        self._look_idle()

    def _look_idle(self) -> None:
        while self._idle_callbacks and not self._pending and not self._busy and not self.under_way:
            try:
                callback = self._idle_callbacks.pop(0)
            except IndexError:  # another thread took it
                return
            callback()

    def close(self) -> None:
        """Fail what is still pending."""
        self._closed = True
        error = f"worker '{self.worker.name}' was shut down while the call was under way"
        for pending in self.pending:
            task = self._settle(pending, NotInitializedError(error, worker=self.worker.name))
            if task is not None:
                task()

    def abandon(self) -> None:
        """Complete what no thread is left to complete."""
        while self.paused:
            future = self.paused.pop()
            if not future.done():
                future.set_exception(
                    NotInitializedError(f"worker '{self.worker.name}' was shut down", worker=self.worker.name)
                )
        for number in list(self._completing):
            pending = self._completing.pop(number, None)
            if pending is not None:
                pending.future.set_exception(
                    NotInitializedError(f"worker '{self.worker.name}' was shut down", worker=self.worker.name)
                )

    @property
    def pending(self) -> list[Pending]:
        """The calls under way."""
        return list(self._pending.values())


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


_names = functools.lru_cache(64)(_Names)
