"""Draws faults of all kinds from a seed and lets them hit a simulated cluster."""

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
"""All kinds of faults. ``replace`` is a crash after which a new worker starts under that name. ``slow``, ``break`` and
``repeat`` change the network conditions. ``repeat`` is a connection whose first frame the peer sees twice.
"""
UNREACHABLE = frozenset({"crash", "crash in silence", "cut", "cut one way", "pause"})
"""Faults that can keep workers from learning that something is over."""
HARMLESS = frozenset({"slow"})
"""Faults under which every step must succeed."""
SURVIVED = frozenset({"crash", "restart", "replace", "slow"})
"""Faults under which steps with replay must succeed, if crashed workers are replaced in time."""


# Over the limit because each kind of fault has one attribute.
class SimulatedFaults:
    """Draws faults and applies them.

    Args:
        cluster: The cluster that the faults hit.
        draw: The source of random choices.
        kinds: The kinds of faults to draw from.
        count: How many faults to apply.
        gap: Seconds between two faults, on average.
        driving: Returns the names of workers that run programs. Those do not leave.

    Attributes:
        happened: How many faults of each kind were applied.
        over: Whether no more faults follow. Set it to stop early.
        failures: Errors that a fault must not cause.
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
        self.failures: list[Exception] = []
        self._cluster = cluster
        self._draw = draw
        self._kinds = kinds
        self._count = count if self._kinds else 0
        self._gap = gap
        self._driving = driving
        self._min_workers = max(2, len(cluster.nodes) // 2)
        self._crashed: list[str] = []
        self._joined = 0
        self._moving = 0  # workers that are joining or leaving

    @property
    def busy(self) -> bool:
        """Whether a worker is still joining or leaving."""
        return self._moving > 0

    def work(self) -> None:
        """Apply all faults. Runs on a task that belongs to no worker."""
        for _ in range(self._count):
            self._cluster.sleep(self._draw.expovariate(1 / self._gap))
            if self.over:
                break
            kind = self._draw.choice(self._kinds)
            if self._apply(kind):
                self.happened[kind] += 1
        self.over = True

    def _apply(self, kind: str) -> bool:
        """Apply a fault. Returns False if the cluster allows none of this kind now."""
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
            self._change_conditions(kind)
        else:
            return self._move(kind, one, seconds)
        return True

    def _move(self, kind: str, one: str, seconds: float) -> bool:
        """Apply a fault that removes or adds a worker."""
        cluster, draw = self._cluster, self._draw
        if kind in ("crash", "crash in silence", "replace"):
            if len(cluster.nodes) <= self._min_workers:
                return False
            cluster.crash(one, silent=kind == "crash in silence")
            if kind == "replace":
                self._begin_start(one, seconds)
            else:
                self._crashed.append(one)
        elif kind == "restart":
            if not self._crashed:
                return False
            self._begin_start(self._crashed.pop(draw.randrange(len(self._crashed))))
        elif kind == "leave":
            if not self._may_leave(one):
                return False
            self._moving += 1
            cluster.spawn(functools.partial(self._leave, one), "faults")
        else:
            self._joined += 1
            self._begin_start(f"joiner{self._joined}")
        return True

    def _begin_start(self, name: str, seconds: float = 0.0) -> None:
        """Start a worker after ``seconds``, on a task of its own."""
        self._moving += 1
        self._cluster.spawn(functools.partial(self._start, name, seconds), "faults")

    def _start(self, name: str, seconds: float) -> None:
        try:
            self._cluster.sleep(seconds)
            self._cluster.start(name)
        except RendezvousError:  # for example, it reaches no member
            self._crashed.append(name)
        except Exception as error:
            self.failures.append(error)
        finally:
            self._moving -= 1

    def _may_leave(self, name: str) -> bool:
        nodes = self._cluster.nodes
        return name in nodes and len(nodes) > self._min_workers and name not in self._driving()

    def _leave(self, name: str) -> None:
        try:
            # Check again, because another fault may have hit the worker meanwhile.
            left = self._may_leave(name) and self._cluster.leave(name, timeout=10.0)
            if left:
                raise AssertionError(f"after {name} has left, {', '.join(left)}")
        except Exception as error:
            self.failures.append(error)
        finally:
            self._moving -= 1

    def _change_conditions(self, kind: str) -> None:
        conditions, draw = self._cluster.network.conditions, self._draw
        self._cluster.scheduler.trace.note(f"network conditions: {kind}")
        if kind == "slow":
            conditions.slow = draw.choice((0.02, 0.2))
            conditions.slowness = 0.02 / max(conditions.delay, 0.0001)  # far below all timeouts
        elif kind == "break":
            conditions.breaks = draw.choice((0.0, 0.002, 0.02))
        else:
            conditions.duplicates = draw.choice((0.0, 0.5, 1.0))
