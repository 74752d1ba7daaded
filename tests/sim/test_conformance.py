"""The simulated network passes the conformance kit, whose threads become sim tasks for that."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from backhaul._sim.network import NetworkConditions, SimNetwork
from backhaul._sim.runtime import SimOneShotEvent
from backhaul._sim.scheduler import Scheduler
from backhaul._sim.tasks import SimTask
from backhaul._transport.base import EndpointFactory
from backhaul.testing.transport_conformance import TransportConformance, lines, losses


class Threading:
    """What the kit uses of ``threading``, for sim tasks."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.Thread = functools.partial(Thread, scheduler)
        self.Condition = functools.partial(Condition, scheduler)
        self.Event = functools.partial(Event, scheduler)
        self.active_count = threading.active_count


class Thread:
    def __init__(self, scheduler: Scheduler, target: Callable[[], None], name: str, daemon: bool) -> None:
        self._scheduler = scheduler
        self._start = functools.partial(scheduler.spawn, target, name=name, process=scheduler.outside)
        self._task: SimTask | None = None

    def start(self) -> None:
        self._task = self._start().task

    def join(self, timeout: float | None = None) -> None:
        assert self._task is not None
        self._scheduler.join(self._task, timeout)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.done


class Condition:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._waiters: list[SimTask] = []

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def notify_all(self) -> None:
        for waiter in self._waiters:
            self._scheduler.wake(waiter)
        self._waiters.clear()

    def wait_for(self, enough: Callable[[], bool], timeout: float) -> bool:
        deadline = self._scheduler.now + timeout
        while not enough():
            self._waiters.append(self._scheduler.running)
            if not self._scheduler.wait("a condition", deadline - self._scheduler.now):
                return enough()
        return True


class Event:
    def __init__(self, scheduler: Scheduler) -> None:
        self._gate = SimOneShotEvent(scheduler)
        self.set = self._gate.open
        self.wait = self._gate.wait

    def is_set(self) -> bool:
        return self._gate.opened


class TestSim(TransportConformance):
    can_hold = True

    @pytest.fixture
    def endpoints(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[EndpointFactory]:
        with Scheduler(7, yield_probability=0.3) as scheduler:
            shim: Any = Threading(scheduler)
            for module in (lines, losses):
                monkeypatch.setattr(module, "threading", shim)
            # The kit takes what has been sent to be there; on a real machine it is.
            network = SimNetwork(scheduler, NetworkConditions(delay=0.0, capacity=1e6))
            yield lambda: network.endpoint(scheduler.new_process("here"))
