"""Incoming calls: decode, run with this worker current, reply. A handler that returns a future (``async_execution``) or
a coroutine frees its thread until that is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import threading
import types
import weakref
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from backhaul._devices.cuda import process
from backhaul._devices.links import DeviceLink
from backhaul._devices.stream_order import tensors_in
from backhaul._rpc.calls.client import PROFILE, CallClient
from backhaul._rpc.calls.pending import SMALL, check_size, discard, fault_frame
from backhaul._rpc.cluster.peers import Peer
from backhaul._rpc.futures import Future
from backhaul._rpc.security.policy import find_exposed
from backhaul._runtime import interrupts, runtime
from backhaul._runtime.observer import ServeTrace
from backhaul._transport.base import Channel, ChannelBrokenError, ChannelClosedError
from backhaul._wire.callables import label_of, resolve
from backhaul._wire.codec import Encoded, encode, load
from backhaul._wire.device_link import decline
from backhaul._wire.faults import encode_fault
from backhaul._wire.frames import Frame
from backhaul._wire.messages import Cancel, Kind, Reply, Request, pack, unpack
from backhaul._wire.tensors.reader import tensors_of
from backhaul._wire.tensors.subclasses import may_require_grad
from backhaul._worker import deadlines
from backhaul._worker.deadlines import CancelScope
from backhaul._worker.thread_pool import Task
from backhaul._worker.worker import Worker, observer_here, serving
from backhaul.errors import (
    CallCancelledError,
    CallTimeoutError,
    FunctionNotFoundError,
    LimitError,
    ProtocolError,
    SerializationError,
)

log = logging.getLogger("backhaul")

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
ASYNC_MARK = "_backhaul_async_execution"
_RESULT = ("result",)
_NO_KEYWORDS: dict[str, Any] = {}
NO_NOTES: dict[str, bytes] = {}

_never_dropped: set[str] = set()  # names


def async_execution(function: F) -> F:
    """Mark a function whose result is a future: the caller gets the future's value.

    The function must return a ``Future`` (or any ``torch.futures.Future``). Its thread is free for other calls while
    the future is not done. Works on functions, and innermost on static and class methods.

    Example:
        >>> import backhaul as bh, torch
        >>> @bh.async_execution
        ... def add_far_away(to, x, y):
        ...     return bh.rpc_async(to, torch.add, args=(x, y)).then(lambda done: done.value() + 1)
        >>> with bh.cluster(3):
        ...     bh.rpc_sync("worker1", add_far_away, args=("worker2", torch.ones(1), 2))
        tensor([4.])
    """
    if not callable(function):
        raise TypeError(f"async_execution marks functions, not a {type(function).__name__}; put it innermost")
    setattr(function, ASYNC_MARK, True)
    return function


def never_dropped(function: F) -> F:
    """Mark a function of a layer above that has to know of each call: it runs even if nobody waits for it any more, and
    is not cancelled when its caller is lost.
    """
    _never_dropped.add(f"{function.__module__}:{function.__qualname__}")
    return function


def answers_later(function: Any, result: Any) -> bool:
    """Whether the value of a call is that of the future which the function returned.

    A scripted function that returns a future means just that: found by name, it has lost its mark.
    """
    return getattr(function, ASYNC_MARK, False) or (
        type(function) is torch.jit.ScriptFunction and isinstance(result, torch._C.Future)
    )


def run_here(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function of the user's for a handler. If it forks, the child ends with it."""
    with runtime.UserCode():
        return function(*args, **kwargs)


def _nothing() -> None:
    """There is nothing to see to."""


class CallServer:
    """The serving half of a worker. Thread-safe."""

    _patience: float | None = None  # seconds that a reply waits for a peer which reads slowly

    def __init__(self, worker: Worker, client: CallClient) -> None:
        self._worker = worker
        self._agent = client
        self._loop = _CoroutineLoop(worker)
        self._context = worker.context.copy()  # of handlers; each runs in a copy
        self._context.run(serving.set, True)
        self._dropping = threading.Lock()  # guards dropped
        self.dropped = 0  # requests that nobody waited for any more when their turn came, for people
        worker.on_frame(Kind.REQUEST, self._on_request)
        worker.on_frame(Kind.CANCEL, self._on_cancel)
        worker.on_gone(self._on_gone)

    @property
    def served(self) -> int:
        """How many requests were ever answered."""
        return self._agent.served

    def complete(self, coroutine: Coroutine[Any, Any, Any], given: object) -> Future[Any]:
        """Run a coroutine, which was given some arguments, on the event loop of ``async def`` handlers; returns the
        future of its result.
        """
        made: Future[Any] = Future()
        go_on = self._pass_on(given)

        async def run() -> None:
            go_on()
            try:
                made.set_result(await _stepwise(coroutine))
            except BaseException as error:
                if isinstance(error, asyncio.CancelledError) and (self._worker.closed or deadlines.cancelled()):
                    what = label_of(coroutine)
                    error = CallCancelledError(f"{what} was cancelled", worker=self._worker.name, function=what)
                made.set_exception(error)

        self._loop.run(run())
        return made

    def _pass_on(self, given: object) -> Callable[[], None]:
        """The event loop is to go on with these arguments; what its thread calls first."""
        if self._worker.device_context is None:
            return _nothing
        stream_order, tensors = self._worker.device_context.stream_order, list(tensors_in(given))
        stream_order.depart()

        def go_on() -> None:
            stream_order.arrive()
            stream_order.adopt(tensors)
            tensors.clear()  # so that memory which came with a request goes back before the reply does

        return go_on

    def close(self) -> None:
        """Stop the event loop of ``async def`` handlers, if there is one."""
        self._loop.close()

    def _on_request(self, channel: Channel, frame: Frame) -> Task:
        client, worker = self._agent, self._worker
        peer, observer = client.peers.of(channel), worker.observer
        if peer is None:
            raise ProtocolError("a request from a peer that has not said who it is")
        answer = ServedCall(peer, channel, frame.number, worker.runtime.now)
        client.under_way[channel, frame.number] = answer
        arrived = 0 if observer is None else observer.now()
        return functools.partial(self._context.copy().run, self._run, answer, frame, arrived)

    def _on_cancel(self, channel: Channel, frame: Frame) -> Task | None:
        found = [self._agent.under_way.get((channel, number)) for number in unpack(frame.body, Cancel).numbers]
        answers = [answer for answer in found if isinstance(answer, ServedCall)]
        for answer in answers:
            answer.cancelled = True  # at once: those that wait for a thread are not to begin
        return functools.partial(self._worker.run, self._cancel, answers) if answers else None

    def _on_gone(self, channel: Channel) -> Task | None:
        """What came through a channel that is gone is for nobody: no reply can go back."""
        under_way = list(self._agent.under_way.values())
        answers = [a for a in under_way if isinstance(a, ServedCall) and a.channel is channel and not a.cancelled]
        for answer in answers:
            answer.orphaned = True
            answer.cancelled = not answer.spared
            if answer.spared:  # just now, see ``_spare``
                answer.cancelled = False
        return functools.partial(self._worker.run, self._cancel, answers) if answers else None

    @staticmethod
    def _spare(answer: ServedCall) -> None:
        """A request is not cancelled because its caller is lost."""
        # In this order; ``_on_gone`` does the reverse, so that whichever is last sees the other.
        answer.spared = True
        if answer.orphaned:
            answer.cancelled = False

    def _cancel(self, answers: list[ServedCall]) -> None:
        """What the handlers wait for ends; they themselves, unless in asyncio, cannot be made to."""
        answers = [answer for answer in answers if answer.cancelled]
        self._agent.cancel_within(frozenset(answers))
        for answer in answers:
            answer.cancel()
            if answer.later:  # the future may be another's, and never be done
                self._finish(answer)

    def _run(self, answer: ServedCall, frame: Frame, arrived: int) -> None:
        deadlines.current.set(answer)
        if not torch.is_grad_enabled():  # an earlier handler may have switched it off for this thread
            torch.set_grad_enabled(True)
        forks = runtime.forks
        try:
            function, args, kwargs = self._decode(frame, answer, arrived)
            del frame
            answer.function = function
            if answer.trace is not None:
                answer.trace.decoded(answer.label)
            result = function(*args, **kwargs)
            if runtime.forks != forks:
                runtime.end_forked(None)
            in_asyncio = type(result) is types.CoroutineType
            go_on = self._pass_on((args, kwargs)) if in_asyncio else _nothing
            del args, kwargs  # so that memory which came with the request goes back before the reply does
            if answer.trace is not None:
                answer.trace.ran()
            if answers_later(function, result):
                if not isinstance(result, torch._C.Future):
                    raise TypeError(
                        f"{answer.label} is marked with async_execution, so it must return a Future, "
                        f"but it returned a {type(result).__name__}"
                    )
                result.add_done_callback(lambda done: self._reply_with_future(answer, done))
                answer.later = True
                if answer.cancelled:
                    self._finish(answer)
                return
            if in_asyncio:
                self._loop.run(self._reply_with_coroutine(answer, result, go_on))
                return
        except BaseException as error:
            if runtime.forks != forks:
                runtime.end_forked(error)
            self._reply_fault(answer, error)
            return
        self._reply(answer, result)

    def _decode(
        self, frame: Frame, answer: ServedCall, arrived: int
    ) -> tuple[Callable[..., Any], list[Any], dict[str, Any]]:
        request = unpack(frame.body, Request)
        name, payload, notes, buffers = request.function, request.payload, request.notes, frame.buffers
        if request.left:
            answer.until = answer.arrived + request.left
        if name in _never_dropped:
            self._spare(answer)
        elif answer.cancelled or answer.now() > answer.until:
            raise self._drop(answer, name, request)
        if PROFILE in notes:
            observer = self._worker.observer
            if observer is not None:
                answer.trace = observer.serve(notes[PROFILE], answer.peer.record.id, arrived)
        try:
            function = self._find(name, answer) if name else None
            if answer.peer.link is None:
                tensors = tensors_of(payload, buffers)
            else:
                tensors = tensors_of(payload, buffers, answer.peer.link.arrive(answer.channel))
            if notes or may_require_grad(tensors):
                tensors = self._show(answer, notes, tensors)
            values = load(payload, buffers, tensors, self._worker)
            if function is None:
                function = values.pop(0)
            kwargs = values.pop(0) if request.keywords else _NO_KEYWORDS
        except BaseException as error:  # code of the user's may raise anything
            if answer.peer.link is not None:
                decline(payload, answer.peer.link.answer(answer.channel))
            discard(answer.peer, self._agent.interceptors, notes)
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

    def _drop(self, answer: ServedCall, name: str, request: Request) -> Exception:
        """A request has waited for a thread until nobody waited for it."""
        if answer.peer.link is not None:
            decline(request.payload, answer.peer.link.answer(answer.channel))
        name, worker, caller = name or "a function", self._worker.name, answer.peer.info.name
        why = "was cancelled" if answer.cancelled else "has no time left"
        if answer.orphaned:
            why = "has lost its channel"
        log.debug("%s does not run %s: the call of worker '%s' %s", worker, name, caller, why)
        with self._dropping:
            self.dropped += 1
        discard(answer.peer, self._agent.interceptors, request.notes)
        text = f"worker '{worker}' did not run {name}: its call {why}"
        if answer.cancelled:
            return CallCancelledError(text, worker=worker, function=name)
        return CallTimeoutError(text, worker=worker, function=name)

    def _find(self, name: str, answer: ServedCall) -> Callable[..., Any]:
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

    def _show(self, answer: ServedCall, notes: Mapping[str, bytes], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Show a request to those who put notes on it, or replace its tensors; returns the tensors to use."""
        for interceptor in self._agent.interceptors:
            tensors, kept = interceptor.request_in(answer.peer, notes.get(interceptor.key), tensors)
            if kept is not None:
                answer.kept = {**answer.kept, interceptor.key: kept}
        return tensors

    # Replies. Each request gets exactly one, unless it was cancelled, and is counted as served after that.

    def _reply_with_future(self, answer: ServedCall, done: torch.futures.Future[Any]) -> None:
        error = done._error if isinstance(done, Future) else None
        if error is not None:  # not raised here: it is the future's own, and would collect frames
            self._reply_fault(answer, error)
            return
        try:
            result = done.wait()
        except BaseException as raised:
            self._reply_fault(answer, raised)
        else:
            self._reply(answer, result)

    async def _reply_with_coroutine(
        self, answer: ServedCall, coroutine: Coroutine[Any, Any, Any], go_on: Callable[[], None]
    ) -> None:
        go_on()
        try:
            result = await _stepwise(coroutine)
        except BaseException as error:
            self._reply_fault(answer, error)
        else:
            self._reply(answer, result)

    def _reply(self, answer: ServedCall, result: Any) -> None:
        peer = answer.peer
        if answer.trace is not None:
            answer.trace.resumed()
        if answer.cancelled:
            self._finish(answer)
            return
        notes: dict[str, bytes] = {}
        try:
            encoded = (
                encode((result,), names=_RESULT, main_shared=peer.main_shared, plain=peer.plain)
                if peer.link is None
                else self._encode_linked(answer, peer.link, result)
            )
            if answer.kept or encoded.parcels:
                for interceptor in self._agent.interceptors:
                    note = interceptor.reply_out(peer, answer.kept.get(interceptor.key), encoded)
                    if note is not None:
                        notes[interceptor.key] = note
            body = pack(Reply(encoded.payload, notes))
            frame = Frame(Kind.REPLY, answer.number, body, encoded.buffers, encoded.keep)
            if encoded.buffers or len(body) > SMALL or peer.plain:
                check_size(frame, peer, "the result of", answer)
        except SerializationError as error:
            name = self._worker.name
            problem = SerializationError(
                f"{answer.label} on worker '{name}' returned what cannot travel: {error}",
                worker=name,
                path=error.path,
                device=error.device,
            )
            self._reply_fault(answer, problem)
        except BaseException as error:
            discard(peer, self._agent.interceptors, notes)
            self._reply_fault(answer, error)
            if not isinstance(error, Exception) and not interrupts.postpone(error):
                raise  # a signal came while the program completed the future of this call
        else:
            if encoded.lease is not None:
                encoded.lease.sent = True
            self._send(answer, frame, notes)

    @staticmethod
    def _encode_linked(answer: ServedCall, link: DeviceLink, result: Any) -> Encoded:
        """As ``encode``, where there are devices."""
        peer, way = answer.peer, link.answer(answer.channel)
        encoded = encode((result,), names=_RESULT, main_shared=peer.main_shared, plain=peer.plain, link=way)
        link.depart()
        return encoded

    def _reply_fault(self, answer: ServedCall, error: BaseException) -> None:
        if answer.trace is not None:
            answer.trace.resumed()
        if answer.cancelled:
            self._finish(answer)
            return
        options = self._worker.options
        shown = options.trusted if options.tracebacks is None else options.tracebacks
        process.judge(error, self._worker.name)
        fault, encoded = encode_fault(error, self._worker.name, plain=answer.peer.plain, tracebacks=shown)
        if answer.peer.link is not None:
            answer.peer.link.depart()
        self._send(answer, fault_frame(answer.peer, Kind.FAULT, fault, encoded, number=answer.number))

    def _send(self, answer: ServedCall, frame: Frame, notes: Mapping[str, bytes] = NO_NOTES) -> None:
        if answer.trace is not None:
            answer.trace.replied(frame.nbytes)
        if answer.at_end is not None:
            answer.at_end()  # before the caller knows
        try:
            if self._worker.thread_pool.busy:  # more replies follow
                answer.channel.send_soon(frame, timeout=self._patience)
            else:
                answer.channel.send(frame, timeout=self._patience)
        except ChannelClosedError as error:
            log.debug("a reply was not sent: %s", error)  # the caller is gone, and knows it
            if not isinstance(error, ChannelBrokenError):  # else it may have arrived
                discard(answer.peer, self._agent.interceptors, notes)
        finally:
            self._agent.answered((answer.channel, answer.number))

    def _finish(self, answer: ServedCall) -> None:
        """A request that was cancelled is over; there is nothing to tell."""
        trace, answer.trace = answer.trace, None
        if trace is not None:
            trace.replied(0)
        if answer.at_end is not None:
            answer.at_end()
        self._agent.answered((answer.channel, answer.number))


@types.coroutine
def _stepwise(coroutine: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
    """Run a coroutine; whoever looks on sees each of its steps."""
    step: Callable[[], Any] = functools.partial(coroutine.send, None)
    while True:
        observer, forks = observer_here(), runtime.forks
        with observer.going_on() if observer is not None else contextlib.nullcontext():
            try:
                awaited = step()
            except BaseException as error:
                over = isinstance(error, StopIteration)
                if runtime.forks != forks:
                    runtime.end_forked(None if over else error)
                if over:
                    return error.value  # type: ignore[attr-defined, no-any-return]
                raise
            if runtime.forks != forks:
                runtime.end_forked(None)
        try:
            step = functools.partial(coroutine.send, (yield awaited))
        except BaseException as error:
            step = functools.partial(coroutine.throw, error)


class ServedCall(CancelScope):
    """Where the reply to one request goes, and what is needed for it; and how long that is waited for."""

    function: Any = None  # once it is known
    kept: Mapping[str, Any] = {}  # by the keys of those who kept something
    trace: ServeTrace | None = None
    later = False  # nothing runs any more, but a future is waited for
    orphaned = False  # the channel that it came through is gone
    spared = False  # it goes on even then
    charge = 0  # how many bytes are counted against the peer until it is over

    def __init__(self, peer: Peer, channel: Channel, number: int, now: Callable[[], float]) -> None:
        self.peer = peer
        self.channel = channel
        self.number = number
        self.now = now
        self.arrived = now()

    @property
    def label(self) -> str:  # type: ignore[override]
        """What to call the function."""
        return "a function" if self.function is None else label_of(self.function)


_serving_loops: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()


def _stop_loops() -> None:
    """In a forked child: a task that forked must not go on with those of others."""
    for loop in list(_serving_loops):
        loop.stop()


os.register_at_fork(after_in_child=_stop_loops)


class _CoroutineLoop:
    """The event loop of a worker's ``async def`` handlers, on a thread of its own, made at the first use."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._lock = threading.Lock()  # guards both fields
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._over = False
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself does not keep them; used on its thread only

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine, with the context variables that are set here; cancel it if the current limit is."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = self._worker.runtime.spawn(
                    functools.partial(self._serve, self._loop), name=f"backhaul-{self._worker.name}-asyncio"
                )
            self._loop.call_soon_threadsafe(self._begin, self._loop, coroutine)

    def _begin(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, None]) -> None:
        task = loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        limit = deadlines.current.get()
        if limit is None:
            return

        def cancel() -> None:  # after the first step, which waits already: so the coroutine gets to know
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(task.cancel)

        number = limit.wake_with(cancel)
        task.add_done_callback(lambda _: limit.forget(number))

    def close(self) -> None:
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None:
            return

        def cancel_all() -> None:
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.call_soon(self._stop, loop)

        loop.call_soon_threadsafe(cancel_all)
        if thread is not threading.current_thread():
            self._worker.runtime.join(thread, 5.0)

    def _stop(self, loop: asyncio.AbstractEventLoop) -> None:
        self._over = True
        loop.stop()

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        forks = runtime.forks
        _serving_loops.add(loop)
        while not self._over:
            try:
                loop.run_forever()
            except (SystemExit, KeyboardInterrupt) as error:  # raised by a task that a handler made
                if runtime.forks != forks:
                    runtime.end_forked(error)
                log.error("a task of an async handler ended with %s: %s", type(error).__name__, error)
            if runtime.forks != forks:
                runtime.end_forked(None)
        loop.close()
