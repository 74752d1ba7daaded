"""The root object: everything one worker owns hangs off it, and nothing is global but which one is current.

A worker is its identity, its end of a transport, its threads, and the parts that higher layers attach
(RPC, autograd, ...). It routes each frame to the part that registered for its kind.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Collection
from signal import default_int_handler
from types import TracebackType
from typing import Any, TypeVar

from backhaul._devices.links import DeviceContext
from backhaul._runtime import interrupts
from backhaul._runtime.compile_marks import graph_break
from backhaul._runtime.interrupts import SIGINT, getsignal
from backhaul._runtime.observer import Observer
from backhaul._runtime.runtime import OneShotEvent, Runtime
from backhaul._transport.base import Channel, Endpoint, Event, Lost
from backhaul._transport.spin_wait import SpinPolicy
from backhaul._transport.waiter import ChannelWaiter
from backhaul._types import Options, WorkerInfo
from backhaul._wire.frames import Frame
from backhaul._wire.memory import Recycler
from backhaul._worker.thread_pool import Task, ThreadPool
from backhaul.errors import NotInitializedError, ProtocolError

log = logging.getLogger("backhaul")

_REAL = Runtime()
P = TypeVar("P")
FrameHandler = Callable[[Channel, Frame], Task | None]
"""Acts on a frame while its channel is held: short, never blocks. May return what is left to run."""

_current: contextvars.ContextVar[Worker | None] = contextvars.ContextVar("backhaul_worker", default=None)
serving: contextvars.ContextVar[bool] = contextvars.ContextVar("backhaul_serving", default=False)
"""Whether a handler is running here, on whatever thread or event loop."""

_entered: contextvars.ContextVar[tuple[contextvars.Token[Worker | None], ...]] = contextvars.ContextVar(
    "backhaul_entered", default=()
)
_alive: weakref.WeakSet[Worker] = weakref.WeakSet()
_alive_lock = threading.Lock()  # guards _alive and _closed_last
_closed_last: str | None = None  # only for a better error message
_default: Worker | None = None  # what a program has chosen to be current where nothing else is
_only: Worker | None = None  # that one while it is alive, else the one worker of the process if there is just one

carried: Callable[[], Worker | None] | None = None
"""Finds the current worker where context variables do not reach; see ``jit.threads``."""


def _find_only() -> None:
    global _only
    alive = list(_alive)
    _only = _default if _default in alive else alive[0] if len(alive) == 1 else None


def make_default(worker: Worker) -> None:
    """Let ``worker`` be the current one, on all threads, wherever no other is made current; until it is closed."""
    global _default
    with _alive_lock:
        _default = worker
        _find_only()


class Worker:
    """One participant. Use it as a context manager to make it the current worker inside.

    Args:
        info: Name and id.
        incarnation: Differs each time a worker of this name starts.
        endpoint: Its end of the transport; the worker closes it.
        options: How it behaves.
        runtime: Threads and the clock.
    """

    def __init__(
        self,
        info: WorkerInfo,
        incarnation: str,
        endpoint: Endpoint,
        options: Options,
        runtime: Runtime | None = None,
    ) -> None:
        self.info = info
        self.incarnation = incarnation
        self.endpoint = endpoint
        self.options = options
        self.runtime = runtime or Runtime()
        self.thread_pool = ThreadPool(
            self.runtime, endpoint, self._deliver, limit=options.threads, name=f"backhaul-{info.name}"
        )
        self.loopback: Channel = _Loopback(self)
        self.closed = False
        self.observer: Observer | None = None  # while a profile is open
        self.device_context: DeviceContext | None = None  # where this worker has CUDA devices
        self.counters: dict[str, Callable[[], int]] = {}  # of all parts, for people
        self._parts: dict[type, Any] = {}
        self._handlers: dict[int, FrameHandler] = {}
        self._on_close: list[Callable[[], None]] = []
        self._on_gone: list[Callable[[Channel], Task | None]] = []
        self._on_lost: list[Callable[[Channel, str], None]] = []
        self._luck = SpinPolicy()  # of those who attend
        self._bells: list[ChannelWaiter] = []  # to be used again
        self.context = contextvars.Context()  # in which this worker is current; only copies of it are run in
        self.context.run(_current.set, self)
        with _alive_lock:
            _alive.add(self)
            _find_only()
        interrupts.defer()

    def __repr__(self) -> str:
        state = " closed" if self.closed else ""
        return f"<Worker '{self.info.name}' (id {self.info.id}){state}>"

    @property
    def name(self) -> str:
        """The worker's name."""
        return self.info.name

    # Parts and frames.

    def attach(self, part: Any) -> None:
        """Let a higher layer hang its state here, one object per type."""
        self._parts[type(part)] = part

    def part(self, kind: type[P]) -> P:
        """The attached object of that type."""
        found: P = self._parts[kind]
        return found

    def on_frame(self, kind: int, handler: FrameHandler) -> None:
        """Route frames of ``kind`` to ``handler``."""
        self._handlers[kind] = handler

    def guard_frames(self, guarded: Callable[[int, FrameHandler], FrameHandler]) -> None:
        """Put something before the handlers of all kinds, by kind."""
        self._handlers = {kind: guarded(kind, handler) for kind, handler in self._handlers.items()}

    def on_gone(self, handler: Callable[[Channel], Task | None]) -> None:
        """Call ``handler`` at once with each channel that is gone, before tasks which came through it and wait have
        begun. It must not block; what it returns is run later.
        """
        self._on_gone.append(handler)

    def on_lost(self, handler: Callable[[Channel, str], None]) -> None:
        """Call ``handler`` with each channel that is gone, and why. On a crew thread; it may block."""
        self._on_lost.append(handler)

    def on_close(self, handler: Callable[[], None]) -> None:
        """Call ``handler`` when the worker is closed. The last one registered is first: layers end from the top."""
        self._on_close.append(handler)

    def start(self) -> None:
        """Begin to listen."""
        self.thread_pool.start()

    def _deliver(self, event: Event) -> list[Task]:
        if isinstance(event, Lost):
            return self.accept(event)
        try:
            return self.accept(event)
        finally:
            event.channel.release()

    def accept(self, event: Event) -> list[Task]:
        """Act on an event while its channel is held; return what is left to run."""
        if isinstance(event, Lost):
            later = [handler(event.channel) for handler in self._on_gone]
            return [functools.partial(self._lose, event), *(task for task in later if task is not None)]
        channel, tasks = event.channel, []
        for frame in event.frames:
            try:  # as in ``route``: most frames come through here
                task = self._handlers.get(frame.kind, _refuse)(channel, frame)
            except Exception as error:
                _give_up(channel, error)
            else:
                if task is not None:
                    tasks.append(task)
        return tasks

    def take_in(self, event: Event) -> None:
        """The same, for a thread that waits for something else; what is left is for the crew."""
        try:
            for task in self.accept(event):
                self.thread_pool.submit(task)
        except BaseException:  # an interrupt of the user's: all have to know of the loss
            if isinstance(event, Lost):
                self.see_to(event)
            raise  # else its channel is mended by who holds it

    def see_to(self, loss: Lost) -> None:
        """Act on a loss, and return when all have heard of it; nothing happens to those who had."""
        for task in self.accept(loss):
            task()

    def _lose(self, event: Lost) -> None:
        for handler in self._on_lost:
            handler(event.channel, event.reason)

    def route(self, channel: Channel, frame: Frame) -> Task | None:
        """Hand a frame to its part; close the channel if nobody wants it."""
        try:
            return self._handlers.get(frame.kind, _refuse)(channel, frame)
        except Exception as error:
            _give_up(channel, error)
            return None

    def attend(
        self, channels: Collection[Channel], one_shot: OneShotEvent, timeout: float | None, inbox: Collection[Task]
    ) -> bool:
        """Read channels that the calling thread holds until the gate opens or something is in the inbox; False if the
        time is over before. Lets go of the channels; who calls it mends them if this is interrupted.
        """
        held = list(channels)
        deadline = None if timeout is None else self.runtime.now() + timeout
        bell = self._bells.pop() if self._bells else self.endpoint.make_waiter(self._luck)
        in_time = True
        try:
            bell.claim()
            one_shot.on_open = bell.wake
            while not one_shot.opened and not inbox:
                left = None if deadline is None else deadline - self.runtime.now()
                if left is not None and left <= 0:
                    in_time = False
                    break
                for channel in bell.wait(held, left, spin=self.endpoint.quiet):
                    event = channel.take()
                    if event is None:
                        continue
                    self.take_in(event)
                    if isinstance(event, Lost):
                        held.remove(channel)
                        bell.register(held)
            for channel in held:
                channel.release()
        except BaseException:  # an interrupt of the user's: the bell may be out of order
            one_shot.on_open = None
            bell.close()
            raise
        one_shot.on_open = None
        self._bells.append(bell)
        return in_time

    def run(self, function: Callable[..., P], *args: Any) -> P:
        """Call ``function`` with this worker current, in a fresh copy of its context variables."""
        return self.context.copy().run(function, *args)

    def blocking(self) -> contextlib.AbstractContextManager[None]:
        """To be inside of while the calling thread waits for others; what it was going to send is sent before."""
        self.endpoint.flush()
        waiting, observer = self.thread_pool.blocking(), self.observer
        return waiting if observer is None else observer.waiting(waiting)

    def abandon(self) -> bool:
        """Count as closed from now on, and free nothing. False if it was closed before."""
        global _closed_last, _default
        with _alive_lock:
            if self.closed:
                return False
            self.closed = True
            _alive.discard(self)
            if _default is self:
                _default = None
            _find_only()
            _closed_last = self.name
            last = not _alive
        if last:
            interrupts.stop_deferring()
        return True

    @interrupts.uninterruptible
    def close(self, timeout: float = 5.0) -> None:
        """Stop listening and free everything; idempotent. Waits for running handlers, but not past ``timeout``."""
        if not self.abandon():
            return
        for handler in reversed(self._on_close):
            handler()
        stuck = self.thread_pool.close(timeout)
        if stuck:
            log.warning("%s closed while handlers still ran on %s", self.name, ", ".join(stuck))
        self.endpoint.close()
        while self._bells:
            self._bells.pop().close()

    # Which worker is current.

    @graph_break
    def __enter__(self) -> Worker:
        _entered.set((*_entered.get(), _current.set(self)))
        return self

    @graph_break
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        *outer, token = _entered.get()
        _current.reset(token)
        _entered.set(tuple(outer))


def _refuse(channel: Channel, frame: Frame) -> Task | None:
    raise ProtocolError(f"no part of this worker takes frames of kind {frame.kind}")


def _give_up(channel: Channel, error: Exception) -> None:
    if isinstance(error, ProtocolError):
        log.warning("closing the channel to %s: %s", channel.peer, error)
    else:  # ours to fix, but no reason to lose the frames that came with it
        log.error("closing the channel to %s", channel.peer, exc_info=error)
    channel.close()


class _Loopback(Channel):
    """A worker's channel to itself: values are copied as on any other."""

    def __init__(self, worker: Worker) -> None:
        self.peer = "itself"
        self._worker = weakref.ref(worker)
        self._recycler = Recycler()

    def send(self, frame: Frame, *, timeout: float | None = None) -> None:
        worker = self._worker()
        if worker is not None:
            worker.thread_pool.submit(functools.partial(self._arrive, worker, frame.copied(self._recycler)))

    def _arrive(self, worker: Worker, frame: Frame) -> None:
        task = worker.route(self, frame)
        if task is not None:
            task()

    def release(self) -> None:
        """Nothing is ever held."""

    def close(self) -> None:
        """Never closes."""


@graph_break
def current_worker() -> Worker:
    """The worker that module-level functions act on.

    It is the one made current by a ``with`` or by the handler that runs, else the first of a cluster that was started
    without a ``with``, else the only one of the process.

    Raises:
        NotInitializedError: There is none, or several and none is current.
    """
    if interrupts.deferred is not None:
        interrupts.check_at_entry()
    worker = _current.get()
    if worker is None and carried is not None:
        worker = carried()
    if worker is not None:
        if worker.closed:
            raise NotInitializedError(f"worker '{worker.name}' was shut down", worker=worker.name)
        return worker
    if getsignal(SIGINT) is default_int_handler:
        interrupts.defer()  # a thread of the crew has a current worker, so this is a program's
    return _only or _look_around()


def _look_around() -> Worker:
    with _alive_lock:
        alive = list(_alive)
        closed = _closed_last
    if len(alive) == 1:
        return alive[0]
    if alive:
        names = ", ".join(sorted(w.name for w in alive))
        raise NotInitializedError(
            f"this process has {len(alive)} workers ({names}) and none is current here; use `with worker:`"
        )
    if closed is not None:
        raise NotInitializedError(
            f"worker '{closed}' was shut down; start another with init(), or a cluster again with its start()",
            worker=closed,
        )
    raise NotInitializedError(
        "no worker in this process: call backhaul.init(), or enter a backhaul.cluster() with `with`, or call its "
        "start() (in a notebook)"
    )


def _forget_all() -> None:
    """In a forked child the workers are the parent's, see ``runtime`` [Note: forks]."""
    global _alive_lock, _default
    _alive_lock = threading.Lock()
    _default = None
    for worker in list(_alive):
        worker.closed = True
        worker.endpoint.sever()
    _alive.clear()
    _find_only()
    _current.set(None)
    serving.set(False)


os.register_at_fork(after_in_child=_forget_all)


def running_workers() -> list[Worker]:
    """All workers of this process that have not been closed."""
    with _alive_lock:
        return list(_alive)


def observer_here() -> Observer | None:
    """Who looks on at what the current worker does, if anybody."""
    worker = _current.get() or _only
    return None if worker is None else worker.observer


def name_here() -> str:
    """That of the current worker; empty where there is none."""
    worker = _current.get() or _only
    return "" if worker is None else worker.name


def runtime_here() -> Runtime:
    """That of the current worker; where there is none, the real thing."""
    worker = _current.get() or _only
    return _REAL if worker is None else worker.runtime


def blocking() -> contextlib.AbstractContextManager[None]:
    """To be inside of while this thread waits: the current worker, if any, is told."""
    worker = _current.get() or _only
    return contextlib.nullcontext() if worker is None or worker.closed else worker.blocking()
