"""The event loop on which a worker runs its ``async def`` handlers. Knows nothing of calls."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import threading
import types
import weakref
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

from backhaul._runtime import runtime
from backhaul._worker import deadlines
from backhaul._worker.worker import Worker, observer_here

log = logging.getLogger("backhaul")

T = TypeVar("T")

_CLOSE_SECONDS = 5.0  # how long ``close`` waits for the thread of the loop

_running_loops: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()


def _stop_loops() -> None:
    """In a forked child: after the task that forked, no other task of the parent's loop must run."""
    for loop in list(_running_loops):
        loop.stop()


os.register_at_fork(after_in_child=_stop_loops)


class CoroutineLoop:
    """An event loop on a thread of its own. Both are made at the first use. Thread-safe."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._lock = threading.Lock()  # guards _loop and _thread
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._over = False
        self._tasks: set[asyncio.Task[None]] = set()  # the loop does not keep them; used on its thread only

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine with the context variables that are set here. It is cancelled if the current scope is."""
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
        scope = deadlines.current.get()
        if scope is None:
            return

        def cancel() -> None:  # runs after the first step, which is scheduled already: so the coroutine is entered
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(task.cancel)

        number = scope.wake_with(cancel)
        task.add_done_callback(lambda _: scope.forget(number))

    def close(self) -> None:
        """Cancel all tasks and stop the loop, if there is one."""
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
            self._worker.runtime.join(thread, _CLOSE_SECONDS)

    def _stop(self, loop: asyncio.AbstractEventLoop) -> None:
        self._over = True
        loop.stop()

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        forks = runtime.forks
        _running_loops.add(loop)
        while not self._over:
            try:
                loop.run_forever()
            except (SystemExit, KeyboardInterrupt) as error:  # raised by a task that a handler made
                if runtime.forks != forks:
                    runtime.end_forked(error)
                log.error(
                    "worker '%s': a task of an async handler ended with %s: %s",
                    *(self._worker.name, type(error).__name__, error),
                )
            if runtime.forks != forks:
                runtime.end_forked(None)
        loop.close()


@types.coroutine
def stepwise(coroutine: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
    """Run a coroutine. An observer sees each of its steps, and a step that forks ends the child process."""
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
