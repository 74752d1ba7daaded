"""Serves calls: decodes a request, runs its function with this worker current, and sends the reply.

Each request gets exactly one reply, unless it was cancelled. It counts as served after that.
"""

from __future__ import annotations

import functools
import logging
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from backhaul._devices import seam
from backhaul._rpc.calls.async_results import ASYNC_MARK, AsyncResults, Later, answers_later
from backhaul._rpc.calls.client import CallClient
from backhaul._rpc.calls.pending_call import check_size, fault_frame
from backhaul._rpc.calls.served_call import ServedCall, never_dropped_names
from backhaul._rpc.compression import LEAST_COMPRESSED
from backhaul._rpc.futures import Future
from backhaul._rpc.interceptors import PROFILE
from backhaul._rpc.security.policy import find_exposed
from backhaul._runtime import interrupts, runtime
from backhaul._runtime.observer_pair import both_traces
from backhaul._transport.base import Channel, ChannelBrokenError, ChannelClosedError
from backhaul._wire.call_frames import ReceivedRequest, encode_values, read_request, reply_frame
from backhaul._wire.callables import resolve
from backhaul._wire.faults import encode_fault
from backhaul._wire.frames import Frame
from backhaul._wire.messages import Cancel, Kind, unpack
from backhaul._worker import deadlines
from backhaul._worker.frame_receiver import checked_by_handler, fields_only
from backhaul._worker.thread_pool import Task
from backhaul._worker.worker import Worker, in_handler
from backhaul.errors import (
    CallCancelledError,
    CallTimeoutError,
    FunctionNotFoundError,
    LimitError,
    ProtocolError,
    SerializationError,
)

log = logging.getLogger("backhaul")

_RESULT = ("result",)
_NO_KEYWORDS: dict[str, Any] = {}
_LARGE_REPLY_BYTES = 1 << 18  # to send more takes longer than to let another task run meanwhile
NO_NOTES: dict[str, bytes] = {}


# Over the limit because a request passes through its methods from top to bottom: accept, decode, run, reply.
class CallServer:
    """The serving half of a worker. Thread-safe.

    Attributes:
        async_results: Runs handlers that are coroutines.
        served: How many requests were ever answered.
        dropped: How many requests had no caller that waits any more when their turn came, for people.
    """

    _send_timeout: float | None = None  # seconds that a reply waits for a peer which reads slowly

    def __init__(self, worker: Worker, client: CallClient) -> None:
        self._worker = worker
        self._client = client
        self.async_results = AsyncResults(worker)
        self._context = worker.context.copy()  # of handlers; each runs in a copy
        self._context.run(in_handler.set, True)
        self._requests: dict[tuple[Channel, int], ServedCall] = {}  # under way
        self._waiting: dict[Channel, set[int]] = {}  # by channel, the numbers of requests that wait for a thread
        self._lock = threading.Lock()  # guards served and dropped
        self.served = 0
        self.dropped = 0
        client.idleness.watch(self._requests)
        worker.on_frame(Kind.REQUEST, self._on_request, check=checked_by_handler)
        worker.on_frame(Kind.CANCEL, self._on_cancel, check=fields_only)
        worker.receiver.on_gone(self._on_gone)

    @property
    def under_way(self) -> list[ServedCall]:
        """The requests that have no reply yet."""
        return list(self._requests.values())

    def callers(self) -> set[int]:
        """The ids of the workers whose requests have no reply yet."""
        return {call.peer.record.id for call in self.under_way}

    def close(self) -> None:
        """Stop the event loop of ``async def`` handlers, if there is one."""
        self.async_results.close()

    # Requests and their cancellation.

    def _on_request(self, channel: Channel, frame: Frame) -> Task:
        worker = self._worker
        peer, observer = self._client.peers.of(channel), worker.observer
        if peer is None:
            raise ProtocolError("a request from a peer that has not said who it is")
        self._requests[channel, frame.number] = call = ServedCall(peer, channel, frame.number, worker.runtime.now)
        waiting = self._waiting.get(channel)
        if waiting is None:
            waiting = self._waiting.setdefault(channel, set())
        waiting.add(frame.number)
        call.waiting = waiting
        arrived = 0 if observer is None else observer.arrived(call)
        return functools.partial(self._context.copy().run, self._run, call, frame, arrived)

    def _on_cancel(self, channel: Channel, frame: Frame) -> Task | None:
        found = [self._requests.get((channel, number)) for number in unpack(frame.body, Cancel).numbers]
        calls = [call for call in found if call is not None]
        for call in calls:
            call.cancelled = True  # at once: requests that wait for a thread must not begin
        return functools.partial(self._worker.context.copy().run, self._cancel, calls) if calls else None

    def _on_gone(self, channel: Channel) -> Task | None:
        """Cancel what came through a channel that is gone: no reply can go back."""
        self._waiting.pop(channel, None)
        calls = [call for call in self.under_way if call.channel is channel and not call.cancelled]
        for call in calls:
            call.lose_channel()
        return functools.partial(self._worker.context.copy().run, self._cancel, calls) if calls else None

    def _cancel(self, calls: list[ServedCall]) -> None:
        """End what the handlers wait for. A handler itself cannot be ended, unless it is a coroutine."""
        calls = [call for call in calls if call.cancelled]
        self._client.cancellation.cancel_within(frozenset(calls))
        for call in calls:
            call.cancel()
            if call.later:  # its future may belong to another call, and may never be done
                self._finish(call)

    # Running.

    def _run(self, call: ServedCall, frame: Frame, arrived: int) -> None:
        waiting = self._waiting.get(call.channel)
        if waiting is not None:
            waiting.discard(call.number)
        deadlines.current.set(call)
        if not torch.is_grad_enabled():  # an earlier handler may have switched it off for this thread
            torch.set_grad_enabled(True)
        forks = runtime.forks
        try:
            function, args, kwargs = self._decode(frame, call, arrived)
            del frame
            call.function = function
            if call.trace is not None:
                call.trace.decoded(call.label)
            result = function(*args, **kwargs)
            if runtime.forks != forks:
                runtime.end_forked(None)
            in_asyncio = type(result) is types.CoroutineType
            go_on = self.async_results.pass_on((args, kwargs)) if in_asyncio else None
            del args, kwargs  # so that memory which came with the request goes back before the reply does
            if call.trace is not None:
                call.trace.ran()
            if (getattr(function, ASYNC_MARK, False) or isinstance(result, torch._C.Future)) and answers_later(
                function, result
            ):
                self._reply_later(call, result)
                return
            if go_on is not None:
                reply, fail = functools.partial(self._reply, call), functools.partial(self._reply_fault, call)
                self.async_results.run(result, go_on, reply, fail)
                return
        except BaseException as error:
            if runtime.forks != forks:
                runtime.end_forked(error)
            self._reply_fault(call, error)
            return
        self._reply(call, result)

    def _decode(
        self, frame: Frame, call: ServedCall, arrived: int
    ) -> tuple[Callable[..., Any], list[Any], dict[str, Any]]:
        request = read_request(frame)
        name, notes, peer = request.function, request.notes, call.peer
        if request.left:
            call.until = call.arrived + request.left
        if name in never_dropped_names:
            call.spare()
        elif call.cancelled or call.now() > call.until:
            raise self._drop(call, name, request)
        if PROFILE in notes and (observer := self._worker.observer) is not None:
            call.trace = both_traces(call.trace, observer.serve(notes[PROFILE], peer.record.id, arrived))
        try:
            function = self._find(name, call) if name else None
            tensors = request.tensors(peer.link.arrive(call.channel))
            if notes or request.requires_grad:
                for interceptor in self._client.interceptors.of_calls:
                    tensors, kept = interceptor.request_in(peer, notes.get(interceptor.key), tensors)
                    if kept is not None:
                        call.kept = (*call.kept, (interceptor, kept))
            values = request.values(tensors, self._worker)
            if function is None:
                function = values.pop(0)
            kwargs = values.pop(0) if request.keywords else _NO_KEYWORDS
        except BaseException as error:  # code of the user's may raise anything
            request.decline(peer.link.answer(call.channel))
            self._client.interceptors.discard(peer, notes)
            if isinstance(error, LimitError) or (
                isinstance(error, FunctionNotFoundError) and error.worker == self._worker.name
            ):
                raise
            raise SerializationError(
                f"worker '{self._worker.name}' cannot decode the call to {name or 'a function'}: "
                f"{type(error).__name__}: {error}",
                worker=self._worker.name,
            ) from error
        return function, values, kwargs

    def _drop(self, call: ServedCall, name: str, request: ReceivedRequest) -> Exception:
        """Drop a request that waited for a thread until its caller gave up. Returns the error for its reply."""
        request.decline(call.peer.link.answer(call.channel))
        name, worker, caller = name or "a function", self._worker.name, call.peer.info.name
        why = "was cancelled" if call.cancelled else "has no time left"
        if call.orphaned:
            why = "has lost its channel"
        fields = {"worker": worker, "peer": caller, "call": call.number}
        log.debug("worker '%s' does not run %s: the call of worker '%s' %s", worker, name, caller, why, extra=fields)
        with self._lock:
            self.dropped += 1
        self._client.interceptors.discard(call.peer, request.notes)
        text = f"worker '{worker}' did not run {name}: its call {why}"
        if call.cancelled:
            return CallCancelledError(text, worker=worker, function=name)
        return CallTimeoutError(text, worker=worker, function=name)

    def _find(self, name: str, call: ServedCall) -> Callable[..., Any]:
        """The function that a request names."""
        try:
            return resolve(name)
        except FunctionNotFoundError as error:
            exposed = find_exposed(name)
            if exposed is not None:
                return exposed.function
            worker = self._worker.name
            raise FunctionNotFoundError(
                f"worker '{worker}' has no function {name!r}: {error.__cause__ or error}", worker=worker, function=name
            ) from error

    # Replying.

    def _reply_later(self, call: ServedCall, result: Any) -> None:
        """Reply when the future is done that a handler returned."""
        if type(result) is Later:
            result = result.future
        if not isinstance(result, torch._C.Future):
            raise TypeError(
                f"{call.label} is marked with async_execution, so it must return a Future, "
                f"but it returned a {type(result).__name__}"
            )
        result.add_done_callback(lambda done: self._reply_with_future(call, done))
        call.later = True
        if call.cancelled:
            self._finish(call)

    def _reply_with_future(self, call: ServedCall, done: torch.futures.Future[Any]) -> None:
        error = done._error if isinstance(done, Future) else None
        if error is not None:  # not raised here: the error is the future's own, and would collect frames
            self._reply_fault(call, error)
            return
        try:
            result = done.wait()
        except BaseException as raised:
            self._reply_fault(call, raised)
        else:
            self._reply(call, result)

    def _reply(self, call: ServedCall, result: Any) -> None:
        peer = call.peer
        if call.trace is not None:
            call.trace.resumed()
        if call.cancelled:
            self._finish(call)
            return
        notes: dict[str, bytes] = {}
        try:
            link = peer.link.answer(call.channel)
            encoded = encode_values((result,), _RESULT, peer.main_shared, peer.plain, link, False)
            for interceptor, kept in call.kept:
                note = interceptor.reply_out(peer, kept, encoded)
                if note is not None:
                    notes[interceptor.key] = note
            for carrier in self._client.interceptors.of_parcels if encoded.parcels else ():
                note = carrier.note_reply(peer, encoded)
                if note is not None:
                    notes[carrier.key] = note
            frame = reply_frame(call.number, encoded, notes)
            if frame.nbytes > peer.unchecked_bytes:
                check_size(frame, peer, "the result of", call)
                if frame.nbytes > LEAST_COMPRESSED and not call.exact:
                    smaller = peer.compression.of_reply(encoded, call.function)
                    frame = frame if smaller is None else reply_frame(call.number, smaller, notes)
        except SerializationError as error:
            name = self._worker.name
            problem = SerializationError(
                f"{call.label} on worker '{name}' returned a value that cannot be sent: {error}",
                worker=name,
                path=error.path,
                device=error.device,
            )
            self._reply_fault(call, problem)
        except BaseException as error:
            self._client.interceptors.discard(peer, notes)
            self._reply_fault(call, error)
            if not isinstance(error, Exception) and not interrupts.postpone(error):
                raise  # a signal came while the program completed the future of this call
        else:
            peer.link.depart(encoded.lease, call.channel)
            self._send(call, frame, notes)

    def _reply_fault(self, call: ServedCall, error: BaseException) -> None:
        if call.trace is not None:
            call.trace.resumed()
        if call.cancelled:
            self._finish(call)
            return
        options = self._worker.options
        shown = options.security.trusted if options.security.tracebacks is None else options.security.tracebacks
        seam.streams.explain(error, self._worker.name)
        fault, encoded = encode_fault(error, self._worker.name, plain=call.peer.plain, tracebacks=shown)
        call.peer.link.depart(None, call.channel)
        self._send(call, fault_frame(call.peer, Kind.FAULT, fault, encoded, number=call.number))

    def _send(self, call: ServedCall, frame: Frame, notes: Mapping[str, bytes] = NO_NOTES) -> None:
        if call.trace is not None:
            call.trace.replied(frame.nbytes)
        if call.at_end is not None:
            call.at_end()  # before the caller has the reply
        try:
            if frame.nbytes > _LARGE_REPLY_BYTES:
                with self._worker.thread_pool.blocking():  # this thread will not need the interpreter for a while
                    call.channel.send(frame, timeout=self._send_timeout)
            elif call.waiting:  # more replies to this caller follow
                call.channel.send_soon(frame, timeout=self._send_timeout)
            else:
                call.channel.send(frame, timeout=self._send_timeout)
        except ChannelClosedError as error:
            fields = {"peer": call.peer.info.name, "call": call.number}
            log.debug("a reply was not sent: %s", error, extra=fields)  # the caller knows: its channel is gone too
            if not isinstance(error, ChannelBrokenError):  # else the reply may have arrived
                self._client.interceptors.discard(call.peer, notes)
        finally:
            if self._requests.pop((call.channel, call.number), None) is not None:
                self._count_served()

    def _finish(self, call: ServedCall) -> None:
        """End a request that was cancelled, without a reply."""
        trace, call.trace = call.trace, None
        if trace is not None:
            trace.replied(0)
        if call.at_end is not None:
            call.at_end()
        if self._requests.pop((call.channel, call.number), None) is not None:
            self._count_served()

    def _count_served(self) -> None:
        with self._lock:
            self.served += 1
        if self._client.idleness.callbacks:
            self._client.idleness.check()
