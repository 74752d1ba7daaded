"""Incoming calls: decode, run with this worker current, reply. A handler that returns a future (``async_execution``) or
a coroutine frees its thread until that is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import threading
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

import torch

from backhaul.crew import Task
from backhaul.errors import FunctionNotFoundError, LimitError, ProtocolError, SerializationError
from backhaul.observe import ServeTrace
from backhaul.rpc.agent import PROFILE, Agent, check_size, discard
from backhaul.rpc.futures import Future
from backhaul.rpc.intercept import Interceptor
from backhaul.rpc.peers import Peer
from backhaul.rpc.policy import find_exposed
from backhaul.transport.base import Channel, ChannelClosedError
from backhaul.wire.callables import label_of, resolve
from backhaul.wire.codec import encode, load, tensors_of
from backhaul.wire.faults import encode_fault
from backhaul.wire.frames import Frame
from backhaul.wire.messages import Kind, Reply, Request, pack, unpack
from backhaul.worker import Worker, observer_here, serving

log = logging.getLogger("backhaul")

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
ASYNC_MARK = "_backhaul_async_execution"


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


def answers_later(function: Any, result: Any) -> bool:
    """Whether the value of a call is that of the future which the function returned.

    A scripted function that returns a future means just that: found by name, it has lost its mark.
    """
    return getattr(function, ASYNC_MARK, False) or (
        type(function) is torch.jit.ScriptFunction and isinstance(result, torch._C.Future)
    )


class Dispatcher:
    """The serving half of a worker. Thread-safe."""

    def __init__(self, worker: Worker, agent: Agent) -> None:
        self._worker = worker
        self._agent = agent
        self._loop = _Loop(worker)
        self._lock = threading.Lock()  # guards served
        self._patience: float | None = None  # seconds that a reply waits for a peer which reads slowly
        self.served = 0  # requests ever answered
        worker.on_frame(Kind.REQUEST, self._on_request)

    def complete(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run a coroutine on the event loop of ``async def`` handlers; returns the future of its result."""
        made: Future[Any] = Future()

        async def run() -> None:
            try:
                made.set_result(await _stepwise(coroutine))
            except BaseException as error:
                made.set_exception(error)

        self._loop.run(run())
        return made

    def close(self) -> None:
        """Stop the event loop of ``async def`` handlers, if there is one."""
        self._loop.close()

    def _on_request(self, channel: Channel, frame: Frame) -> Task:
        if self._agent.peers.of(channel) is None:
            raise ProtocolError("a request from a peer that has not said who it is")
        self._agent.begin()
        observer = self._worker.observer
        if observer is not None:
            return functools.partial(self._serve, channel, frame, observer.now())
        return functools.partial(self._serve, channel, frame)

    def _serve(self, channel: Channel, frame: Frame, arrived: int = 0) -> None:
        if not torch.is_grad_enabled():  # an earlier handler may have switched it off for this thread
            torch.set_grad_enabled(True)
        self._worker.run(self._run, channel, frame, arrived)

    def _run(self, channel: Channel, frame: Frame, arrived: int) -> None:
        serving.set(True)  # in the handler's own context
        answer = Answer(channel, frame.number, self._agent.peers.of(channel))
        try:
            function, args, kwargs = self._decode(frame, answer, arrived)
            del frame
            answer.label = label_of(function)
            if answer.trace is not None:
                answer.trace.decoded(answer.label)
            result = function(*args, **kwargs)
            if answer.trace is not None:
                answer.trace.ran()
            if answers_later(function, result):
                if not isinstance(result, torch._C.Future):
                    raise TypeError(
                        f"{answer.label} is marked with async_execution, so it must return a Future, "
                        f"but it returned a {type(result).__name__}"
                    )
                result.add_done_callback(lambda done: self._reply_with_future(answer, done))
                return
            if inspect.iscoroutine(result):
                self._loop.run(self._reply_with_coroutine(answer, result))
                return
        except BaseException as error:
            self._reply_fault(answer, error)
            return
        self._reply(answer, result)

    def _decode(
        self, frame: Frame, answer: Answer, arrived: int
    ) -> tuple[Callable[..., Any], list[Any], dict[str, Any]]:
        name = self._worker.name
        request = unpack(frame.body, Request)
        observer = self._worker.observer
        if observer is not None and PROFILE in request.notes and answer.peer is not None:
            answer.trace = observer.serve(request.notes[PROFILE], answer.peer.record.id, arrived)
        function: Callable[..., Any] | None = None
        if request.function:
            function = self._find(request.function, answer)
        try:
            tensors = tensors_of(request.payload, frame.buffers)
            if answer.peer is not None:
                for interceptor in self._agent.interceptors:
                    note = request.notes.get(interceptor.key)
                    tensors, kept = interceptor.request_in(answer.peer, note, tensors)
                    answer.kept.append((interceptor, kept))
            values = load(request.payload, frame.buffers, tensors, self._worker)
            if function is None:
                function = values.pop(0)
            kwargs = values.pop(0) if request.keywords else {}
        except Exception as error:
            if answer.peer is not None:
                discard(answer.peer, self._agent.interceptors, request.notes)
            if isinstance(error, LimitError):
                raise
            raise SerializationError(
                f"worker '{name}' cannot decode the call to {request.function or 'a function'}: "
                f"{type(error).__name__}: {error}",
                worker=name,
            ) from error
        return function, values, kwargs

    def _find(self, name: str, answer: Answer) -> Callable[..., Any]:
        """The function that a request names."""
        try:
            return resolve(name)
        except FunctionNotFoundError as error:
            exposed = find_exposed(name)
            if exposed is not None:
                return exposed.function
            here = self._worker.name
            raise FunctionNotFoundError(
                f"worker '{here}' has no function {name!r}: {error.__cause__ or error}", worker=here, function=name
            ) from error

    # Replies. Each request gets exactly one, and is counted as served after that.

    def _reply_with_future(self, answer: Answer, done: torch.futures.Future[Any]) -> None:
        try:
            result = done.wait()
        except BaseException as error:
            self._reply_fault(answer, error)
        else:
            self._reply(answer, result)

    async def _reply_with_coroutine(self, answer: Answer, coroutine: Coroutine[Any, Any, Any]) -> None:
        try:
            result = await _stepwise(coroutine)
        except BaseException as error:
            self._reply_fault(answer, error)
        else:
            self._reply(answer, result)

    def _reply(self, answer: Answer, result: Any) -> None:
        peer = answer.peer
        if answer.trace is not None:
            answer.trace.resumed()
        try:
            shared, plain = (peer.main_shared, peer.plain) if peer is not None else (False, False)
            encoded = encode([result], names=["result"], main_shared=shared, plain=plain)
            notes: dict[str, bytes] = {}
            for interceptor, kept in answer.kept:
                assert peer is not None
                note = interceptor.reply_out(peer, kept, encoded)
                if note is not None:
                    notes[interceptor.key] = note
            body = pack(Reply(encoded.payload, notes))
            frame = Frame(Kind.REPLY, answer.number, body, encoded.buffers, encoded.keep)
            if peer is not None:
                check_size(frame, peer, f"the result of {answer.label}")
        except SerializationError as error:
            name = self._worker.name
            problem = SerializationError(
                f"{answer.label} on worker '{name}' returned what cannot travel: {error}", worker=name, path=error.path
            )
            self._reply_fault(answer, problem)
        except Exception as error:
            self._reply_fault(answer, error)
        else:
            self._send(answer, frame)

    def _reply_fault(self, answer: Answer, error: BaseException) -> None:
        if answer.trace is not None:
            answer.trace.resumed()
        options = self._worker.options
        shown = options.trusted if options.tracebacks is None else options.tracebacks
        plain = answer.peer is not None and answer.peer.plain
        fault, encoded = encode_fault(error, self._worker.name, plain=plain, tracebacks=shown)
        buffers, keep = (encoded.buffers, encoded.keep) if encoded is not None else ((), None)
        self._send(answer, Frame(Kind.FAULT, answer.number, pack(fault), buffers, keep))

    def _send(self, answer: Answer, frame: Frame) -> None:
        if answer.trace is not None:
            answer.trace.replied(frame.nbytes)
        try:
            if self._worker.crew.busy:  # more replies follow
                answer.channel.send_soon(frame, timeout=self._patience)
            else:
                answer.channel.send(frame, timeout=self._patience)
        except ChannelClosedError as error:
            log.debug("a reply was not sent: %s", error)  # the caller is gone, and knows it
        finally:
            with self._lock:
                self.served += 1
            self._agent.end()


@types.coroutine
def _stepwise(coroutine: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
    """Run a coroutine; whoever looks on sees each of its steps."""
    step: Callable[[], Any] = functools.partial(coroutine.send, None)
    while True:
        observer = observer_here()
        with observer.going_on() if observer is not None else contextlib.nullcontext():
            try:
                awaited = step()
            except StopIteration as over:
                return over.value  # type: ignore[no-any-return]
        try:
            step = functools.partial(coroutine.send, (yield awaited))
        except BaseException as error:
            step = functools.partial(coroutine.throw, error)


class Answer:
    """Where the reply to one request goes, and what is needed for it."""

    __slots__ = ("channel", "charge", "kept", "label", "number", "peer", "trace")

    def __init__(self, channel: Channel, number: int, peer: Peer | None) -> None:
        self.channel = channel
        self.number = number
        self.peer = peer
        self.label = "a function"
        self.charge = 0  # how many bytes are counted against the peer until it is sent
        self.kept: list[tuple[Interceptor, Any]] = []
        self.trace: ServeTrace | None = None


class _Loop:
    """The event loop of a worker's ``async def`` handlers, on a thread of its own, made at the first use."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._lock = threading.Lock()  # guards both fields
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = self._worker.runtime.spawn(
                    functools.partial(self._serve, self._loop), name=f"backhaul-{self._worker.name}-asyncio"
                )
            asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None:
            return

        def cancel_all() -> None:
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.call_soon(loop.stop)

        loop.call_soon_threadsafe(cancel_all)
        if thread is not threading.current_thread():
            thread.join(5.0)

    @staticmethod
    def _serve(loop: asyncio.AbstractEventLoop) -> None:
        try:
            loop.run_forever()
        finally:
            loop.close()
