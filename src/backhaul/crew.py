"""The threads of a worker. Each waits for events, deals with what must happen in order, and runs what follows.

    poll -> deliver (short, in order, never blocks) -> tasks (anything: user code, nested calls)

The thread that reads a request runs it. Before a thread runs a task it makes sure that another one polls, so a
worker always listens, however many of its handlers wait for something. Nothing here knows what a frame means.

[Note: company] Short tasks are best run by one thread: two would take the interpreter from each other at every system
call and every operation of torch, at several times the cost of the tasks. So while tasks wait, another thread joins
only if tasks are long, measured by the processor time they took of late, or if none has ended for a while.
"""

from __future__ import annotations

import collections
import contextlib
import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable

from backhaul.runtime import Runtime
from backhaul.transport.base import Endpoint, Event

log = logging.getLogger("backhaul")

Task = Callable[[], None]

_IDLE = 5.0  # seconds without an event after which a thread ends
_SPARE = 2  # threads that stay
_LONG = 0.0005  # seconds of processor time that make a task worth a thread of its own
_STALLED = 0.001  # seconds without a task's end after which another thread joins
_STUCK = 0.05  # and after which tasks run beyond the limit


class Crew:
    """Thread-safe. ``deliver`` is called by the polling threads, for each event once.

    Args:
        runtime: Threads and the clock.
        endpoint: Where events come from.
        deliver: Acts on an event at once and returns what is left to run.
        limit: How many tasks run at the same time, not counting those in ``blocking``.
        name: For the names of threads.
    """

    def __init__(
        self,
        runtime: Runtime,
        endpoint: Endpoint,
        deliver: Callable[[Event], Iterable[Task]],
        *,
        limit: int,
        name: str,
    ) -> None:
        self._runtime = runtime
        self._endpoint = endpoint
        self._deliver = deliver
        self._limit = limit
        self._name = name
        self._numbers = itertools.count(1)
        self._here = threading.local()  # .running: this thread runs a task that counts
        self._lock = threading.Lock()  # guards everything below
        self._threads: set[threading.Thread] = set()
        self._tasks: collections.deque[Task] = collections.deque()
        self._alarms: list[tuple[float, int, Task]] = []
        self._polling = 0  # threads that poll or are just about to
        self._running = 0  # tasks that run and do not block
        self._long = 0.0  # which part of the tasks was long, of late
        self._progress = 0.0  # when a task last ended, or began while no other ran
        self._watched = False  # a polling thread looks after the tasks that wait
        self._called = 0.0  # when such a thread was last called for
        self._alive = 0  # threads that have been decided on and have not ended
        self._closing = False

    def start(self) -> None:
        """Begin to listen."""
        with self._lock:
            self._polling += 1
            self._alive += 1
        self._add_thread()

    def submit(self, task: Task) -> None:
        """Run ``task`` on a thread of the crew, soon."""
        with self._lock:
            self._tasks.append(task)
        self._endpoint.wake()

    def call_at(self, when: float, task: Task) -> None:
        """Run ``task``, which must be short, at the time ``when`` of the runtime's clock."""
        with self._lock:
            sooner = not self._alarms or when < self._alarms[0][0]
            heapq.heappush(self._alarms, (when, next(self._numbers), task))
        if sooner:
            self._endpoint.wake()  # whoever polls had meant to sleep for longer

    @property
    def busy(self) -> bool:
        """Whether tasks wait."""
        return bool(self._tasks)

    @property
    def inside(self) -> bool:
        """Whether the calling thread runs a task of this crew."""
        return getattr(self._here, "running", False)

    def blocking(self) -> contextlib.AbstractContextManager[None]:
        """While inside, the task of the calling thread does not count against the limit."""
        return _Blocking(self) if self.inside else _NOTHING

    def _pause(self) -> None:
        self._here.running = False
        with self._lock:
            self._running -= 1
            self._endpoint.quiet = not self._running
            waiting = bool(self._tasks)
        if waiting:
            self._endpoint.wake()

    def _go_on(self) -> None:
        self._here.running = True
        with self._lock:
            self._running += 1
            self._endpoint.quiet = False

    def close(self, timeout: float) -> list[str]:
        """Stop after the tasks that run now; return the names of threads that did not end in time.

        The calling thread may be of the crew; it is not waited for.
        """
        with self._lock:
            self._closing = True
            self._tasks.clear()
            self._alarms.clear()
            own = threading.current_thread() in self._threads
        deadline = self._runtime.now() + timeout
        pause = self._runtime.gate()
        while self._alive > own and self._runtime.now() < deadline:
            self._endpoint.wake()
            pause.wait(0.001)
        with self._lock:
            threads = self._threads - {threading.current_thread()}
        for thread in threads:
            thread.join(max(deadline - self._runtime.now(), 0.01))
        return [thread.name for thread in threads if thread.is_alive()]

    # The threads.

    def _add_thread(self) -> None:
        """Start a thread that is counted as polling already."""
        try:
            thread = self._runtime.spawn(self._work, name=f"{self._name}-{next(self._numbers)}")
        except RuntimeError as error:  # the system has no more threads
            log.error("%s cannot listen while its handlers run: %s", self._name, error)
            with self._lock:
                self._polling -= 1
                self._alive -= 1
            return
        with self._lock:
            self._threads.add(thread)

    def _work(self) -> None:
        while (task := self._next()) is not None:
            self._here.running = True
            start = time.thread_time()
            try:
                task()
            except BaseException:
                log.exception("a task failed")
            del task
            self._here.running = False
            cost = time.thread_time() - start
            with self._lock:
                self._running -= 1
                self._endpoint.quiet = not self._running
                self._polling += 1
                self._long += ((cost > _LONG) - self._long) / 8
                self._progress = self._runtime.now()
        with self._lock:
            self._threads.discard(threading.current_thread())
            self._alive -= 1

    def _next(self) -> Task | None:
        """Poll until there is a task for this thread. None: the thread should end."""
        fresh: Iterable[Task] = ()
        idle = watching = polled = False
        while True:
            cover = more = False
            with self._lock:
                now = self._runtime.now()
                self._tasks.extend(fresh)
                self._watched &= not watching
                if self._closing or (idle and self._polling > _SPARE and not self._tasks):
                    self._polling -= 1
                    return None
                alarm = heapq.heappop(self._alarms)[2] if self._alarms and self._alarms[0][0] <= now else None
                task = None
                if alarm is None and self._tasks and self._may_run(now):
                    task = self._tasks.popleft()
                    self._progress = self._progress if self._running else now
                    self._running += 1
                    self._endpoint.quiet = False
                    cover = self._polling == 1
                    self._alive += cover
                    self._polling -= not cover  # the thread we add takes our place
                    # A thread that was called for and takes a task has to call for the next.
                    more = bool(self._tasks) and not self._watched and (polled or self._called + _STALLED <= now)
                    self._called = now if more else self._called
                else:
                    watching = bool(self._tasks) and not self._watched
                    self._watched |= watching
                patience = min(self._patience(now), _STALLED if watching else _IDLE)
            if task is not None:
                if cover:
                    self._add_thread()
                elif more:
                    # Most tasks are over before another thread would have got hold of the interpreter.
                    self._endpoint.wake_soon()
                return task
            self._endpoint.flush()
            fresh, idle = self._poll(patience) if alarm is None else self._ring(alarm)
            polled = True

    def _may_run(self, now: float) -> bool:
        """See [Note: company]."""
        if not self._running:
            return True
        if self._running < self._limit:
            return self._long > 0.5 or self._progress + _STALLED <= now
        return self._progress + _STUCK <= now

    def _patience(self, now: float) -> float:
        return max(min(_IDLE, self._alarms[0][0] - now), 0.0) if self._alarms else _IDLE

    def _poll(self, patience: float) -> tuple[Iterable[Task], bool]:
        """Wait for an event and deliver it: what is left to run, and whether there was nothing for long."""
        try:
            event = self._endpoint.poll(patience)
            if event is None:
                return (), patience == _IDLE
            return self._deliver(event), False
        except Exception:
            log.exception("%s lost an event", self._name)
            return (), False

    @staticmethod
    def _ring(alarm: Task) -> tuple[Iterable[Task], bool]:
        try:
            alarm()
        except Exception:
            log.exception("an alarm failed")
        return (), False


class _Blocking(contextlib.AbstractContextManager[None]):
    __slots__ = ("_crew",)

    def __init__(self, crew: Crew) -> None:
        self._crew = crew

    def __enter__(self) -> None:
        self._crew._pause()

    def __exit__(self, *_: object) -> None:
        self._crew._go_on()


_NOTHING = contextlib.nullcontext()
