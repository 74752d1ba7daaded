"""Counts the calls of each function, and the backward passes, of one worker while a monitor watches.

It is an observer of the worker (``_runtime.observer``), and there is none while nobody watches. Calls that began before
are not counted.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from backhaul._monitoring.status import FunctionStatus, PassStatus
from backhaul._runtime.observer import ArrivedCall, Sessions
from backhaul._runtime.observer_pair import IdleObserver

_MAX_FUNCTIONS = 256  # that are counted apart; the calls of all others are counted together
_MAX_PASSES = 64  # that are remembered
_OTHERS = "other functions"
_OWN = "backhaul."  # the beginning of the names of Backhaul's own modules
_NANO = 1e-9


class _FunctionCount:
    """The calls of one function. Times in nanoseconds."""

    __slots__ = ("calls", "longest", "total", "waited")

    def __init__(self) -> None:
        self.calls = self.total = self.longest = self.waited = 0


class _CallTimer:
    """Implements ``ServeTrace``: the times of one call."""

    __slots__ = ("_arrived", "_begun", "_call", "_label", "_times")

    def __init__(self, times: FunctionTimes, call: ArrivedCall, arrived: int) -> None:
        self._times, self._call, self._arrived = times, call, arrived
        self._begun, self._label = 0, ""

    def decoded(self, label: str) -> None:
        module = getattr(self._call.function, "__module__", None) or ""
        if module.startswith(_OWN):  # ``bh.remote``, for example, calls a function of Backhaul's own
            label = f"{_OWN}{label}"
        self._label, self._begun = label, time.time_ns()

    def ran(self) -> None:
        pass

    def resumed(self) -> None:
        if self._begun:
            self._times.count(self._label, self._begun - self._arrived, time.time_ns() - self._begun)
            self._begun = 0

    def replied(self, nbytes: int) -> None:
        pass


class FunctionTimes(IdleObserver):
    """Implements ``Observer`` for one worker. Thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # guards the two below
        self._functions: dict[str, _FunctionCount] = {}
        self._passes: collections.deque[PassStatus] = collections.deque(maxlen=_MAX_PASSES)

    def count(self, function: str, waited: int, ran: int) -> None:
        """A call of ``function`` has ended. Times in nanoseconds: until the function began, and until its result."""
        with self._lock:
            found = self._functions.get(function)
            if found is None:
                name = function if len(self._functions) < _MAX_FUNCTIONS else _OTHERS
                found = self._functions.setdefault(name, _FunctionCount())
            found.calls += 1
            found.total += ran
            found.longest = max(found.longest, ran)
            found.waited += waited

    def functions(self) -> tuple[FunctionStatus, ...]:
        """What was counted, those first that took most time in all."""
        with self._lock:
            found = sorted(self._functions.items(), key=lambda item: -item[1].total)
        return tuple(
            FunctionStatus(name, each.calls, each.total * _NANO, each.longest * _NANO, each.waited * _NANO)
            for name, each in found
        )

    def passes(self) -> tuple[PassStatus, ...]:
        """The last backward passes, oldest first."""
        with self._lock:
            return tuple(self._passes)

    # What the worker does.

    def arrived(self, call: ArrivedCall) -> int:
        now = time.time_ns()
        call.trace = _CallTimer(self, call, now)
        return now

    @contextlib.contextmanager
    def drive(self, sessions: Sessions, context: int, number: int) -> Iterator[None]:
        began = self._clock()
        try:
            yield
        finally:
            with self._lock:
                self._passes.append(PassStatus(context, number, began, self._clock() - began))
