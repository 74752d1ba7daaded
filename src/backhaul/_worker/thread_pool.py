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
from collections.abc import Callable, Iterable

from backhaul._runtime import runtime
from backhaul._runtime.runtime import Runtime
from backhaul._transport.base import Endpoint, Event

log = logging.getLogger("backhaul")

Task = Callable[[], None]

_IDLE = 5.0  # seconds without an event after which a thread ends
_SPARE = 2  # threads that stay
_LONG = 0.0005  # seconds of processor time that make a task worth a thread of its own
_STALLED = 0.001  # seconds without a task's end after which another thread joins
_STUCK = 0.05  # and after which tasks run beyond the limit


class ThreadPool:
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
        self.prepare: Callable[[], None] | None = None  # called by a thread before each task
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
        self._minders: set[int] = set()  # polling threads that wake up in time for the next alarm
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
                self._minders.clear()  # they had meant to sleep for longer
        if sooner:
            self._endpoint.wake()

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
        here, effort, forks = self._here, self._runtime.effort, runtime.forks
        task = self._next(None)
        while task is not None:
            here.running = True
            start = effort()
            try:
                try:
                    if self.prepare is not None:
                        self.prepare()
                finally:
                    task()  # somebody waits for it, whatever is wrong with this thread
            except BaseException as error:
                if runtime.forks != forks:
                    runtime.end_forked(error)
                log.exception("a task failed")
            if runtime.forks != forks:
                runtime.end_forked(None)
            del task
            here.running = False
            task = self._next(effort() - start)
        with self._lock:
            self._threads.discard(threading.current_thread())
            self._alive -= 1

    def _next(self, cost: float | None) -> Task | None:
        """Poll until there is a task for this thread. None: the thread should end.

        Args:
            cost: Of the task that has just ended, in seconds of processor time.
        """
        endpoint, now, me = self._endpoint, self._runtime.now, threading.get_ident()
        fresh: Iterable[Task] = ()
        idle = watching = polled = False
        while True:
            task = alarm = None
            with self._lock:
                time = now()
                if cost is not None:
                    self._account(cost, time)
                    cost = None
                self._tasks.extend(fresh)
                self._watched &= not watching
                self._minders.discard(me)
                if self._closing or (idle and self._polling > _SPARE and not self._tasks):
                    self._polling -= 1
                    return None
                if self._alarms and self._alarms[0][0] <= time:
                    alarm = heapq.heappop(self._alarms)[2]
                    watching = False
                elif self._tasks and (not self._running or self._may_run(time)):
                    task, then = self._take(time, polled)
                else:
                    watching, patience = self._posture(time, me)
            if task is not None:
                if then is not None:
                    then()
                return task
            fresh, idle, polled = (), False, True
            if alarm is not None:
                self._ring(alarm)
                continue
            endpoint.flush()
            try:
                event = endpoint.poll(patience)
                if event is not None:
                    fresh = self._deliver(event)
                else:
                    idle = patience == _IDLE
            except Exception:
                log.exception("%s lost an event", self._name)

    # With the lock held.

    def _account(self, cost: float, now: float) -> None:
        """The task of the calling thread has ended, and the thread polls again."""
        self._running -= 1
        self._endpoint.quiet = not self._running
        self._polling += 1
        self._long += ((cost > _LONG) - self._long) / 8
        self._progress = now

    def _take(self, now: float, polled: bool) -> tuple[Task, Callable[[], None] | None]:
        """The next task, for the calling thread, which polls no longer; and what to do before it runs."""
        task = self._tasks.popleft()
        if not self._running:
            self._progress = now
        self._running += 1
        self._endpoint.quiet = False
        then: Callable[[], None] | None = None
        # A thread that was called for and takes a task has to call for the next.
        if self._tasks and not self._watched and (polled or self._called + _STALLED <= now):
            self._called = now
            then = self._endpoint.wake_soon  # most tasks are over before another has got hold of the interpreter
        if self._polling == 1:
            self._alive += 1
            return task, self._add_thread  # it takes our place
        self._polling -= 1
        if self._alarms and not self._minders and self._alarms[0][0] < now + _IDLE:
            then = self._endpoint.wake
        return task, then

    def _posture(self, now: float, me: int) -> tuple[bool, float]:
        """How the calling thread is to poll: whether looking after the tasks that wait, and for how long."""
        watching = bool(self._tasks) and not self._watched
        patience = _STALLED if watching else _IDLE
        self._watched |= watching
        # Two of them mind the next alarm: one may take a task, and need not wake another for that.
        if self._alarms and len(self._minders) < _SPARE:
            self._minders.add(me)
            patience = min(patience, self._alarms[0][0] - now)
        return watching, patience

    def _may_run(self, now: float) -> bool:
        """Whether another task may join those that run; see [Note: company]."""
        if self._running < self._limit:
            return self._long > 0.5 or self._progress + _STALLED <= now
        return self._progress + _STUCK <= now

    @staticmethod
    def _ring(alarm: Task) -> None:
        try:
            alarm()
        except Exception:
            log.exception("an alarm failed")


class _Blocking(contextlib.AbstractContextManager[None]):
    __slots__ = ("_crew",)

    def __init__(self, thread_pool: ThreadPool) -> None:
        self._crew = thread_pool

    def __enter__(self) -> None:
        self._crew._pause()

    def __exit__(self, *_: object) -> None:
        self._crew._go_on()


_NOTHING = contextlib.nullcontext()
