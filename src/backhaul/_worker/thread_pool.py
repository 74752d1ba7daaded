"""The threads of a worker. Each thread polls for events, delivers them in order, and runs the tasks that follow.

    poll -> deliver (short, in order, never blocks) -> tasks (anything: user code, nested calls)

The thread that reads a request runs it. Before a thread runs a task it makes sure that another thread polls. So a
worker always listens, even if all of its handlers wait for something. This module does not know what a frame means.

[Note: joining threads] One thread runs short tasks faster than two. Two threads would take the interpreter lock from
each other at every system call and every operation of torch, which costs several times as much as the tasks. So one
thread runs the tasks that wait in a row, without looking at a clock in between. Another thread joins only if recent
tasks were long (measured by their processor time), or if at most one task has ended within ``_STALLED_SECONDS``.
"""

from __future__ import annotations

import collections
import contextlib
import heapq
import itertools
import logging
import threading
from collections.abc import Callable, Iterable

import torch

from backhaul._runtime import runtime
from backhaul._runtime.observer import Observer
from backhaul._runtime.runtime import Runtime
from backhaul._transport.base import Endpoint, Event

log = logging.getLogger("backhaul")

Task = Callable[[], None]

_IDLE_SECONDS = 5.0  # a thread that gets no event for this long ends
_SPARE_THREADS = 2  # the number of idle threads that do not end
_LONG_TASK_SECONDS = 0.0005  # a task that takes this much processor time is worth a thread of its own
_STALLED_SECONDS = 0.001  # if no task has ended for this long, another thread joins
_STUCK_SECONDS = 0.05  # if no task has ended for this long, more tasks than the limit may run


# Over the limit because one lock guards one state that each step of ``_next`` reads and changes as a whole. Splitting
# it would add calls between every two tasks.
class ThreadPool:
    """Polls an endpoint and runs tasks. Thread-safe. The polling threads call ``deliver`` once for each event.

    Args:
        runtime: Threads and the clock.
        endpoint: Where events come from.
        deliver: Acts on an event at once and returns the tasks that follow.
        limit: How many tasks run at the same time, not counting those in ``blocking``.
        name: The first part of the names of threads.

    Attributes:
        prepare: If set, a thread calls it before each task.
        waiting: Returns how many tasks wait for a thread.
    """

    waiting: Callable[[], int]

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
        self.prepare: Callable[[], None] | None = None
        self._numbers = itertools.count(1)
        self._here = threading.local()  # .running: this thread runs a task that counts against the limit
        self._lock = threading.Lock()  # guards everything below
        self._threads: set[threading.Thread] = set()
        self._tasks: collections.deque[Task] = collections.deque()
        self.waiting = self._tasks.__len__
        self._alarms: list[tuple[float, int, Task]] = []
        self._polling = 0  # threads that poll or are just about to
        self._running = 0  # tasks that run and do not block
        self._long = 0.0  # which share of recent tasks was long
        self._ended = 0  # tasks that have ended
        self._progress = 0.0  # when a thread last saw that a task had ended, or began while no other ran
        self._seen = 0  # ``_ended`` at that time
        self._watched = False  # a polling thread polls briefly, to run waiting tasks if those that run are long
        self._called = 0.0  # when another thread was last woken for waiting tasks
        self._minders: set[int] = set()  # ids of polling threads whose timeout ends with the next alarm
        self._alive = 0  # threads that have not ended, and those that are about to be started
        self._closing = False

    def start(self) -> None:
        """Begin to listen."""
        with self._lock:
            self._polling += 1
            self._alive += 1
        self._add_thread()

    def submit(self, task: Task) -> None:
        """Run ``task`` on a thread of the pool, soon."""
        with self._lock:
            self._tasks.append(task)
        self._endpoint.wake()

    def call_at(self, when: float, task: Task) -> None:
        """Run ``task``, which must be short, at the time ``when`` of the runtime's clock."""
        with self._lock:
            sooner = not self._alarms or when < self._alarms[0][0]
            heapq.heappush(self._alarms, (when, next(self._numbers), task))
            if sooner:
                self._minders.clear()  # they would sleep for too long
        if sooner:
            self._endpoint.wake()

    @property
    def inside(self) -> bool:
        """Whether the calling thread runs a task of this pool."""
        return getattr(self._here, "running", False)

    def blocking(self, observer: Observer | None = None) -> contextlib.AbstractContextManager[None]:
        """A context for code in which the calling thread waits. Inside, its task does not count against the limit.

        Frames that wait to be sent together are sent first: a frame of this thread must not wait for this thread.

        Args:
            observer: Records how long the thread waits.
        """
        if self._endpoint.unflushed:
            self._endpoint.flush()
        waiting = _Blocking(self) if getattr(self._here, "running", False) else _NOTHING
        return waiting if observer is None else observer.waiting(waiting)

    def _pause(self) -> None:
        self._here.running = False
        with self._lock:
            self._running -= 1
            self._endpoint.quiet = not self._running
            self._endpoint.blocked += 1
            waiting = bool(self._tasks)
        if self._endpoint.parked:
            self._endpoint.unpark()
        if waiting:
            self._endpoint.wake()

    def _go_on(self) -> None:
        self._here.running = True
        with self._lock:
            self._running += 1
            self._endpoint.quiet = False
            self._endpoint.blocked -= 1

    def close(self, timeout: float) -> list[str]:
        """Stop after the tasks that run now; return the names of threads that did not end in time.

        If the calling thread belongs to the pool, this does not wait for it.
        """
        with self._lock:
            self._closing = True
            self._tasks.clear()
            self._alarms.clear()
            own = threading.current_thread() in self._threads
        deadline = self._runtime.now() + timeout
        pause = self._runtime.one_shot()
        while self._alive > own and self._runtime.now() < deadline:
            self._endpoint.wake()
            pause.wait(0.001)
        with self._lock:
            threads = self._threads - {threading.current_thread()}
        return [
            thread.name
            for thread in sorted(threads, key=lambda thread: thread.name)
            if not self._runtime.join(thread, max(deadline - self._runtime.now(), 0.01))
        ]

    # The threads.

    def _add_thread(self) -> None:
        """Start a thread. The caller has counted it as polling and alive already."""
        try:
            thread = self._runtime.spawn(self._work, name=f"{self._name}-{next(self._numbers)}")
        except RuntimeError as error:  # the system has no more threads
            log.error("%s cannot start a thread, so it does not listen while its handlers run: %s", self._name, error)
            with self._lock:
                self._polling -= 1
                self._alive -= 1
            return
        with self._lock:
            self._threads.add(thread)

    def _work(self) -> None:
        # torch.set_num_threads holds for a thread once it has asked for the number. Until then oneDNN uses all cores,
        # and its results differ in the last bits from those of the main thread.
        torch.get_num_threads()
        here, effort, forks = self._here, self._runtime.effort, runtime.forks
        task = self._next(0, 0.0)
        while task is not None:
            here.running = True
            start, count = effort(), 0
            while task is not None:
                try:
                    try:
                        if self.prepare is not None:
                            self.prepare()
                    finally:
                        task()  # even if ``prepare`` failed: a caller waits for the task
                except BaseException as error:
                    if runtime.forks != forks:
                        runtime.end_forked(error)
                    log.exception("%s: a task failed", self._name)
                if runtime.forks != forks:
                    runtime.end_forked(None)
                count += 1
                task = None  # drops what the task holds before the next one is awaited
                task = self._following() if self._tasks else None
            here.running = False
            task = self._next(count, effort() - start)
        with self._lock:
            self._threads.discard(threading.current_thread())
            self._alive -= 1

    def _following(self) -> Task | None:
        """The next task of a row, for a thread that alone runs tasks. None: look at everything else first."""
        with self._lock:
            if self._running != 1 or not self._tasks or self._long > 0.5:
                return None
            self._ended += 1
            return self._tasks.popleft()

    def _next(self, count: int, cost: float) -> Task | None:
        """Poll until there is a task for this thread. None: the thread should end.

        Args:
            count: How many tasks the thread has run in a row since the last call; 0 for the first call.
            cost: Their processor time, in seconds.
        """
        endpoint, now, me = self._endpoint, self._runtime.now, threading.get_ident()
        fresh: Iterable[Task] = ()
        idle = watching = polled = ticked = False
        while True:
            task = alarm = None
            with self._lock:
                time = now()
                if count:
                    self._account(count, cost, time)
                    count = 0
                self._tasks.extend(fresh)
                self._watched &= not watching
                self._minders.discard(me)
                if self._closing or (idle and self._polling > _SPARE_THREADS and not self._tasks):
                    self._polling -= 1
                    return None
                if self._alarms and self._alarms[0][0] <= time:
                    alarm = heapq.heappop(self._alarms)[2]
                    watching = False
                elif self._tasks and (not self._running or self._may_run(time)):
                    task, then = self._take(time, polled)
                else:
                    watching, timeout = self._plan_poll(time, me)
            if task is not None:
                if then is not None:
                    then()
                return task
            fresh, idle, polled = (), False, True
            if alarm is not None:
                self._run_alarm(alarm)
                continue
            if endpoint.unflushed:
                endpoint.flush()
            if endpoint.parked and (ticked or not self._tasks):
                endpoint.unpark()
            try:
                event = endpoint.poll(timeout)
                ticked = watching and event is None
                idle = event is None and timeout == _IDLE_SECONDS
                fresh = () if event is None else self._deliver(event)
            except Exception:
                log.exception("%s lost an event", self._name)

    # The caller holds the lock.

    def _account(self, count: int, cost: float, now: float) -> None:
        """Note that the tasks of the calling thread have ended and that the thread polls again."""
        self._running -= 1
        self._endpoint.quiet = not self._running
        self._polling += 1
        self._long += ((cost > count * _LONG_TASK_SECONDS) - self._long) * min(count, 8) / 8
        self._ended += 1
        self._progress, self._seen = now, self._ended

    def _take(self, now: float, polled: bool) -> tuple[Task, Callable[[], None] | None]:
        """The next task, for the calling thread, which stops polling; and a function to call before the task."""
        task = self._tasks.popleft()
        if not self._running:
            self._progress, self._seen = now, self._ended
        self._running += 1
        self._endpoint.quiet = False
        then: Callable[[], None] | None = None
        # A thread that was woken for waiting tasks and takes one has to wake the next thread.
        if self._tasks and not self._watched and (polled or self._called + _STALLED_SECONDS <= now):
            self._called = now
            then = self._endpoint.wake_soon  # soon: most tasks end before another thread gets the interpreter
        if self._polling == 1:
            self._alive += 1
            return task, self._add_thread  # the new thread polls in place of this one
        self._polling -= 1
        if self._alarms and not self._minders and self._alarms[0][0] < now + _IDLE_SECONDS:
            then = self._endpoint.wake
        return task, then

    def _plan_poll(self, now: float, me: int) -> tuple[bool, float]:
        """How the calling thread polls: whether it watches the tasks that wait, and for how many seconds."""
        watching = bool(self._tasks) and not self._watched
        timeout = _STALLED_SECONDS if watching else _IDLE_SECONDS
        self._watched |= watching
        # Two threads wake up for the next alarm. If one of them takes a task, it need not wake another thread.
        if self._alarms and len(self._minders) < _SPARE_THREADS:
            self._minders.add(me)
            timeout = min(timeout, self._alarms[0][0] - now)
        return watching, timeout

    def _may_run(self, now: float) -> bool:
        """Whether one more task may run; see [Note: joining threads]."""
        ended = self._ended - self._seen
        silent = now - self._progress
        if ended and silent >= _STALLED_SECONDS:
            self._progress, self._seen = now, self._ended
        if self._running < self._limit:
            return self._long > 0.5 or (ended <= 1 and silent >= _STALLED_SECONDS)
        return not ended and silent >= _STUCK_SECONDS

    @staticmethod
    def _run_alarm(alarm: Task) -> None:
        try:
            alarm()
        except Exception:
            log.exception("an alarm failed")


class _Blocking(contextlib.AbstractContextManager[None]):
    __slots__ = ("_thread_pool",)

    def __init__(self, thread_pool: ThreadPool) -> None:
        self._thread_pool = thread_pool

    def __enter__(self) -> None:
        self._thread_pool._pause()

    def __exit__(self, *_: object) -> None:
        self._thread_pool._go_on()


_NOTHING = contextlib.nullcontext()
