"""Many workers in one simulation: they join all at once, train through a star and a tree, lose some, and go on.

    .venv/bin/python -m tools.simulation.many_workers --workers 1000

Each worker has one weight. A step multiplies an input by the weights of all workers, and every worker takes a step of
gradient descent. The weights are compared with the same steps of plain autograd in one process.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence

import torch

import backhaul as bh
from backhaul._sim.cluster import SimCluster
from backhaul._worker.worker import current_worker

_FAN_OUT = 8  # children of a worker in the tree
_RATE = 0.125  # of gradient descent
_LIMIT_SECONDS = 3600.0  # of virtual time
_SETTLE_SECONDS = 5.0  # of virtual time, between the parts
_SILENT_SHARE = 0.25  # of the workers that crash: their peers see no channel close

_weights: dict[str, torch.Tensor] = {}  # by worker; the simulated workers share this process


@dataclasses.dataclass
class Phase:
    """What one part of the run has cost.

    Attributes:
        name: Which part.
        workers: How many workers there were at its end.
        frames: How many frames were sent.
        virtual: Seconds of virtual time.
        real: Seconds of real time.
        detail: What else is of interest.
    """

    name: str
    workers: int
    frames: int
    virtual: float
    real: float
    detail: str = ""


class _Tree(tuple[str, tuple["_Tree", ...]]):
    """A worker and the trees below it."""


def _tree_of(names: Sequence[str]) -> _Tree:
    """A tree over workers; the first is its root."""
    below = names[1:]
    size = -(-len(below) // _FAN_OUT)
    parts = [below[start : start + size] for start in range(0, len(below), max(size, 1))]
    return _Tree((names[0], tuple(_tree_of(part) for part in parts)))


def weigh(x: torch.Tensor) -> torch.Tensor:
    """Multiply by the weight of this worker."""
    return x * _weights[current_worker().name]


def weigh_below(x: torch.Tensor, trees: Sequence[_Tree]) -> torch.Tensor:
    """As ``weigh``, plus the same of all workers below this one."""
    futures = [bh.rpc_async(name, weigh_below, args=(x, below)) for name, below in trees]
    return sum((future.wait() for future in futures), start=weigh(x))


def descend() -> None:
    """Take a step of gradient descent."""
    weight = _weights[current_worker().name]
    assert weight.grad is not None
    with torch.no_grad():
        weight -= _RATE * weight.grad
    weight.grad = None


def ready() -> None:
    """Called to see who is there."""


def _reached(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Which of these workers answer, and which are lost."""
    futures = [(name, bh.rpc_async(name, ready)) for name in names]
    found: tuple[list[str], list[str]] = [], []
    for name, future in futures:
        try:
            future.wait()
            found[0].append(name)
        except bh.PeerLostError:
            found[1].append(name)
    return found


def _star(x: torch.Tensor, names: Sequence[str]) -> torch.Tensor:
    futures = [bh.rpc_async(name, weigh, args=(x,)) for name in names]
    return sum((future.wait() for future in futures), start=torch.zeros_like(x))


def _through_tree(x: torch.Tensor, names: Sequence[str]) -> torch.Tensor:
    name, below = _tree_of(names)
    return bh.rpc_sync(name, weigh_below, args=(x, below))


def _step(forward: Callable[[torch.Tensor, Sequence[str]], torch.Tensor], x: torch.Tensor, names: list[str]) -> None:
    """One step of training on the driver."""
    forward(x, names).square().sum().backward()
    for future in [bh.rpc_async(name, descend) for name in names]:
        future.wait()


def _plain_step(x: torch.Tensor, weights: dict[str, torch.Tensor], names: list[str]) -> None:
    """The same step without Backhaul."""
    own = {name: weights[name].detach().requires_grad_() for name in names}
    torch.stack([x.detach() * weight for weight in own.values()]).sum(0).square().sum().backward()
    for name, weight in own.items():
        assert weight.grad is not None
        weights[name] = (weight - _RATE * weight.grad).detach()


def together(cluster: SimCluster, tasks: Iterable[Callable[[], object]]) -> None:
    """Run tasks that belong to no worker, all at the same time."""

    def run(task: Callable[[], object]) -> None:
        task()

    scheduler = cluster.scheduler
    threads = [
        scheduler.spawn(functools.partial(run, task), name=f"task-{number}", process=scheduler.outside)
        for number, task in enumerate(tasks)
    ]
    for thread in threads:
        scheduler.join(thread.task, None)


class ManyWorkers:
    """The run.

    Args:
        workers: How many workers there are in the end.
        seed: Determines all random choices.
        lost: The share of workers that crash.

    Attributes:
        phases: What each part has cost.
    """

    def __init__(self, workers: int, seed: int, lost: float = 0.1) -> None:
        self._names = [f"worker{number}" for number in range(workers)]
        self._lost = lost
        self._cluster = SimCluster(1, seed=seed, options=bh.Options(rendezvous_timeout=_LIMIT_SECONDS))
        self._x = torch.tensor([0.5, -0.25], dtype=torch.float64, requires_grad=True)
        self._expected: dict[str, torch.Tensor] = {}
        self.phases: list[Phase] = []

    def run(self, report: Callable[[Phase], object] = lambda phase: None) -> None:
        """Run all parts. Raises ``AssertionError`` if a weight is wrong or a living worker is missing."""
        count = len(self._names)
        scale = 1 / count
        _weights.update(
            (name, torch.tensor(scale * (1 + number % 7), dtype=torch.float64, requires_grad=True))
            for number, name in enumerate(self._names)
        )
        self._expected = {name: weight.detach().clone() for name, weight in _weights.items()}
        try:
            with self._cluster as cluster:
                cluster.scheduler.limit = _LIMIT_SECONDS
                for phase in (
                    ("join", self._join),
                    ("star", functools.partial(self._train, _star)),
                    ("tree", functools.partial(self._train, _through_tree)),
                    ("idle", self._idle),
                    ("lose", self._lose),
                    ("star again", functools.partial(self._train, _star)),
                    ("tree again", functools.partial(self._train, _through_tree)),
                    ("leave", self._leave),
                ):
                    report(self._measure(*phase))
        finally:
            _weights.clear()

    def _measure(self, name: str, part: Callable[[], str]) -> Phase:
        cluster, began = self._cluster, time.monotonic()
        frames, virtual = cluster.network.sent, cluster.scheduler.now
        detail = part()
        spent = time.monotonic() - began
        phase = Phase(
            name,
            len(cluster.nodes),
            cluster.network.sent - frames,
            cluster.scheduler.now - virtual,
            spent,
            detail,
        )
        self.phases.append(phase)
        cluster.sleep(_SETTLE_SECONDS)
        cluster.collect()
        return phase

    @property
    def _present(self) -> list[str]:
        return [name for name in self._names if name in self._cluster.nodes]

    def _join(self) -> str:
        cluster = self._cluster
        together(cluster, [functools.partial(cluster.start, name) for name in self._names[1:]])
        assert set(cluster.nodes) == set(self._names)
        cluster.sleep(_SETTLE_SECONDS)
        for node in cluster.nodes.values():
            known = {peer.info.name for peer in node.peers if not peer.lost}
            assert known == set(self._names), f"{node.worker.name} knows {len(known)} workers"
        return f"{len(cluster.network.channels) // 2} channels"

    def _train(self, forward: Callable[[torch.Tensor, Sequence[str]], torch.Tensor]) -> str:
        names = self._present
        self._cluster.run("worker0", functools.partial(_step, forward, self._x, names)).result()
        _plain_step(self._x, self._expected, names)
        for name in names:
            torch.testing.assert_close(_weights[name].detach(), self._expected[name])
        self._assert_nobody_is_lost()
        return ""

    def _assert_nobody_is_lost(self) -> None:
        present = set(self._present)
        for node in self._cluster.nodes.values():
            wrong = [
                peer.info.name for peer in node.peers if peer.info.name in present and (peer.lost or peer.suspicion)
            ]
            assert not wrong, f"{node.worker.name} takes {wrong[:3]} for lost"

    def _idle(self) -> str:
        frames = self._cluster.network.sent
        self._cluster.sleep(60.0)
        self._assert_nobody_is_lost()
        return f"{(self._cluster.network.sent - frames) / 60:.0f} frames a second"

    def _lose(self) -> str:
        cluster = self._cluster
        victims = cluster.scheduler.random.sample(self._names[1:], round(self._lost * len(self._names)))
        for number, name in enumerate(victims):
            cluster.crash(name, silent=number < _SILENT_SHARE * len(victims))
        before = cluster.scheduler.now
        alive, lost = cluster.run("worker0", functools.partial(_reached, self._names)).result()
        assert set(lost) == set(victims)
        assert alive == self._present
        return f"{len(victims)} workers lost, known after {cluster.scheduler.now - before:.1f} s"

    def _leave(self) -> str:
        cluster = self._cluster
        leavers = self._present[1:][:: max(round(1 / self._lost), 1)]
        together(cluster, [functools.partial(cluster.leave, name, timeout=60.0) for name in leavers])
        cluster.sleep(_SETTLE_SECONDS)
        for node in cluster.nodes.values():
            left = [peer.info.name for peer in node.peers if peer.info.name in leavers]
            assert not left, f"{node.worker.name} does not know that {left[:3]} have left"
        return f"{len(leavers)} workers left"


def main(arguments: Sequence[str] | None = None, write: Callable[[str], object] = print) -> int:
    """Run the command. Returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.simulation.many_workers", description=__doc__)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lost", type=float, default=0.1, help="the share of workers that crash")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.getLogger("backhaul").setLevel(logging.CRITICAL)  # hundreds of workers note each loss
    run = ManyWorkers(given.workers, given.seed, given.lost)

    def report(phase: Phase) -> None:
        write(
            f"{phase.name:10} {phase.workers:5} workers {phase.frames:8} frames {phase.virtual:7.1f} s of virtual time "
            f"{phase.real:6.1f} s of real time  {phase.detail}"
        )

    run.run(report)
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # see ``__main__``
