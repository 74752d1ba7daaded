"""Threads of a simulation: many, of which one runs at a time, in virtual time and in an order drawn from a seed.

A *strand* is an OS thread that runs only while it has the baton. Whatever would block gives the baton to the next
strand that can run, chosen at random; if none can, time jumps to the next timer. Nothing here ever sleeps. A *home* is
what can be paused or killed as a whole: one worker. Nothing here knows of frames.

[Note: atoms] Between two places that may block nothing else runs, so plain locks are never contended, as long as none
is held across such a place. Those that are come from ``Runtime.lock``.
"""

from __future__ import annotations

import collections
import contextvars
import functools
import hashlib
import heapq
import itertools
import random
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

_QUANTUM = 0.00002  # seconds of processor time that a strand takes between two waits, on average
_LONG = 0.02, 50  # how often it takes longer, and how many times


class Killed(BaseException):
    """Unwinds a strand whose home is dead. Caught by nobody: what catches it meets it again at its next wait."""


class DeadlockError(RuntimeError):
    """Nothing can ever run again, and somebody waits. The message says who, and where."""


class SimProcess:
    """What strands belong to, and what faults strike as a whole."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dead = False
        self.paused = False
        self.strands: dict[SimTask, None] = {}
        self.parked: list[SimTask] = []  # could run if the home were not paused
        self.on_resume: list[Callable[[], None]] = []


class SimTask:
    """One thread of the simulation."""

    __slots__ = (
        "baton",
        "done",
        "doom",
        "effort",
        "gift",
        "heir",
        "home",
        "joiners",
        "name",
        "ticket",
        "where",
        "woken",
    )

    def __init__(self, name: str, home: SimProcess) -> None:
        self.name = name
        self.home = home
        self.baton = threading.Lock()
        self.baton.acquire()
        self.ticket = 0  # of the wait it is in
        self.woken = False
        self.where = "its start"
        self.gift: Any = None  # what whoever woke it has for it
        self.doom: BaseException | None = None  # to be raised at its next chance
        self.heir: SimTask | None = None  # gets the baton when this one ends
        self.effort = 0.0
        self.done = False
        self.joiners: list[SimTask] = []


class Trace:
    """What happened, as lines; their hash tells whether two runs were the same.

    Args:
        keep: Whether to keep the lines too.
    """

    def __init__(self, keep: bool = False) -> None:
        self.lines: list[str] | None = [] if keep else None
        self._fresh: list[str] = []
        self._hash = hashlib.blake2b(digest_size=16)

    def note(self, line: str) -> None:
        """Something happened."""
        self._fresh.append(line)
        if len(self._fresh) >= 512:
            self._settle()

    def _settle(self) -> None:
        self._hash.update("\n".join((*self._fresh, "")).encode())
        if self.lines is not None:
            self.lines += self._fresh
        self._fresh.clear()

    @property
    def digest(self) -> str:
        """Names all that happened so far."""
        self._settle()
        return self._hash.hexdigest()


class Scheduler:
    """Gives the baton on. ``with scheduler:`` makes the calling thread the first strand; on leaving all others are
    killed. All methods are for the strand that runs.

    Args:
        seed: Where all choices come from.
        eagerness: How often a strand gives way at places where it need not.
        keep_trace: Whether to keep the trace, and not only its hash.
    """

    def __init__(self, seed: int, *, eagerness: float = 0.1, keep_trace: bool = False) -> None:
        self.random = random.Random(seed)
        self.trace = Trace(keep_trace)
        self.now = 0.0
        self.switches = 0
        self.outside = SimProcess("outside")
        self.homes: list[SimProcess] = [self.outside]
        self.limit = float("inf")  # virtual time at which the first strand is told that it takes too long
        self._eagerness = eagerness
        self._numbers = itertools.count(1)
        self._ready: list[SimTask] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._rung: collections.deque[Callable[[], None]] = collections.deque()  # by destructors
        self._threads: list[SimThread] = []
        self._first: SimTask | None = None
        self._running: SimTask | None = None

    # The first strand.

    def __enter__(self) -> Scheduler:
        self._first = self._running = SimTask("main", self.outside)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._first = None
        for home in self.homes:
            self.kill(home)
        self._running = None
        for thread in self._threads:
            thread.join()  # they have nothing left to do that matters, but should not outlive the simulation

    @property
    def running(self) -> SimTask:
        """The strand that runs."""
        assert self._running is not None, "not inside of a simulation"
        return self._running

    # Homes.

    def home(self, name: str) -> SimProcess:
        """Make a home."""
        made = SimProcess(name)
        self.homes.append(made)
        return made

    def pause(self, home: SimProcess) -> None:
        """Let none of its strands run."""
        home.paused = True

    def resume(self, home: SimProcess) -> None:
        """Let them run again."""
        home.paused = False
        self._ready += home.parked
        home.parked.clear()
        for action in home.on_resume:
            action()
        home.on_resume.clear()

    def kill(self, home: SimProcess) -> None:
        """Stop all its strands for good, but the one that calls: each is unwound at once, and can do nothing more."""
        home.dead = True
        self.resume(home)
        me = self.running
        while victims := [sim_task for sim_task in home.strands if sim_task is not me]:
            for victim in victims:
                victim.heir = me
                victim.ticket = 0
                self._running = victim
                victim.baton.release()
                me.baton.acquire()
        self._ready = [sim_task for sim_task in self._ready if not sim_task.done]

    # Strands.

    def spawn(self, target: Callable[[], None], *, name: str, home: SimProcess) -> SimThread:
        """Start a strand."""
        if home.dead:
            raise Killed
        sim_task = SimTask(name, home)
        thread = SimThread(self, sim_task, target)
        home.strands[sim_task] = None
        thread.start()
        self._threads.append(thread)
        if not len(self._threads) % 256:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._ready.append(sim_task)
        return thread

    def _end(self, sim_task: SimTask) -> None:
        """The last thing a strand does with the baton."""
        sim_task.done = True
        del sim_task.home.strands[sim_task]
        for joiner in sim_task.joiners:  # they take themselves off
            self.wake(joiner)
        following = sim_task.heir if sim_task.heir is not None else self._pick()
        self._running = following
        following.baton.release()

    def join(self, sim_task: SimTask, timeout: float | None) -> bool:
        """Wait for the end of a strand; whether it came."""
        deadline = None if timeout is None else self.now + timeout
        while not sim_task.done:
            me = self.running
            sim_task.joiners.append(me)
            try:
                if not self.wait(f"join of {sim_task.name}", None if deadline is None else deadline - self.now):
                    break
            finally:
                sim_task.joiners.remove(me)
        return sim_task.done

    # Waiting.

    def wait(self, where: str, timeout: float | None = None) -> bool:
        """Give the baton away until somebody wakes this strand; False if ``timeout`` seconds passed first."""
        me = self.running
        if me.home.dead and me is not self._first:
            raise Killed
        me.ticket = ticket = next(self._numbers)
        me.where = where
        if timeout is not None:
            self._put(self.now + max(timeout, 0.0), ticket, functools.partial(self._expire, me, ticket))
        self._switch(me)
        if me.home.dead and me is not self._first:
            raise Killed
        if me.doom is not None:
            doom, me.doom = me.doom, None
            raise doom
        return me.woken

    def wake(self, sim_task: SimTask, gift: Any = None) -> bool:
        """Let a strand that waits go on; False if it does not wait (any more)."""
        if not sim_task.ticket:
            return False
        sim_task.ticket = 0
        sim_task.woken = True
        sim_task.gift = gift
        self._ready.append(sim_task)
        return True

    def _expire(self, sim_task: SimTask, ticket: int) -> None:
        if sim_task.ticket == ticket:
            sim_task.ticket = 0
            sim_task.woken = False
            self._ready.append(sim_task)

    def give_way(self, *, surely: bool = False) -> None:
        """A place where another strand may go on although this one could."""
        me = self._running
        if me is None or (me.home.dead and me is not self._first):
            return
        if surely or self.random.random() < self._eagerness:
            me.ticket = next(self._numbers)
            me.where = "the others"
            self.wake(me)
            self._switch(me)
            if me.home.dead and me is not self._first:
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
        """Call ``action``, which must not wait, at a time."""
        self._put(when, next(self._numbers), action)

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Call ``action``, which must not wait, so many seconds later."""
        self.at(self.now + seconds, action)

    def soon(self, action: Callable[[], None]) -> None:
        """Call ``action``, which must not wait, before the next strand goes on. For destructors, which may run in the
        middle of anything.
        """
        self._rung.append(action)

    def _put(self, when: float, number: int, action: Callable[[], None]) -> None:
        if when < float("inf"):
            heapq.heappush(self._timers, (when, number, action))

    def _pick(self) -> SimTask:
        """The next strand to run."""
        me, timers = self.running, self._timers
        quantum = self.random.expovariate(1 / _QUANTUM)
        if self.random.random() < _LONG[0]:
            quantum *= _LONG[1]
        me.effort += quantum
        self.now += quantum
        while True:
            while self._rung:
                self._rung.popleft()()
            while timers and timers[0][0] <= self.now:
                heapq.heappop(timers)[2]()
            ready = self._ready
            while ready:
                place = int(self.random.random() * len(ready))
                ready[place], ready[-1] = ready[-1], ready[place]
                sim_task = ready.pop()
                if sim_task.home.paused:
                    sim_task.home.parked.append(sim_task)
                    continue
                self.trace.note(f"{self.now:.9f} {sim_task.name}")
                return sim_task
            if not timers:
                self._doom(DeadlockError(f"nothing can ever run again at {self.now:.6f} s\n{self.describe()}"))
            elif timers[0][0] > self.limit:
                limit, self.limit = self.limit, float("inf")
                self._doom(TimeoutError(f"not over at {limit:g} s of virtual time\n{self.describe()}"))
            else:
                self.now = timers[0][0]

    def _doom(self, error: BaseException) -> None:
        first = self._first
        assert first is not None, "somebody waits, but the simulation is over"
        if first.doom is not None or not (first.ticket or first in first.home.parked):
            raise error
        first.doom = error
        self.wake(first)

    def describe(self) -> str:
        """Who waits where."""
        lines = [f"  {sim_task.name} waits for {sim_task.where}" for home in self.homes for sim_task in home.strands]
        if self._first is not None:
            lines.insert(0, f"  {self._first.name} waits for {self._first.where}")
        return "\n".join(lines)


class SimThread(threading.Thread):
    """The OS thread of a strand."""

    def __init__(self, scheduler: Scheduler, sim_task: SimTask, target: Callable[[], None]) -> None:
        super().__init__(name=sim_task.name, daemon=True)
        self.sim_task = sim_task
        self._scheduler: Scheduler | None = scheduler
        self._todo: Callable[[], None] | None = target

    def run(self) -> None:
        sim_task, scheduler, todo = self.sim_task, self._scheduler, self._todo
        assert scheduler is not None
        assert todo is not None
        sim_task.baton.acquire()
        # What dies with the thread has to die while it has the baton.
        self._todo = self._scheduler = None
        context = contextvars.Context()
        try:
            if not sim_task.home.dead:
                context.run(todo)
        except Killed:
            pass
        except BaseException:
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), self)))
        del context, todo
        scheduler._end(sim_task)
