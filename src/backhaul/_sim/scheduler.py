"""The scheduler of a simulation: one sim task runs at a time, in virtual time and in an order drawn from a seed.

A sim task is an OS thread that runs only while it has the baton. A task that would block gives the baton to another
task that can run, chosen at random. If no task can run, time jumps to the next timer. Nothing here ever sleeps, and
nothing here knows of frames.

[Note: atoms] Between two places that may block, no other task runs. Plain locks are therefore never contended, as long
as no lock is held across such a place. Locks that are held across waits come from ``Runtime.lock``.
"""

from __future__ import annotations

import collections
import functools
import heapq
import itertools
import random
from collections.abc import Callable
from types import TracebackType
from typing import Any

from backhaul._sim.tasks import Killed, SimProcess, SimTask, SimThread
from backhaul._sim.trace import Trace

_QUANTUM_SECONDS = 0.00002  # processor time that a task uses between two waits, on average
_LONG_QUANTUM_PROBABILITY = 0.02
_LONG_QUANTUM_FACTOR = 50
_SWEEP_THREADS = 256  # ended threads are dropped after so many starts


class DeadlockError(RuntimeError):
    """No task can ever run again, and at least one waits. The message says which, and for what."""


# Over the limit because ready tasks, timers and processes must change together: one object decides what runs next.
class Scheduler:
    """Passes the baton on. ``with scheduler:`` makes the calling thread the first task, and kills all other tasks at
    its end. Only the task that runs may call the methods.

    Args:
        seed: Determines all random choices.
        yield_probability: How often a task lets others run at places where it need not block.
        keep_trace: Whether to keep the lines of the trace, and not only their hash.
    """

    def __init__(self, seed: int, *, yield_probability: float = 0.1, keep_trace: bool = False) -> None:
        self.random = random.Random(seed)
        self.trace = Trace(keep_trace)
        self.now = 0.0
        self.switches = 0
        self.outside = SimProcess("outside")
        self.limit = float("inf")  # virtual time at which the first task gets a TimeoutError
        self._processes: list[SimProcess] = [self.outside]
        self._yield_probability = yield_probability
        self._numbers = itertools.count(1)
        self._ready: list[SimTask] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._deferred: collections.deque[Callable[[], None]] = collections.deque()  # by destructors
        self._threads: list[SimThread] = []
        self._first: SimTask | None = None
        self._running: SimTask | None = None

    # The first task.

    def __enter__(self) -> Scheduler:
        self._first = self._running = SimTask("main", self.outside)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._first = None
        for process in self._processes:
            self.kill(process)
        self._running = None
        for thread in self._threads:
            thread.join()  # the tasks have ended; their OS threads must not outlive the simulation

    @property
    def running(self) -> SimTask:
        """The task that runs."""
        assert self._running is not None, "this thread is not inside a simulation"
        return self._running

    # Processes.

    def new_process(self, name: str) -> SimProcess:
        """Create a simulated process."""
        made = SimProcess(name)
        self._processes.append(made)
        return made

    def pause(self, process: SimProcess) -> None:
        """Stop all tasks of a process until ``resume``."""
        process.paused = True

    def resume(self, process: SimProcess) -> None:
        """Let the tasks of a process run again."""
        process.paused = False
        self._ready += process.parked
        process.parked.clear()
        for action in process.on_resume:
            action()
        process.on_resume.clear()

    def kill(self, process: SimProcess) -> None:
        """End all tasks of a process except the one that calls. Each is unwound at once and can do nothing more."""
        process.dead = True
        self.resume(process)
        me = self.running
        while victims := [task for task in process.tasks if task is not me]:
            for victim in victims:
                victim.successor = me
                victim.wait_number = 0
                self._running = victim
                victim.baton.release()
                me.baton.acquire()
        self._ready = [task for task in self._ready if not task.done]

    # Tasks.

    def spawn(self, target: Callable[[], None], *, name: str, process: SimProcess) -> SimThread:
        """Start a task."""
        if process.dead:
            raise Killed
        task = SimTask(name, process)
        thread = SimThread(task, target, self._end)
        process.tasks[task] = None
        thread.start()
        self._threads.append(thread)
        if not len(self._threads) % _SWEEP_THREADS:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._ready.append(task)
        return thread

    def _end(self, task: SimTask) -> None:
        """Pass the baton on for the last time."""
        task.done = True
        del task.process.tasks[task]
        for joiner in task.joiners:  # they remove themselves from the list
            self.wake(joiner)
        following = task.successor if task.successor is not None else self._pick()
        self._running = following
        following.baton.release()

    def join(self, task: SimTask, timeout: float | None) -> bool:
        """Wait for the end of a task. Returns whether it has ended."""
        deadline = None if timeout is None else self.now + timeout
        while not task.done:
            me = self.running
            task.joiners.append(me)
            try:
                if not self.wait(f"join of {task.name}", None if deadline is None else deadline - self.now):
                    break
            finally:
                task.joiners.remove(me)
        return task.done

    # Waiting.

    def wait(self, where: str, timeout: float | None = None) -> bool:
        """Give the baton away until another task wakes this one. Returns False if ``timeout`` seconds passed first."""
        me = self.running
        if me.process.dead and me is not self._first:
            raise Killed
        me.wait_number = number = next(self._numbers)
        me.where = where
        if timeout is not None:
            self._add_timer(self.now + max(timeout, 0.0), number, functools.partial(self._expire, me, number))
        self._switch(me)
        if me.process.dead and me is not self._first:
            raise Killed
        if me.error is not None:
            error, me.error = me.error, None
            raise error
        return me.woken

    def wake(self, task: SimTask, item: Any = None) -> bool:
        """End the wait of a task and hand ``item`` to it. Returns False if the task does not wait."""
        if not task.wait_number:
            return False
        task.wait_number = 0
        task.woken = True
        task.item = item
        self._ready.append(task)
        return True

    def _expire(self, task: SimTask, number: int) -> None:
        if task.wait_number == number:
            task.wait_number = 0
            task.woken = False
            self._ready.append(task)

    def give_way(self, *, always: bool = False) -> None:
        """Let another task run with the yield probability, or ``always``, although this one need not block."""
        me = self._running
        if me is None or (me.process.dead and me is not self._first):
            return
        if always or self.random.random() < self._yield_probability:
            me.wait_number = next(self._numbers)
            me.where = "the others"
            self.wake(me)
            self._switch(me)
            if me.process.dead and me is not self._first:
                raise Killed

    def _switch(self, me: SimTask) -> None:
        following = self._pick()
        if following is not me:
            self.switches += 1
            self._running = following
            following.baton.release()
            me.baton.acquire()

    # Time.

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Call ``action`` at a virtual time. It must not wait."""
        self._add_timer(when, next(self._numbers), action)

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Call ``action`` after ``seconds`` of virtual time. It must not wait."""
        self.at(self.now + seconds, action)

    def soon(self, action: Callable[[], None]) -> None:
        """Call ``action`` before the next task runs. It must not wait. For destructors, which may run at any place."""
        self._deferred.append(action)

    def _add_timer(self, when: float, number: int, action: Callable[[], None]) -> None:
        if when < float("inf"):
            heapq.heappush(self._timers, (when, number, action))

    def _pick(self) -> SimTask:
        """Choose the task to run next. Advances time by what the running task has used."""
        me, timers = self.running, self._timers
        quantum = self.random.expovariate(1 / _QUANTUM_SECONDS)
        if self.random.random() < _LONG_QUANTUM_PROBABILITY:
            quantum *= _LONG_QUANTUM_FACTOR
        me.effort += quantum
        self.now += quantum
        while True:
            while self._deferred:
                self._deferred.popleft()()
            while timers and timers[0][0] <= self.now:
                heapq.heappop(timers)[2]()
            ready = self._ready
            while ready:
                place = int(self.random.random() * len(ready))
                ready[place], ready[-1] = ready[-1], ready[place]
                task = ready.pop()
                if task.process.paused:
                    task.process.parked.append(task)
                    continue
                self.trace.note(f"{self.now:.9f} {task.name}")
                return task
            if not timers:
                self._raise_in_first(DeadlockError(f"no task can run at {self.now:.6f} s\n{self.describe()}"))
            elif timers[0][0] > self.limit:
                limit, self.limit = self.limit, float("inf")
                self._raise_in_first(
                    TimeoutError(f"the simulation did not end in {limit:g} s of virtual time\n{self.describe()}")
                )
            else:
                self.now = timers[0][0]

    def _raise_in_first(self, error: BaseException) -> None:
        first = self._first
        assert first is not None, "a task waits, but the simulation is over"
        if first.error is not None or not (first.wait_number or first in first.process.parked):
            raise error
        first.error = error
        self.wake(first)

    def describe(self) -> str:
        """Which tasks wait, and for what."""
        lines = [f"  {task.name} waits for {task.where}" for process in self._processes for task in process.tasks]
        if self._first is not None:
            lines.insert(0, f"  {self._first.name} waits for {self._first.where}")
        return "\n".join(lines)
