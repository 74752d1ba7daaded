"""Random programs, distributed and in one process: the same gradients, and hooks and custom functions run as often.

Also that the oracle would notice if they were not, and how many messages a pass costs.
"""

from __future__ import annotations

import collections
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import backhaul as bh
from backhaul._autograd.backward import leaves, outbox, ready_groups, receiver
from backhaul._autograd.backward.receiver import GradientReceiver
from backhaul._autograd.context import Context
from backhaul._autograd.forward import functions
from backhaul._autograd.messages import AutogradKind
from backhaul._autograd.torch_engine import run as torch_run
from backhaul._transport.inproc import InprocChannel
from backhaul._wire.frames import Frame
from backhaul.testing.oracle import compare, run_distributed, run_locally
from backhaul.testing.programs import Program, make_program

from .worlds import DEADLINE_SECONDS, expect_no_contexts

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using backward:UserWarning"),  # plain autograd, with create_graph
    pytest.mark.usefixtures("unruly_threads"),
]


@pytest.fixture
def unruly_threads() -> Iterator[None]:
    """Threads switch very often, so that messages arrive in many orders."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker handles gradients that are there at the same time in random order."""
    take, choose, lock = GradientReceiver._take_gradients, random.Random(0), threading.Lock()
    waiting: dict[int, list[Callable[[], None]]] = collections.defaultdict(list)

    def swap(self: GradientReceiver, *args: Any) -> None:
        with lock:
            mine = waiting[id(self)]
            mine.append(lambda: take(self, *args))
        with lock:
            task = mine.pop(choose.randrange(len(mine)))
        task()

    monkeypatch.setattr(outbox, "TOGETHER", 1)
    monkeypatch.setattr(GradientReceiver, "_take_gradients", swap)


def difference(program: Program, *, order: int = 1, **options: Any) -> list[str]:
    options.setdefault("timeout", DEADLINE_SECONDS)
    return compare(run_locally(program, order=order), run_distributed(program, order=order, **options))


FLAVOURS: list[dict[str, Any]] = [
    {},  # most results of such a program are not used
    {"length": 20, "depth": 2, "roots": 4},
    {"length": 12, "thorough": True},  # all of it is used, so most workers get gradients
]


def sweep(seeds: range, *, workers: int, order: int = 1, thorough: bool = False, **options: Any) -> None:
    """Run a program for every seed."""
    found: dict[int, list[str]] = {}
    with bh.cluster(workers) as made:
        for seed in seeds:
            flavour = FLAVOURS[2] if thorough else FLAVOURS[seed % 3]
            program = make_program(random.Random(seed).randrange, workers=workers, **flavour)
            if differs := difference(program, order=order, **options):
                found[seed] = differs
        expect_no_contexts(made)
    assert found == {}


# Sweeps.


@pytest.mark.usefixtures("any_order")
@pytest.mark.parametrize(("workers", "first"), [(2, 0), (3, 1000), (4, 2000), (6, 3000)])
def test_first_order(workers: int, first: int) -> None:
    sweep(range(first, first + 75), workers=workers)


@pytest.mark.usefixtures("any_order")
@pytest.mark.parametrize(("workers", "first"), [(3, 4000), (4, 5000)])
def test_second_order(workers: int, first: int) -> None:
    sweep(range(first, first + 50), workers=workers, order=2)


@pytest.mark.usefixtures("any_order")
def test_third_order() -> None:
    sweep(range(6000, 6030), workers=3, order=3)


@pytest.mark.usefixtures("any_order")
@pytest.mark.parametrize(("workers", "first"), [(3, 7000), (4, 8000)])
def test_fast_mode(workers: int, first: int) -> None:
    """In programs in which every message takes part, as this mode assumes."""
    sweep(range(first, first + 50), workers=workers, thorough=True, mode="fast")


@pytest.mark.usefixtures("any_order")
@pytest.mark.parametrize("order", [1, 2])
def test_gradients_that_are_sent_as_soon_as_they_are_there(monkeypatch: pytest.MonkeyPatch, order: int) -> None:
    """As in large groups."""
    monkeypatch.setattr(torch_run, "SEND_EARLY_NODES", -1)
    sweep(range(9200, 9260 - 20 * order), workers=3, order=order)


class WaitForOther(torch.autograd.Function):
    """Its backward waits until a hook on another worker has been called."""

    called = threading.Event()

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        assert WaitForOther.called.wait(DEADLINE_SECONDS)
        return grad


def tell(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.register_hook(lambda _: WaitForOther.called.set())
    return y


def test_workers_go_on_while_the_driver_still_computes() -> None:
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    with bh.cluster(2), bh.context() as ctx:
        x = a
        for _ in range(100):
            x = x + 0
        applied: Any = WaitForOther.apply(x)
        ctx.backward((applied * bh.rpc_sync(1, tell, args=(b,))).sum())
        assert ctx.grads[a].tolist() == ctx.grads[b].tolist() == [2.0, 2.0]


def test_deterministic() -> None:
    sweep(range(9000, 9040), workers=3, deterministic=True)


def test_deterministic_second_order() -> None:
    sweep(range(9100, 9120), workers=3, order=2, deterministic=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("any_order")
@pytest.mark.parametrize(("order", "count"), [(1, 2000), (2, 600), (3, 200)])
def test_many_programs(order: int, count: int) -> None:
    for workers in (2, 3, 5, 6):
        sweep(range(100_000 * order, 100_000 * order + count // 4), workers=workers, order=order)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("any_order")
def test_many_programs_in_fast_mode() -> None:
    """To first order only: calls of a first pass need not take part in a second."""
    sweep(range(500_000, 500_400), workers=4, thorough=True, mode="fast")


# Hypothesis finds the smallest program that differs.


@hypothesis.given(st.data())
@hypothesis.settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
    derandomize=True,
    database=None,
)
def check_drawn(workers: int, order: int, data: st.DataObject) -> None:
    def choose(below: int) -> int:
        return data.draw(st.integers(0, below - 1))

    program = make_program(choose, workers=workers, length=4, depth=2)
    assert difference(program, order=order) == []


@pytest.mark.parametrize("order", [1, 2])
def test_programs_that_hypothesis_draws(order: int) -> None:
    with bh.cluster(3):
        check_drawn(3, order)


# Processes.


def sweep_from_worker_0(first: int, count: int) -> dict[int, list[str]] | None:
    if bh.get_worker_info().id != 0:
        return None
    found = {}
    for seed in range(first, first + count):
        program = make_program(random.Random(seed).randrange, workers=3, **FLAVOURS[seed % 3])
        if differs := difference(program, order=1 + seed % 2):
            found[seed] = differs
    return found


@pytest.mark.parametrize("transport", ["unix"])
def test_processes(transport: Any) -> None:
    options = bh.Options(transport=transport)
    found = bh.launch(sweep_from_worker_0, 3, args=(20_000, 30), options=options, timeout=90, start_method="forkserver")
    assert found == [{}, None, None]


# The oracle can fail.


def count_differences(seeds: range = range(0, 25), *, order: int = 1) -> int:
    """How many of some programs give other results."""
    with bh.cluster(3):
        programs = [make_program(random.Random(seed).randrange, workers=3, **FLAVOURS[seed % 3]) for seed in seeds]
        return sum(bool(difference(program, order=order)) for program in programs)


def test_without_a_fault_nothing_differs() -> None:
    assert count_differences() == 0


def test_a_lost_contribution_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third gradient of a leaf is dropped."""
    accumulate, calls = Context.accumulate, iter(range(1 << 30))

    def forget(self: Context, *args: Any) -> None:
        if next(calls) % 3:
            accumulate(self, *args)

    monkeypatch.setattr(Context, "accumulate", forget)
    assert count_differences() > 5


def test_a_contribution_that_is_added_twice_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    accumulate, calls = Context.accumulate, iter(range(1 << 30))

    def repeat(self: Context, *args: Any) -> None:
        accumulate(self, *args)
        if not next(calls) % 3:
            accumulate(self, *args)

    monkeypatch.setattr(Context, "accumulate", repeat)
    assert count_differences() > 5


def test_a_gradient_that_is_lost_on_the_way_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fourth message arrives, but without its gradients."""
    arrive, calls = ready_groups.ReadyGroups.arrive, iter(range(1 << 30))

    def lose(self: ready_groups.ReadyGroups, source: Any, grads: Any, *rest: Any) -> Any:
        keep = source == functions.ROOTS or next(calls) % 4
        return arrive(self, source, grads if keep else [None] * len(grads), *rest)

    monkeypatch.setattr(ready_groups.ReadyGroups, "arrive", lose)
    assert count_differences() > 5


def test_a_slightly_wrong_gradient_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    accumulate = Context.accumulate

    def bend(self: Context, leaf: torch.Tensor, grad: torch.Tensor, *rest: Any) -> None:
        accumulate(self, leaf, grad * (1 + 1e-6), *rest)

    monkeypatch.setattr(Context, "accumulate", bend)
    assert count_differences() > 5


def test_hooks_that_see_partial_sums_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a leaf with hooks did not join the sources that reach it."""
    monkeypatch.setattr(leaves.Leaves, "join", lambda self, leaf: None)
    assert count_differences(range(0, 60)) > 0


def test_a_function_that_runs_twice_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine runs a group a second time for its side effects alone."""
    run_engine = leaves.run_engine

    def again(edges: Any, seeds: Any, wanted: Any, **options: Any) -> Any:
        some = [leaf for leaf in wanted if isinstance(leaf, torch.Tensor)]
        if some:
            run_engine(edges, seeds, some, **{**options, "retain": True})
        return run_engine(edges, seeds, wanted, **options)

    monkeypatch.setattr(leaves, "run_engine", again)
    assert count_differences() > 0


def test_compare_says_what_differs() -> None:
    program = make_program(random.Random(7).randrange, workers=3)
    expected, found = run_locally(program), run_locally(program)
    assert compare(expected, found) == []
    (key, grad), *_ = ((key, grad) for key, grad in found.grads.items() if grad is not None)
    found.grads[key] = grad + 1e-3
    (told,) = compare(expected, found)
    assert f"parameter {key[1]} of worker {key[0]}" in told
    found.grads[key] = None
    (told,) = compare(expected, found)
    assert "found None" in told
    found.grads[key] = grad
    found.counts[1, "hook 99"] = 2
    (told,) = compare(expected, found)
    assert "hook 99 on worker 1: expected 0 times, found 2" in told


def test_programs_are_what_they_claim_to_be() -> None:
    """A few programs together contain every feature that a program may have."""
    seen: collections.Counter[str] = collections.Counter()

    def look(body: Any, worker: int, depth: int) -> None:
        for step in body.steps:
            seen[step.kind if step.kind != "op" else step.name] += 1
            if step.kind == "call":
                seen["self call"] += int(step.name) == worker
                seen["nested call"] += depth > 0
                look(step.body, int(step.name), depth + 1)

    for seed in range(100):
        program = make_program(random.Random(seed).randrange, workers=3)
        seen["several roots"] += len(program.body.results) > 1
        seen["hooked parameter"] += bool(program.hooked)
        look(program.body, 0, 0)
    kinds = (
        "call|hook|self call|nested call|several roots|hooked parameter|inplace|square|detach|add|mul|sin|roll|outer"
    )
    assert all(seen[kind] >= 10 for kind in kinds.split("|")), seen


@pytest.mark.parametrize("flavour", FLAVOURS, ids=["plain", "wide", "thorough"])
def test_programs_reach_the_workers(flavour: dict[str, Any]) -> None:
    """A fair share of programs has gradients on three or four workers."""
    reached: collections.Counter[int] = collections.Counter()
    for seed in range(60):
        result = run_locally(make_program(random.Random(seed).randrange, workers=4, **flavour))
        reached[len({worker for (worker, _), grad in result.grads.items() if grad is not None})] += 1
    assert reached[3] + reached[4] >= 12, reached


# Messages.


class Frames:
    """Autograd frames that travel between workers."""

    def __init__(self) -> None:
        self.sent: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()

    def count(self, frame: Frame) -> None:
        if frame.kind >= AutogradKind.GRADIENT:
            with self._lock:
                self.sent[AutogradKind(frame.kind).name] += 1


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> Frames:
    found, send = Frames(), InprocChannel.send

    def watched(self: InprocChannel, frame: Frame, *, timeout: float | None = None) -> None:
        found.count(frame)
        send(self, frame, timeout=timeout)

    monkeypatch.setattr(InprocChannel, "send", watched)
    return found


@pytest.mark.parametrize("hops", [1, 4, 16])
@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_a_chain_costs_a_gradient_and_at_most_a_report_for_each_hop(frames: Frames, hops: int, mode: Any) -> None:
    """A value handed from worker to worker: every message on its way is answered by one gradient."""
    a = torch.ones(2, requires_grad=True)
    with bh.cluster(3) as workers:
        with bh.context() as ctx:
            x = a * 1
            for number in range(hops):  # there and back is two messages
                x = bh.rpc_sync(1 + number % 2, torch.mul, args=(x, 2))
            messages = sum(len(share["sends"]) for share in ctx.describe()["workers"].values())
            assert messages == 2 * hops
            frames.sent.clear()
            ctx.backward(x.sum(), mode=mode)
            assert ctx.grads[a].tolist() == [2.0**hops] * 2
            assert frames.sent.pop("GRADIENT") == messages
            assert frames.sent.pop("REPORT", 0) <= messages
            assert not frames.sent
        expect_no_contexts(workers)


@pytest.mark.parametrize("hops", [1, 4, 16])
def test_a_nested_chain(frames: Frames, hops: int) -> None:
    """Each worker calls the next: as many hops there as back."""
    a = torch.ones(2, requires_grad=True)
    with bh.cluster(3), bh.context() as ctx:
        y = nest(a, hops)
        frames.sent.clear()
        ctx.backward(y.sum())
        assert ctx.grads[a].tolist() == [2.0**hops] * 2
        assert frames.sent.pop("GRADIENT") == 2 * hops
        assert frames.sent.pop("REPORT", 0) <= 2 * hops
        assert not frames.sent


def nest(x: torch.Tensor, left: int) -> torch.Tensor:
    following = (bh.get_worker_info().id + 1) % 3
    return bh.rpc_sync(following, nest, args=(x * 2, left - 1)) if left else x


@pytest.mark.parametrize("together", [1, 32, 100])
def test_gradients_for_one_worker_go_together(frames: Frames, monkeypatch: pytest.MonkeyPatch, together: int) -> None:
    """Small gradients travel in one frame, together with the report about them."""
    monkeypatch.setattr(outbox, "TOGETHER", together)
    monkeypatch.setattr(receiver, "SHARE_OUT_SECONDS", DEADLINE_SECONDS)
    a, count = torch.ones(2, requires_grad=True), 64
    with bh.cluster(2), bh.context() as ctx:
        results = [bh.rpc_sync(1, torch.mul, args=(a, 2)) for _ in range(count)]
        frames.sent.clear()
        ctx.backward(torch.stack(results).sum())
        assert frames.sent["GRADIENT"] == 2 * -(-count // together)
        assert frames.sent["REPORT"] <= -(-count // together)
        assert ctx.grads[a].tolist() == [2.0 * count] * 2


def test_large_gradients_go_alone(frames: Frames) -> None:
    a = torch.ones(1 << 14, requires_grad=True)
    with bh.cluster(2), bh.context() as ctx:
        results = [bh.rpc_sync(1, torch.mul, args=(a, 2)) for _ in range(4)]
        frames.sent.clear()
        ctx.backward(torch.stack(results).square().sum())
        assert frames.sent["GRADIENT"] == 8
        assert ctx.grads[a].eq(32).all()


def test_gradients_that_came_together_are_shared_out_when_they_take_long(
    frames: Frames, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "SHARE_OUT_SECONDS", 0.0)
    a = torch.ones(2, requires_grad=True)
    with bh.cluster(2), bh.context() as ctx:
        results = [bh.rpc_sync(1, torch.mul, args=(a, 2)) for _ in range(16)]
        frames.sent.clear()
        ctx.backward(torch.stack(results).sum())
        assert 1 + 1 <= frames.sent["GRADIENT"] <= 1 + 16
        assert ctx.grads[a].tolist() == [32.0] * 2


def test_what_takes_no_part_costs_nothing(frames: Frames) -> None:
    a = torch.ones(2, requires_grad=True)
    with bh.cluster(3), bh.context() as ctx:
        y = bh.rpc_sync(1, torch.mul, args=(a * 1, 2))
        for number in range(20):
            bh.rpc_sync(1 + number % 2, torch.mul, args=(y, 2))
        frames.sent.clear()
        ctx.backward(y.sum())
        assert frames.sent["GRADIENT"] == 2
        assert not frames.sent["REPORT"]  # it came with the gradient
