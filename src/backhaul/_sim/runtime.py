"""What a simulated worker uses in place of threads, waits and the clock."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Any

from backhaul._runtime.runtime import Lock, OneShotEvent, Queue, Runtime
from backhaul._sim.scheduler import Scheduler
from backhaul._sim.tasks import SimProcess, SimTask, SimThread


class SimOneShotEvent(OneShotEvent):
    """An event that sim tasks wait for."""

    __slots__ = ("_scheduler", "_waiters")

    def __init__(self, scheduler: Scheduler) -> None:
        self.opened = False
        self.on_open = None
        self._scheduler = scheduler
        self._waiters: list[SimTask] = []

    def open(self) -> None:
        self.opened = True
        if self.on_open is not None:
            self.on_open()
        for waiter in self._waiters:
            self._scheduler.wake(waiter)
        self._waiters.clear()

    def wait(self, timeout: float | None = None) -> bool:
        scheduler = self._scheduler
        deadline = None if timeout is None else scheduler.now + timeout
        while not self.opened:
            left = None if deadline is None else deadline - scheduler.now
            if left is not None and left <= 0:
                break
            me = scheduler.running
            self._waiters.append(me)
            if not scheduler.wait("a one-shot event", left) and me in self._waiters:
                self._waiters.remove(me)
        return self.opened


class SimLock:
    """A lock that may be held across waits."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._held = False
        self._waiters: list[SimTask] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = self._scheduler
        deadline = None if timeout < 0 else scheduler.now + timeout
        while self._held:
            left = None if deadline is None else deadline - scheduler.now
            if not blocking or (left is not None and left <= 0):
                return False
            me = scheduler.running
            self._waiters.append(me)
            try:
                scheduler.wait("a lock", left)
            finally:
                if me in self._waiters:
                    self._waiters.remove(me)
        self._held = True
        return True

    def release(self) -> None:
        self._held = False
        for waiter in self._waiters:  # the first of them to run gets the lock
            self._scheduler.wake(waiter)
        self._waiters.clear()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimQueue:
    """A queue. Any code may fill it, destructors included. One sim task empties it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._items: collections.deque[Any] = collections.deque()
        self._reader: SimTask | None = None

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._scheduler.soon(self._notice)

    def _notice(self) -> None:
        if self._reader is not None and self._items:
            self._scheduler.wake(self._reader)

    def get(self) -> Any:
        while not self._items:
            self._reader = self._scheduler.running
            try:
                self._scheduler.wait("a queue")
            finally:
                self._reader = None
        return self._items.popleft()

    def empty(self) -> bool:
        return not self._items


class SimRuntime(Runtime):
    """Threads, waits and the clock of one worker in a simulation.

    Args:
        scheduler: The scheduler of the simulation.
        process: The simulated process that its threads belong to.
        clock: Seconds that its clock is ahead. Clocks of different hosts are unrelated.
    """

    def __init__(self, scheduler: Scheduler, process: SimProcess, *, clock: float = 0.0) -> None:
        self.scheduler = scheduler
        self.process = process
        self.now = lambda: scheduler.now + clock
        self.effort = lambda: scheduler.running.effort

    def one_shot(self) -> OneShotEvent:
        return SimOneShotEvent(self.scheduler)

    def lock(self) -> Lock:
        return SimLock(self.scheduler)

    def queue(self) -> Queue:
        return SimQueue(self.scheduler)

    def spawn(self, target: Callable[[], None], *, name: str) -> threading.Thread:
        return self.scheduler.spawn(target, name=name, process=self.process)

    def join(self, thread: threading.Thread, timeout: float | None = None) -> bool:
        assert isinstance(thread, SimThread)
        over = self.scheduler.join(thread.task, timeout)
        if over:
            thread.join()  # the task has given the baton away for the last time, so this does not block for long
        return over
