"""What goes wrong in a simulation: faults of all kinds, drawn from its seed."""

from __future__ import annotations

import collections
import functools
import random
from collections.abc import Callable, Sequence

from backhaul._sim.cluster import SimCluster
from backhaul.errors import RendezvousError

FAULTS = (
    "drop",
    "cut",
    "cut one way",
    "pause",
    "crash",
    "crash in silence",
    "restart",
    "replace",
    "join",
    "leave",
    "slow",
    "break",
    "repeat",
)
"""What can go wrong. ``replace`` is a crash after which another worker comes under that name; ``slow``, ``break`` and
``repeat`` change the weather; ``repeat`` is a connection of which the peer sees the first frame twice.
"""
UNREACHABLE = frozenset({"crash", "crash in silence", "cut", "cut one way", "pause"})
"""Faults under which workers cannot be told that something is over."""
HARMLESS = frozenset({"slow"})
"""Faults under which every step has to succeed."""
SURVIVED = frozenset({"crash", "restart", "replace", "slow"})
"""Faults under which steps with replay have to succeed, if workers that crash are replaced in time."""


class SimulatedFaults:
    """Draws faults and lets them happen.

    Args:
        cluster: What they strike.
        draw: Where they come from.
        kinds: Which there are.
        count: How many.
        gap: Seconds between two of them, on average.
        driving: Says which workers run programs, and do not leave therefore.
    """

    def __init__(
        self,
        cluster: SimCluster,
        draw: random.Random,
        kinds: Sequence[str],
        *,
        count: int,
        gap: float,
        driving: Callable[[], set[str]],
    ) -> None:
        self.happened: collections.Counter[str] = collections.Counter()
        self.over = False
        self.failures: list[Exception] = []  # what nobody may raise
        self._cluster = cluster
        self._draw = draw
        self._kinds = kinds
        self._count = count if self._kinds else 0
        self._gap = gap
        self._driving = driving
        self._least = max(2, len(cluster.nodes) // 2)
        self._crashed: list[str] = []
        self._joined = 0
        self._moving = 0  # workers that are about to join or to leave

    @property
    def busy(self) -> bool:
        """Whether something that has begun is not over."""
        return self._moving > 0

    def work(self) -> None:
        """To be run on a strand that belongs to no worker."""
        for _ in range(self._count):
            self._cluster.sleep(self._draw.expovariate(1 / self._gap))
            if self.over:
                break
            kind = self._draw.choice(self._kinds)
            if self._strike(kind):
                self.happened[kind] += 1
        self.over = True

    def _strike(self, kind: str) -> bool:
        cluster, draw = self._cluster, self._draw
        names = list(cluster.nodes)
        one, other = draw.sample(names, 2)
        seconds = draw.choice((0.01, 0.3, 2.0, 8.0))
        if kind == "drop":
            return cluster.drop(draw.choice((0.0, 0.001, 1.0)), draw.choice((0.0, 0.001, 1.0)))
        if kind in ("cut", "cut one way"):
            cluster.cut(one, other, seconds)
            if kind == "cut":
                cluster.cut(other, one, seconds)
        elif kind == "pause":
            cluster.pause(one, seconds)
        elif kind in ("slow", "break", "repeat"):
            self._change_weather(kind)
        else:
            return self._move(kind, one, seconds)
        return True

    def _move(self, kind: str, one: str, seconds: float) -> bool:
        """Let workers come or go."""
        cluster, draw = self._cluster, self._draw
        if kind in ("crash", "crash in silence", "replace"):
            if len(cluster.nodes) <= self._least:
                return False
            cluster.crash(one, silent=kind == "crash in silence")
            if kind == "replace":
                self._begin(one, seconds)
            else:
                self._crashed.append(one)
        elif kind == "restart":
            if not self._crashed:
                return False
            self._begin(self._crashed.pop(draw.randrange(len(self._crashed))))
        elif kind == "leave":
            if not self._may_leave(one):
                return False
            self._moving += 1
            cluster.spawn(functools.partial(self._leave, one), "fate")
        else:
            self._joined += 1
            self._begin(f"newcomer{self._joined}")
        return True

    def _begin(self, name: str, seconds: float = 0.0) -> None:
        """Let a worker come in a while; it takes its time."""
        self._moving += 1
        self._cluster.spawn(functools.partial(self._come, name, seconds), "fate")

    def _come(self, name: str, seconds: float) -> None:
        try:
            self._cluster.sleep(seconds)
            self._cluster.start(name)
        except RendezvousError:  # it cannot reach anybody, say
            self._crashed.append(name)
        except Exception as error:
            self.failures.append(error)
        finally:
            self._moving -= 1

    def _may_leave(self, name: str) -> bool:
        nodes = self._cluster.nodes
        return name in nodes and len(nodes) > self._least and name not in self._driving()

    def _leave(self, name: str) -> None:
        try:
            # Once more: something may have happened to it since.
            left = self._may_leave(name) and self._cluster.leave(name, timeout=10.0)
            if left:
                raise AssertionError(f"after it has left {', '.join(left)}")
        except Exception as error:
            self.failures.append(error)
        finally:
            self._moving -= 1

    def _change_weather(self, kind: str) -> None:
        conditions, draw = self._cluster.network.conditions, self._draw
        self._cluster.scheduler.trace.note(f"weather: {kind}")
        if kind == "slow":
            conditions.slow = draw.choice((0.02, 0.2))
            conditions.slowness = 0.02 / max(conditions.delay, 0.0001)  # far below all timeouts
        elif kind == "break":
            conditions.breaks = draw.choice((0.0, 0.002, 0.02))
        else:
            conditions.duplicates = draw.choice((0.0, 0.5, 1.0))
