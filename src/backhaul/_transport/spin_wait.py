"""Spin before sleeping: the one loop that polls for a message without giving up the processor.

[Note: spinning] A processor that goes to sleep takes tens of microseconds to wake up, and is slow for a while after.
Most replies come sooner than that. A thread that waits for a message therefore polls a number of times before it
sleeps. It does so only if recent messages came soon, if nothing else runs in its process (other threads would want the
interpreter), and if processors are not scarce. Between two polls the thread offers the processor to others. If others
keep the processor for long, they need it more, and the thread stops spinning for a number of waits.

Knows neither channels nor sockets: the caller passes the function that polls.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")

MAX_SPINS = 300 if len(os.sched_getaffinity(0)) > 1 else 0
"""How often to poll before sleeping. One poll takes about a microsecond."""

SPIN_SECONDS = 0.002
"""The longest time to spin. It is only reached when others keep the processor."""

offer = os.sched_yield
"""Called between two polls."""

_PREEMPTED_SECONDS = 0.001  # time without the processor, during one spin, that means that processors are scarce
_MIN_PAUSE, _MAX_PAUSE = 4, 128  # waits without spinning after processors were scarce
_SOON_SECONDS = 0.0005  # a message that comes within this time would come sooner if the thread did not sleep


class Busyness(Protocol):
    """Tells a thread that spins whether other threads want the interpreter. Endpoints do."""

    quiet: bool
    """Whether nothing runs in this process but threads that wait for messages."""

    wakes: int
    """How often a thread wanted one of the threads that poll to return."""


class Spinning(Protocol):
    """What a thread spins for."""

    wanted: bool
    """Whether another thread waits for the spinning thread to stop."""


class SpinPolicy:
    """Decides whether to spin, from how soon the last messages came. Used by one thread at a time.

    Attributes:
        waited: How many seconds the last message took to come. The thread that waited writes it; the next wait
            takes it into account. Negative: nothing to take into account.
    """

    __slots__ = ("_min_waits", "_pause", "_processor", "_soon_share", "_start", "_waits", "waited")

    def __init__(self) -> None:
        self.waited = -1.0
        self._soon_share = 1.0  # share of the recent messages that came soon
        self._waits = 0
        self._min_waits = 0  # do not spin before this many waits
        self._pause = _MIN_PAUSE
        self._start = self._processor = 0.0

    def spin_if_worthwhile(self, poll: Callable[[int], list[T]], process: Busyness, purpose: Spinning) -> list[T]:
        """``spin`` if ``should_spin``, else return nothing."""
        return self.spin(poll, process, purpose) if self.should_spin() else []

    def spin(self, poll: Callable[[int], list[T]], process: Busyness, purpose: Spinning) -> list[T]:
        """Poll until something is ready, others want the interpreter, or it takes too long. Returns what is ready.
        Call it only after ``should_spin`` has returned True.

        Args:
            poll: Returns what is ready without waiting, when called with 0.
            process: Whether other threads of this process want the interpreter.
            purpose: Whether another thread wants what this thread spins for.
        """
        wakes, now = process.wakes, time.perf_counter
        until = now() + SPIN_SECONDS
        ready: list[T] = []
        for _ in range(MAX_SPINS):
            if not process.quiet or process.wakes != wakes or purpose.wanted:
                return ready  # another thread wanted the interpreter: that says nothing about processors
            if ready := poll(0):
                break
            offer()
            if now() > until:
                break
        self.stop()
        return ready

    def should_spin(self) -> bool:
        """Whether to spin in the wait that begins now. One wait of 32 spins in any case, to notice changes."""
        waited = self.waited
        if waited >= 0.0:
            self.waited = -1.0
            if waited < _SOON_SECONDS:
                self._soon_share += (1.0 - self._soon_share) / 4
            else:
                self._soon_share -= self._soon_share / 8
        self._waits += 1
        if MAX_SPINS > 0 and self._waits > self._min_waits and (self._soon_share > 0.25 or not self._waits & 31):
            self._processor = time.thread_time()
            self._start = time.perf_counter()
            return True
        return False

    def stop(self) -> None:
        """The thread has stopped spinning. If others had the processor meanwhile, processors are scarce: pause, and
        the longer the more often that happens.
        """
        wall = time.perf_counter() - self._start
        if wall - (time.thread_time() - self._processor) > _PREEMPTED_SECONDS:
            self._min_waits = self._waits + self._pause
            self._pause = min(2 * self._pause, _MAX_PAUSE)
        elif self._pause > _MIN_PAUSE:
            self._pause -= 1
