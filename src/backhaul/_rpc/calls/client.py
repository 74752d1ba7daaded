"""Makes calls: encodes the request, sends it, and waits for the outcome. ``PendingCalls`` knows how calls end."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch

from backhaul._rpc.calls.call_table import PendingCalls
from backhaul._rpc.calls.cancellation import Cancellation
from backhaul._rpc.calls.idleness import Idleness
from backhaul._rpc.calls.paused_calls import PausedCalls
from backhaul._rpc.calls.pending_call import AsyncCall, Pending, SyncCall
from backhaul._rpc.calls.reply_reader import ReplyReader
from backhaul._rpc.calls.request_encoder import RequestEncoder
from backhaul._rpc.calls.send_pacing import SendPacing
from backhaul._rpc.cluster.peers import Peers
from backhaul._rpc.futures import Future
from backhaul._rpc.interceptors import Interceptors, ReplayHook
from backhaul._transport.base import Channel, ChannelBrokenError, ChannelClosedError
from backhaul._wire.callables import Named, label_of, named
from backhaul._wire.frames import Frame
from backhaul._wire.messages import Request, pack, unpack
from backhaul._worker import deadlines
from backhaul._worker.deadlines import FOREVER, CancelScope
from backhaul._worker.worker import Worker
from backhaul.errors import (
    BackhaulError,
    CallCancelledError,
    CallTimeoutError,
    NotInitializedError,
    PeerLostError,
    UnknownWorkerError,
)

Outlet = Callable[[Pending, Callable[[], None]], None]
"""Replaces the sending of calls, in tests. It gets a function that sends the call; it calls it, now or later, or raises
``ChannelClosedError``.
"""


# Over the limit because it is what other layers hold: six attributes are the parts that it is made of.
class CallClient:
    """The calling half of a worker. Thread-safe.

    Attributes:
        timeout: Seconds that a call may take if it does not say.
        interceptors: Put notes on calls.
        idleness: Says when no call is under way.
        pending: The calls under way.
        cancellation: Cancels calls.
        paused: Calls that are going to be made again.
        outlet: Set by tests, see ``Outlet``.
        sent: The number of the call that was started last. No other call of this worker has it.
        before_call: Called before each call that is not internal; None: nothing is.
    """

    def __init__(self, worker: Worker, peers: Peers) -> None:
        self.worker = worker
        self.peers = peers
        self.timeout = worker.options.timeout
        self.interceptors = Interceptors()
        self.idleness = Idleness()
        self.pending = PendingCalls(worker, peers, self.idleness, self.interceptors, self._fail)
        self.cancellation = Cancellation(worker.thread_pool, self.pending)
        self.paused = PausedCalls()
        self.outlet: Outlet | None = None
        self.sent = 0
        self.before_call: Callable[[], None] | None = None
        self._replay_hook: ReplayHook | None = None
        self._requests = RequestEncoder(self.interceptors, worker.runtime.now)
        self._pacing = SendPacing()
        self._numbers = itertools.count(1)
        self._closed = False
        self._replies = ReplyReader(worker, self.pending, self.idleness, self.cancellation)
        self._calls_of_futures = weakref.ref(self._replies)  # futures may outlive their worker

    def keep_requests(self, hook: ReplayHook) -> None:
        """Let ``hook`` keep requests from now on, and recover calls whose worker is lost."""
        self._requests.keeps_requests = True
        self._replay_hook = hook

    def has_place_for(self, worker: str, device: torch.device) -> bool:
        """Whether results on a CUDA device of ``worker`` can arrive here without a copy to the host."""
        try:
            peer = self.peers.find(worker)
        except UnknownWorkerError:
            return False  # a call to that worker raises the error
        return peer.link.takes_from(device)

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
        """Call and wait. ``label`` is the call's name in errors, in place of the function's; ``mode`` is its name in
        profiles.
        """
        if self.before_call is not None:
            self.before_call()
        known = named(function)
        pending = SyncCall(
            self.peers.find(to),
            self.timeout if timeout is None else timeout,
            label or (label_of(function) if known is None else known.label),
        )
        scope = deadlines.current.get()
        if scope is not None:
            pending.scope = scope
        try:
            if self.worker.observer is None:
                self._start(pending, function, known, args, kwargs)
            else:
                self._start_observed(mode, pending, function, known, args, kwargs)
            with self.worker.thread_pool.blocking(self.worker.observer):
                outcome = self._replies.read(pending)
            return pending.read(outcome, self.worker, self.interceptors)
        except BaseException as error:
            if self.pending.give_up(pending):  # a signal interrupted this thread: nothing waits for the call any more
                self.interceptors.tell_failed(pending.peer, pending.notes)
            if self._replay_hook is None or not isinstance(error, PeerLostError):
                raise
            return self._replay_hook.recover_call(pending, error)

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
        future: Future[Any] | None = None,
    ) -> Future[Any]:
        """Call and return a future. ``label`` and ``mode`` as for ``call``; ``future``: the one to complete."""
        if self.before_call is not None and mode != "internal":
            self.before_call()
        known = named(function)
        pending = AsyncCall(
            self.peers.find(to),
            self.timeout if timeout is None else timeout,
            label or (label_of(function) if known is None else known.label),
            future,
        )
        scope = deadlines.current.get()
        if scope is not None and mode != "internal":
            pending.scope = scope
        try:
            if self.worker.observer is None:
                self._start(pending, function, known, args, kwargs)
            else:
                self._start_observed(mode, pending, function, known, args, kwargs)
            pending.future._call = self._calls_of_futures, pending.number
            if pending.deadline < self.pending.expires_at:
                self.pending.expire_at(pending.deadline)
        except (PeerLostError, CallTimeoutError, CallCancelledError) as error:
            pending.future._call = self._calls_of_futures, pending.number
            self._fail(pending, error)
            return pending.future
        except BaseException:
            if self.pending.give_up(pending):  # a signal interrupted this thread: the caller gets no future
                self.interceptors.tell_failed(pending.peer, pending.notes)
            raise
        return pending.future

    def repeat(self, pending: SyncCall, frame: Frame) -> Any:
        """Send a request that was kept, as a call of its own, and wait for its value."""
        self.sent = pending.number = next(self._numbers)
        pending.scope = deadlines.current.get()
        body = frame.body
        if pending.scope is not None:
            self._shorten(pending, pending.scope)
            body = pack(msgspec.structs.replace(unpack(body, Request), left=pending.timeout))
        try:
            self._launch(pending, Frame(frame.kind, pending.number, body, frame.buffers, frame.keep))
            with self.worker.thread_pool.blocking(self.worker.observer):
                outcome = self._replies.read(pending)
            return pending.read(outcome, self.worker, self.interceptors)
        except BaseException:
            self.pending.give_up(pending)
            raise

    # Sending.

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
        if pending.scope is not None:
            self._shorten(pending, pending.scope)
        self.sent = pending.number = next(self._numbers)
        frame = self._requests.encode(pending, function, known, args, kwargs)
        if self._replay_hook is not None:
            self._replay_hook.keep(pending, frame)
        self._launch(pending, frame)

    def _shorten(self, pending: Pending, scope: CancelScope) -> None:
        """Clamp the timeout of a call to the deadline of the handler or block that makes it."""
        if scope.root.cancelled:
            raise pending.cancelled(f" before it was sent, because its parent call {scope.root.label} was cancelled")
        left = scope.until - self.worker.runtime.now()
        if not pending.timeout or left < pending.timeout:
            if left == FOREVER:
                return
            pending.cut, pending.timeout, pending.deadline = True, max(left, 0.0), scope.until
            if left <= 0:
                raise pending.timed_out()

    def _launch(self, pending: Pending, frame: Frame) -> None:
        number, peer, left = pending.number, pending.peer, pending.timeout
        if left and not pending.cut:
            # The time begins now: encoding the arguments is not the other worker's work.
            pending.deadline = self.worker.runtime.now() + left
        try:
            pending.channel = channel = peer.channel or self.peers.channel_to(peer, left or FOREVER)
            self.pending.add(number, pending)
            if self._closed:
                raise ChannelClosedError("this worker was shut down")
            peer.link.depart(pending.lease, channel)
            if self.outlet is not None:
                self.outlet(pending, functools.partial(self._send_late, pending, channel, frame, left or None))
            elif type(pending) is SyncCall and pending.trace is None:
                channel.send(frame, timeout=left or None)
            else:
                self._send(pending, channel, frame, left or None)
        except ChannelClosedError as error:
            if self.pending.remove(number, None) is None:
                return  # the thread that noticed the loss first has settled the call
            self.idleness.check()
            if isinstance(error, ChannelBrokenError):
                self.interceptors.tell_failed(peer, pending.notes)
            else:
                self.interceptors.discard(peer, pending.notes)
            if self._closed:
                raise self._shut_down_error() from None
            raise pending.lost(str(error)) from None
        except PeerLostError:
            self.interceptors.discard(peer, pending.notes)
            own_reason = self._own_reason(pending)
            if own_reason is not None:
                raise own_reason from None
            raise

    def _own_reason(self, pending: Pending) -> BackhaulError | None:
        """Why there is no channel for a call, if that is not the other worker's fault."""
        if self._closed:  # a worker that ends opens no channels
            return self._shut_down_error()
        return pending.timed_out() if pending.deadline <= self.worker.runtime.now() else None

    def _send_late(self, pending: Pending, *rest: Any) -> None:
        """Send a call that an outlet may have kept for some time, unless the call has ended meanwhile."""
        if self.pending.find(pending.number) is not None:
            self._send(pending, *rest)
        else:
            self.interceptors.discard(pending.peer, pending.notes)

    def _send(self, pending: Pending, channel: Channel, frame: Frame, timeout: float | None) -> None:
        """Send a request: a ``SyncCall`` at once, because a thread waits for it. Asynchronous calls that follow each
        other closely go out together: the system call costs as much as all else, and releases the interpreter.
        """
        if pending.trace is not None:
            pending.trace.sent(frame.nbytes)
        if not isinstance(pending, AsyncCall):
            channel.send(frame, timeout=timeout)
            return
        now, pacing = self.worker.runtime.now(), self._pacing
        if not pacing.holds_back(now):
            channel.send(frame, timeout=timeout)
            return
        channel.send_soon(frame, timeout=timeout)
        if pacing.ends_window(now):
            self.worker.endpoint.flush()

    # The end.

    def _fail(self, pending: AsyncCall, error: Exception) -> None:
        """End an asynchronous call with an error, unless it can be recovered."""
        hook = self._replay_hook
        if (
            hook is None
            or not isinstance(error, PeerLostError)
            or not hook.recover_later(pending, error, pending.future)
        ):
            pending.future.set_exception(error)

    def close(self) -> None:
        """Send no more calls, and fail those that are pending."""
        self._closed = True
        self.pending.close()

    def abandon(self) -> None:
        """Complete the futures that no thread is left to complete."""
        self.paused.abandon(self._shut_down_error)
        self.pending.abandon(self._shut_down_error)

    def _shut_down_error(self) -> NotInitializedError:
        return NotInitializedError(f"worker '{self.worker.name}' was shut down", worker=self.worker.name)
