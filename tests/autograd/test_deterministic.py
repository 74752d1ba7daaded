"""``deterministic=True``: the same bits whatever the order in which gradients arrive.

Gradient messages to one worker are held back until all are there, then let in one by one in an order that the test
gives. The contributions are of very different sizes, so that their sum depends on the order in float32.
"""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import backhaul as bh
from backhaul._autograd.backward import outbox
from backhaul._autograd.backward.receiver import GradientReceiver

from .worlds import DEADLINE_SECONDS, gradients_on

SIZES = (1e8, 1.0, -1e8, 3.0, 1e-3, -7e7, 0.3, 7e7)
COUNT = len(SIZES)
ORDERS = [list(range(COUNT)), list(reversed(range(COUNT)))] + [
    random.Random(seed).sample(range(COUNT), COUNT) for seed in range(4)
]


class Arrivals:
    """Lets ``COUNT`` gradient messages into a worker in a given order, for each pass that is announced."""

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.order: Sequence[int] | None = None
        self.passes = 0
        self._lock = threading.Lock()  # guards the tables below
        self._held: list[Callable[[], None]] = []

    def take(self, original: Callable[..., None], receiver: GradientReceiver, *args: Any) -> None:
        enter = functools.partial(original, receiver, *args)
        if receiver._worker.name != self.worker or self.order is None:
            enter()
            return
        with self._lock:
            self._held.append(enter)
            if len(self._held) < COUNT:
                return
            held, order, self.order = self._held, self.order, None
            self._held = []
            self.passes += 1
        for number in order:
            held[number]()


@pytest.fixture
def arrivals(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Arrivals]:
    def watch(worker: str) -> Arrivals:
        made, original = Arrivals(worker), GradientReceiver._take_gradients
        monkeypatch.setattr(outbox, "TOGETHER", 1)
        monkeypatch.setattr(GradientReceiver, "_take_gradients", lambda self, *args: made.take(original, self, *args))
        return made

    return watch


def fresh(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, requires_grad=True)


class Shelf:
    """The weight of worker 1."""

    weight = fresh(0.1, -2.3, 4.5)


def use_weight(x: torch.Tensor) -> torch.Tensor:
    return x * Shelf.weight


Pass = Callable[..., list[torch.Tensor]]
"""Runs a forward and a backward pass. Returns the gradients that are sums of many contributions."""


def many_calls_with_one_weight(workers: Sequence[bh.Worker], arrivals: Arrivals, order: Any, **way: Any) -> Any:
    """Each call is its own group there; all contribute to the weight's gradient."""
    Shelf.weight = fresh(0.1, -2.3, 4.5)
    with bh.context() as ctx:
        results = [bh.rpc_sync(1, use_weight, args=(fresh(size, 1 / size, 1),)) for size in SIZES]
        arrivals.order = order
        ctx.backward(torch.stack(results).sum(), **way)
        return [Shelf.weight.grad if "accumulate" in way else gradients_on(workers[1], ctx)[Shelf.weight]]


def one_leaf_sent_many_times(workers: Sequence[bh.Worker], arrivals: Arrivals, order: Any, **way: Any) -> Any:
    leaf = fresh(0.1, -2.3, 4.5)
    with bh.context() as ctx:
        results = [bh.rpc_sync(1, torch.mul, args=(leaf, size)) for size in SIZES]
        arrivals.order = order
        ctx.backward(torch.stack(results).sum(), **way)
        return [leaf.grad if "accumulate" in way else ctx.grads[leaf]]


def one_value_sent_many_times(workers: Sequence[bh.Worker], arrivals: Arrivals, order: Any, **way: Any) -> Any:
    """The sends are one group, which waits for all of them."""
    leaf = fresh(0.1, -2.3, 4.5)
    with bh.context() as ctx:
        value = torch.sin(leaf)
        results = [bh.rpc_sync(1, torch.mul, args=(value, size)) for size in SIZES]
        arrivals.order = order
        ctx.backward(torch.stack(results).sum(), **way)
        return [leaf.grad if "accumulate" in way else ctx.grads[leaf]]


def sends_in_a_circle(workers: Sequence[bh.Worker], arrivals: Arrivals, order: Any, **way: Any) -> Any:
    """The group must fire a recv node before the gradients of its sends can arrive."""
    leaf = fresh(0.1, -2.3, 4.5)
    with bh.context() as ctx:
        value = bh.rpc_sync(1, torch.sin, args=(leaf,)) * 2
        results = [bh.rpc_sync(1, torch.mul, args=(value, size)) for size in SIZES]
        arrivals.order = order
        ctx.backward((torch.stack(results).sum(0) * value).sum(), **way)
        return [leaf.grad if "accumulate" in way else ctx.grads[leaf]]


PROGRAMS = [many_calls_with_one_weight, one_leaf_sent_many_times, one_value_sent_many_times, sends_in_a_circle]


def where(program: Any) -> str:
    return "worker1" if program is many_calls_with_one_weight else "worker0"


def run_all(program: Any, watched: Arrivals, **way: Any) -> list[list[torch.Tensor]]:
    with bh.cluster(2) as workers:
        found = [program(workers, watched, order, timeout=DEADLINE_SECONDS, **way) for order in ORDERS]
    assert watched.passes == len(ORDERS)
    return found


def test_the_order_matters_otherwise(arrivals: Any) -> None:
    """Otherwise the tests below would show nothing."""
    found = run_all(many_calls_with_one_weight, arrivals("worker1"))
    assert not all(torch.equal(grad, found[0][0]) for (grad,) in found)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(
    "way",
    [{}, {"accumulate": "grad"}, {"mode": "fast"}, {"mode": "fast", "accumulate": "grad"}, {"create_graph": True}],
    ids=["context", "grad", "fast", "fast-grad", "create"],
)
@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_the_order_of_arrival_does_not_matter(arrivals: Any, program: Any, way: dict[str, Any]) -> None:
    found = run_all(program, arrivals(where(program)), deterministic=True, **way)
    for grads in found:
        for grad, first in zip(grads, found[0], strict=True):
            assert torch.equal(grad, first)


def test_on_by_itself_with_deterministic_algorithms(arrivals: Any) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        found = run_all(many_calls_with_one_weight, arrivals("worker1"))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(grad, found[0][0]) for (grad,) in found)


def test_the_sum_is_in_program_order(arrivals: Any) -> None:
    """Contributions are summed in the order of the calls, not in just any fixed order."""
    found = run_all(many_calls_with_one_weight, arrivals("worker1"), deterministic=True)
    total = torch.zeros(3)
    for size in SIZES:
        total = total + fresh(size, 1 / size, 1).detach()
    assert torch.equal(found[0][0], total)


# Which thread ran a call does not matter either: the engine runs nodes in the order of numbers that every thread
# counts for itself.


class Board:
    """A value that worker 1 made in the context and uses in several calls, each on a thread of its own."""

    def __init__(self) -> None:
        self.weight = fresh(0.1, -2.3, 4.5)
        self.value: torch.Tensor | None = None
        self.together = threading.Barrier(COUNT)


board = Board()


def make_value() -> None:
    board.value = torch.sin(board.weight)


def use_value(x: torch.Tensor, head_start: int) -> torch.Tensor:
    board.together.wait(DEADLINE_SECONDS)  # so no thread serves two of these calls
    for _ in range(head_start):
        x = x * 1
    return x * board.value


def test_the_thread_that_ran_a_call_does_not_matter() -> None:
    global board
    found = []
    with bh.cluster(2) as workers:
        for order in ORDERS:
            board = Board()
            with bh.context() as ctx:
                bh.rpc_sync(1, make_value)
                calls = [
                    bh.rpc_async(1, use_value, args=(fresh(size, 1 / size, 1), 300 * start))
                    for size, start in zip(SIZES, order, strict=True)
                ]
                ctx.backward(torch.stack(bh.wait_all(calls)).sum(), deterministic=True)
                found.append(gradients_on(workers[1], ctx)[board.weight])
    assert all(torch.equal(grad, found[0]) for grad in found), found


def use_twice(x: torch.Tensor) -> torch.Tensor:
    return (x * Shelf.weight).pow(3)


def penalise(context: int) -> torch.Tensor:
    return bh.get_gradients(context)[Shelf.weight].sin().sum()


@pytest.mark.parametrize("home", [0, 1])
def test_the_second_order_is_deterministic_too(arrivals: Any, home: int) -> None:
    """The first pass makes nodes on arbitrary threads. The sums of a second pass must not depend on these threads."""
    watched = arrivals(f"worker{home}")
    found = []
    with bh.cluster(2) as workers:
        for order in ORDERS:
            Shelf.weight = fresh(0.1, -2.3, 4.5)
            with bh.context() as ctx:
                results = [bh.rpc_sync(home, use_twice, args=(fresh(size, 1 / size, 1),)) for size in SIZES]
                watched.order = order
                ctx.backward(torch.stack(results).sum(), create_graph=True, deterministic=True)
                cost = bh.rpc_sync(home, penalise, args=(int(ctx),))
                ctx.backward(cost, deterministic=True)
                found.append(gradients_on(workers[home], ctx)[Shelf.weight].detach())
    assert all(torch.equal(grad, found[0]) for grad in found), found
