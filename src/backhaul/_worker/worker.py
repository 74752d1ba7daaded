"""``Worker``, the root object from which every part of one worker is reached. The only global state is which worker is
current.

A worker is its identity, its end of a transport, its threads, and the parts that higher layers attach (RPC, autograd,
...). It must not know these parts: they register for frames and events.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import threading
import weakref
from collections.abc import Callable
from signal import default_int_handler
from types import TracebackType
from typing import Any, TypeVar

from backhaul._devices.seam import NO_DEVICES, WorkerDevices
from backhaul._options import Options
from backhaul._runtime import interrupts, worker_patches
from backhaul._runtime.compile_marks import graph_break
from backhaul._runtime.interrupts import SIGINT, getsignal
from backhaul._runtime.observer import Observer
from backhaul._runtime.observer_pair import of_all
from backhaul._runtime.runtime import Runtime
from backhaul._transport.base import Channel, Endpoint
from backhaul._types import WorkerInfo
from backhaul._worker.frame_receiver import FrameCheck, FrameHandler, FrameReceiver
from backhaul._worker.listeners import Listeners
from backhaul._worker.loopback import Loopback
from backhaul._worker.thread_pool import ThreadPool
from backhaul.errors import NotInitializedError

log = logging.getLogger("backhaul")

_REAL = Runtime()
P = TypeVar("P")

_current: contextvars.ContextVar[Worker | None] = contextvars.ContextVar("backhaul_worker", default=None)
in_handler: contextvars.ContextVar[bool] = contextvars.ContextVar("backhaul_in_handler", default=False)
"""Whether a handler is running here, on any thread or event loop."""

_entered: contextvars.ContextVar[tuple[contextvars.Token[Worker | None], ...]] = contextvars.ContextVar(
    "backhaul_entered", default=()
)
_alive: weakref.WeakSet[Worker] = weakref.WeakSet()
_alive_lock = threading.Lock()  # guards _alive, _closed_last and the observers of all workers
_closed_last: str | None = None  # the name of the worker that was closed last, for a better error message
_default: Worker | None = None  # the worker that is current where no other is, as the program has chosen
_only: Worker | None = None  # ``_default`` while it is alive, else the only worker of the process, else None

find_outside_context: Callable[[], Worker | None] | None = None
"""Finds the current worker on threads that context variables do not reach; ``jit.current_worker`` sets it."""


def _find_only() -> None:
    global _only
    alive = list(_alive)
    _only = _default if _default in alive else alive[0] if len(alive) == 1 else None


def make_default(worker: Worker) -> None:
    """Make ``worker`` the current one, on all threads, where no other is current. This ends when it is closed."""
    global _default
    with _alive_lock:
        _default = worker
        _find_only()


# Over the limit because it is the root: most attributes are its parts, and each part is an object of its own.
class Worker:
    """One participant. Use it as a context manager to make it the current worker inside.

    Args:
        info: Name and id.
        incarnation: Differs each time a worker of this name starts.
        endpoint: Its end of the transport; the worker closes it.
        options: How it behaves.
        runtime: Threads and the clock.

    Attributes:
        thread_pool: The threads that read frames and run tasks.
        receiver: Hands frames to the parts that registered for them.
        loopback: The channel to itself.
        observer: Sees what this worker does while a profile is open or a monitor watches, else None.
        devices: The devices of this worker; a null object if it has none.
        counters: Functions that return the counters of all parts; see ``get_debug_info``.
        parts: The objects that ``attach`` has stored, by type. Read it directly on hot paths only; else call ``part``.
        context: The context variables of this worker's tasks. Run code in copies of it only.
        on_close: Listeners that are called when the worker is closed. The listener that was registered last is called
            first, so that layers end from the top.

    Example:
        >>> import backhaul as bh
        >>> with bh.cluster(["first", "second"]) as (first, second):
        ...     with second:
        ...         bh.current_worker().name
        'second'
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
        self.receiver = FrameReceiver(endpoint, self.runtime)
        self.thread_pool = ThreadPool(
            self.runtime, endpoint, self.receiver.deliver, limit=options.threads, name=f"backhaul-{info.name}"
        )
        self.receiver.submit_to(self.thread_pool.submit)
        self.loopback: Channel = Loopback(self.thread_pool, self.receiver)
        self.closed = False
        self.observer: Observer | None = None
        self._observers: tuple[Observer, ...] = ()
        self.devices: WorkerDevices = NO_DEVICES
        self.counters: dict[str, Callable[[], int]] = {}
        self.parts: dict[type, Any] = {}
        self.on_close: Listeners[[], None] = Listeners(newest_first=True)
        self.context = contextvars.Context()
        self.context.run(_current.set, self)
        with _alive_lock:
            _alive.add(self)
            _find_only()
            worker_patches.begin()
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
        """Let a higher layer store an object here, one of each type."""
        self.parts[type(part)] = part

    def part(self, kind: type[P]) -> P:
        """The attached object of that type."""
        found: P = self.parts[kind]
        return found

    def on_frame(self, kind: int, handler: FrameHandler, *, check: FrameCheck | None) -> None:
        """Route frames of ``kind`` to ``handler``; ``check``: see ``FrameReceiver.register``."""
        self.receiver.register(kind, handler, check=check)

    def start(self) -> None:
        """Begin to listen."""
        self.thread_pool.start()

    def run(self, function: Callable[..., P], *args: Any) -> P:
        """Call ``function`` with this worker current, in a fresh copy of its context variables."""
        return self.context.copy().run(function, *args)

    def blocking(self) -> contextlib.AbstractContextManager[None]:
        """A context for code in which the calling thread waits; see ``ThreadPool.blocking``."""
        return self.thread_pool.blocking(self.observer)

    def observe(self, observer: Observer) -> None:
        """Let ``observer`` see what this worker does, beside one that does already."""
        with _alive_lock:
            if observer not in self._observers:
                self._observers = (*self._observers, observer)
            self.observer = of_all(self._observers)

    def stop_observing(self, observer: Observer) -> None:
        """Undo ``observe``."""
        with _alive_lock:
            self._observers = tuple(each for each in self._observers if each is not observer)
            self.observer = of_all(self._observers)

    def abandon(self) -> bool:
        """Mark the worker as closed, and free nothing. Return False if the worker was closed before."""
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
                worker_patches.end()
        if last:
            interrupts.stop_deferring()
        return True

    @interrupts.uninterruptible
    def close(self, timeout: float = 5.0) -> None:
        """Stop listening and free everything; idempotent. Wait for running handlers for at most ``timeout`` seconds."""
        if not self.abandon():
            return
        self.on_close.notify()
        stuck = self.thread_pool.close(timeout)
        if stuck:
            log.warning("worker '%s' closed while handlers still ran on %s", self.name, ", ".join(stuck))
        self.endpoint.close()
        self.receiver.close()

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


@graph_break
def current_worker() -> Worker:
    """The worker that module-level functions act on.

    It is the worker made current by a ``with``, or the worker whose handler runs here. Otherwise it is the first worker
    of a cluster that was started without a ``with``. Otherwise it is the only worker of the process.

    Raises:
        NotInitializedError: There is none, or several and none is current.

    Example:
        >>> import backhaul as bh
        >>> with bh.cluster(["first", "second"]):
        ...     bh.current_worker().name
        'first'
    """
    if interrupts.deferred is not None:
        interrupts.check_at_entry()
    worker = _current.get()
    if worker is None and find_outside_context is not None:
        worker = find_outside_context()
    if worker is not None:
        if worker.closed:
            raise NotInitializedError(f"worker '{worker.name}' was shut down", worker=worker.name)
        return worker
    if getsignal(SIGINT) is default_int_handler:
        interrupts.defer()  # threads of the pool have a current worker, so this thread is the program's
    return _only or _find_alive()


def _find_alive() -> Worker:
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
    """In a forked child the workers belong to the parent, see ``runtime`` [Note: forks]."""
    global _alive_lock, _default
    _alive_lock = threading.Lock()
    _default = None
    for worker in list(_alive):
        worker.closed = True
        worker.endpoint.sever()
    _alive.clear()
    worker_patches.end()
    _find_only()
    _current.set(None)
    in_handler.set(False)


os.register_at_fork(after_in_child=_forget_all)


def running_workers() -> list[Worker]:
    """All workers of this process that have not been closed."""
    with _alive_lock:
        return list(_alive)


def observer_here() -> Observer | None:
    """The observer of the current worker, if a profile is open there."""
    worker = _current.get() or _only
    return None if worker is None else worker.observer


def name_here() -> str:
    """The name of the current worker; empty if there is none."""
    worker = _current.get() or _only
    return "" if worker is None else worker.name


def runtime_here() -> Runtime:
    """The runtime of the current worker; if there is none, the real one (not the simulation's)."""
    worker = _current.get() or _only
    return _REAL if worker is None else worker.runtime


def blocking() -> contextlib.AbstractContextManager[None]:
    """A context for code in which this thread waits. Its task does not count against the worker's limit meanwhile."""
    worker = _current.get() or _only
    return contextlib.nullcontext() if worker is None or worker.closed else worker.blocking()
