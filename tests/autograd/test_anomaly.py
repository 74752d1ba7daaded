"""Anomaly mode reaches all workers of a pass: what plain autograd reports is reported, in its words, wherever it
happens; and nothing of it is left behind.
"""

from __future__ import annotations

import asyncio
import collections
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import backhaul as bh
from backhaul._autograd.torch_engine import anomaly

from .worlds import DEADLINE_SECONDS, vector

pytestmark = pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")


@pytest.fixture(autouse=True)
def off() -> Iterator[None]:
    """Restore anomaly mode after each test."""
    assert not torch.is_anomaly_enabled()
    yield
    assert anomaly._switch._holders == anomaly._switch._stopping == 0
    assert not torch.is_anomaly_enabled()
    assert torch.is_anomaly_check_nan_enabled()


class Nan(torch.autograd.Function):
    """Returns NaN in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * torch.nan


def root_of_zero(x: torch.Tensor) -> torch.Tensor:
    """Its derivative at 0 is NaN."""
    return torch.sqrt(x) * 0


def own_function(x: torch.Tensor) -> torch.Tensor:
    return Nan.apply(x)


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def pass_on(to: int, function: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    return bh.rpc_sync(to, function, args=(x * 2,)) + 1


# Each makes a loss, of a leaf that is 0, and says which worker is at fault.


def on_the_other_worker(x: torch.Tensor) -> torch.Tensor:
    return bh.rpc_sync(1, root_of_zero, args=(x,)).sum()


def a_function_of_the_users(x: torch.Tensor) -> torch.Tensor:
    return bh.rpc_sync(1, own_function, args=(x,)).sum()


def in_the_middle(x: torch.Tensor) -> torch.Tensor:
    return (double(bh.rpc_sync(1, root_of_zero, args=(double(x),))) * 3).sum()


def two_hops_away(x: torch.Tensor) -> torch.Tensor:
    return bh.rpc_sync(1, pass_on, args=(2, root_of_zero, x)).sum()


def in_a_circle(x: torch.Tensor) -> torch.Tensor:
    """Worker 1 is called twice: with a value, then with its own result."""
    y = bh.rpc_sync(1, own_function, args=(x,))
    return (bh.rpc_sync(1, double, args=(y,)) * y).sum()


def here(x: torch.Tensor) -> torch.Tensor:
    return bh.rpc_sync(1, double, args=(root_of_zero(x),)).sum()


def here_in_a_circle(x: torch.Tensor) -> torch.Tensor:
    """The failing node runs by itself: its gradient must be sent before the last gradient arrives."""
    y = own_function(bh.rpc_sync(1, double, args=(x,)))
    return (bh.rpc_sync(1, double, args=(y,)) * y).sum()


PROGRAMS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str, str, str]] = {
    program.__name__: (program, function, worker, where)
    for program, function, worker, where in (
        (on_the_other_worker, "SqrtBackward0", "worker1", "root_of_zero"),
        (a_function_of_the_users, "NanBackward", "worker1", "own_function"),
        (in_the_middle, "SqrtBackward0", "worker1", "root_of_zero"),
        (two_hops_away, "SqrtBackward0", "worker2", "root_of_zero"),
        (in_a_circle, "NanBackward", "worker1", "own_function"),
        (here, "SqrtBackward0", "worker0", "root_of_zero"),
        (here_in_a_circle, "NanBackward", "worker0", "own_function"),
    )
}


def text_of(function: str) -> str:
    """The error of plain autograd."""
    x = torch.zeros(2, requires_grad=True)
    y = root_of_zero(x) if function == "SqrtBackward0" else own_function(x)
    with torch.autograd.detect_anomaly(), quietly(), pytest.raises(RuntimeError) as caught:
        y.sum().backward()
    return str(caught.value)


def run(name: str) -> tuple[str, str, str, list[bool]]:
    """Run a program in anomaly mode. Returns type, text and notes of its error, and whether workers stay in it."""
    loss_of = PROGRAMS[name][0]
    with bh.context() as ctx, pytest.raises(RuntimeError) as caught, torch.autograd.detect_anomaly(), quietly():
        ctx.backward(loss_of(torch.zeros(2, requires_grad=True)), timeout=DEADLINE_SECONDS)
    left = [bh.rpc_sync(to, torch.is_anomaly_enabled) for to in range(len(bh.get_worker_infos()))]
    error = caught.value
    notes = "\n".join(error.__notes__)
    return type(error).__name__, str(error), notes.replace(str(int(ctx)), "CONTEXT"), left


class quietly(warnings.catch_warnings):
    """If torch's own anomaly mode is on, torch warns of the error, too."""

    def __enter__(self) -> None:  # type: ignore[override]
        super().__enter__()
        warnings.filterwarnings("ignore", "Error detected in")


def run_all() -> dict[str, tuple[str, str, str, list[bool]]] | None:
    if bh.get_worker_info().id != 0:
        return None
    return {name: run(name) for name in PROGRAMS}


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, tuple[str, str, str, list[bool]]]]:
    """By place."""
    with bh.cluster(3):
        together = run_all()
    return {"process": together, "processes": bh.launch(run_all, 3, start_method="forkserver")[0]}


@pytest.mark.parametrize("place", ["process", "processes"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_what_is_no_number_is_reported(found: Any, place: str, program: str) -> None:
    _, function, worker, where = PROGRAMS[program]
    kind, text, notes, left = found[place][program]
    assert (kind, text.partition("\n")[0]) == ("RuntimeError", text_of(function))
    assert f"on worker '{worker}'" in notes
    assert "context CONTEXT" in notes
    assert f"Error detected in {function}. Traceback of forward call" in notes
    assert f"in {where}\n" in notes
    assert left == [False] * 3


# What is left as it was.


def test_nothing_is_reported_where_nobody_asks() -> None:
    a = torch.zeros(2, requires_grad=True)
    with bh.cluster(2):
        with bh.context() as ctx:
            ctx.backward(on_the_other_worker(a))
            assert ctx.grads[a].isnan().all()
        with bh.context() as ctx, torch.autograd.detect_anomaly(check_nan=False):
            ctx.backward(on_the_other_worker(a))
            assert ctx.grads[a].isnan().all()


def test_right_gradients_stay_right() -> None:
    """Also in circles. torch warns of no error where nodes run by themselves."""
    a = vector(0.5, 2.0)
    with (
        bh.cluster(3),
        bh.context() as ctx,
        torch.autograd.detect_anomaly(),
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        y = bh.rpc_sync(1, double, args=(a,))
        z = bh.rpc_sync(1, pass_on, args=(2, double, y)) * y
        ctx.backward((bh.rpc_sync(1, double, args=(z,)) * z).sum())
        expected = (2 * ((2 * (2 * (2 * a)) + 1) * 2 * a) ** 2).sum()
        torch.testing.assert_close(ctx.grads[a], torch.autograd.grad(expected, a)[0])
        assert torch.is_anomaly_enabled()
    assert not [str(warning.message) for warning in told]


def test_where_the_forward_was_not_in_anomaly_mode() -> None:
    with bh.cluster(2), bh.context() as ctx:
        loss = on_the_other_worker(torch.zeros(2, requires_grad=True))
        with torch.autograd.detect_anomaly(), quietly(), pytest.raises(RuntimeError) as caught:
            ctx.backward(loss)
    assert "No forward pass information available" in "\n".join(caught.value.__notes__)


class Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise KeyError("no such thing")


def fail_later(x: torch.Tensor) -> torch.Tensor:
    return Fail.apply(x)


def test_other_errors_say_where_they_come_from_too() -> None:
    with bh.cluster(2), bh.context() as ctx, torch.autograd.detect_anomaly(), quietly():
        loss = bh.rpc_sync(1, fail_later, args=(vector(1.0),)).sum()
        with pytest.raises(KeyError) as caught:
            ctx.backward(loss)
        assert "in fail_later\n" in "\n".join(caught.value.__notes__)


@pytest.mark.parametrize(
    "options", [{"accumulate": "grad"}, {"deterministic": True}, {"create_graph": True}, {"mode": "fast"}]
)
def test_in_every_way_of_a_pass(options: dict[str, Any]) -> None:
    with bh.cluster(2), bh.context() as ctx, torch.autograd.detect_anomaly(), quietly():
        loss = in_a_circle(torch.zeros(2, requires_grad=True))
        with pytest.raises(RuntimeError, match="Function 'NanBackward' returned nan values in its 0th output"):
            ctx.backward(loss, timeout=DEADLINE_SECONDS, **options)


def test_a_second_derivative() -> None:
    """A pass made the failing node: the error names the node that induced it."""
    a = vector(0.0)
    with bh.cluster(2), bh.context() as ctx, torch.autograd.detect_anomaly(), quietly():
        ctx.backward(bh.rpc_sync(1, cube_root, args=(a,)).sum(), create_graph=True)
        with pytest.raises(RuntimeError, match="returned nan values") as caught:
            ctx.backward(ctx.grads[a].sum(), timeout=DEADLINE_SECONDS)
    assert "induced" in "\n".join(caught.value.__notes__)


def cube_root(x: torch.Tensor) -> torch.Tensor:
    return (x + 1).pow(3) + torch.where(x > 0, x, x * x).pow(1.5) * 0


# Forward.


def sees() -> bool:
    return torch.is_anomaly_enabled()


async def sees_later() -> bool:
    await asyncio.sleep(0)
    return torch.is_anomaly_enabled()


def sees_further_on(to: int) -> bool:
    return bh.rpc_sync(to, sees)


def sees_and_fails() -> None:
    raise KeyError(torch.is_anomaly_enabled())


def look_around() -> list[Any] | None:
    """Whether handlers in other processes run in anomaly mode, and whether their processes stay in it."""
    if bh.get_worker_info().id != 0:
        return None
    found: list[Any] = []
    with torch.autograd.detect_anomaly(), bh.context():
        found += [bh.rpc_sync(1, sees), bh.rpc_sync(1, sees_later), bh.rpc_sync(1, sees_further_on, args=(2,))]
        with pytest.raises(KeyError) as caught:
            bh.rpc_sync(1, sees_and_fails)
        found.append(caught.value.args[0])
        made = bh.remote(2, sees)
        found.append(made.to_here())
    with bh.context():
        return [*found, *(bh.rpc_sync(to, sees) for to in range(3))]


def test_handlers_run_in_anomaly_mode() -> None:
    assert bh.launch(look_around, 3, start_method="forkserver")[0] == [*[True] * 5, *[False] * 3]


gates: dict[str, threading.Event] = collections.defaultdict(threading.Event)


def wait_at(gate: str) -> bool:
    gates[f"{gate} reached"].set()
    assert gates[gate].wait(DEADLINE_SECONDS)
    return torch.is_anomaly_enabled()


def test_handlers_that_outlive_the_block(request: pytest.FixtureRequest) -> None:
    """The switch belongs to the process: work for a caller that has left its block does not turn it on again."""
    gate = request.node.name
    with bh.cluster(2), bh.context():
        with torch.autograd.detect_anomaly():
            first = bh.rpc_async(1, wait_at, args=(f"{gate} 1",))
            assert gates[f"{gate} 1 reached"].wait(DEADLINE_SECONDS)
        assert not torch.is_anomaly_enabled()
        with torch.autograd.detect_anomaly():
            second = bh.rpc_async(1, wait_at, args=(f"{gate} 2",))
            assert gates[f"{gate} 2 reached"].wait(DEADLINE_SECONDS)
            gates[f"{gate} 1"].set()
            assert first.wait()
        gates[f"{gate} 2"].set()
        assert not second.wait()


# Passes side by side.


def hang(gate: str, x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y.register_hook(lambda _: (gates[f"{gate} reached"].set(), gates[gate].wait(DEADLINE_SECONDS), None)[2])
    return y * 2


def await_gate(gate: str) -> bool:
    return gates[f"{gate} reached"].wait(DEADLINE_SECONDS)


def open_gate(gate: str) -> None:
    gates[gate].set()


def drive_beside(gate: str) -> list[bool] | None:
    """Worker 0 runs a pass in anomaly mode, which hangs on worker 1; worker 2 runs one through there that is not."""
    if bh.get_worker_info().id == 1:
        return None
    a = torch.zeros(2, requires_grad=True)
    if bh.get_worker_info().id == 0:
        with torch.autograd.detect_anomaly(), bh.context() as ctx:
            ctx.backward(bh.rpc_sync(1, hang, args=(gate, a)).sum(), timeout=DEADLINE_SECONDS)
            return [not ctx.grads[a].isnan().any()]
    assert bh.rpc_sync(1, await_gate, args=(gate,), timeout=DEADLINE_SECONDS)
    try:
        with bh.context() as ctx:
            ctx.backward(on_the_other_worker(a), timeout=DEADLINE_SECONDS)
            return [bool(ctx.grads[a].isnan().all()), bh.rpc_sync(1, sees)]
    finally:
        bh.rpc_sync(1, open_gate, args=(gate,))


def test_passes_of_other_drivers_are_not_in_it(request: pytest.FixtureRequest) -> None:
    found = bh.launch(drive_beside, 3, args=(request.node.name,), start_method="forkserver")
    assert found == [[True], None, [True, False]]


def drive_at_the_handler(gate: str) -> list[bool]:
    """Run by worker 1, where a handler of a caller in anomaly mode waits."""
    assert await_gate(gate)
    a = torch.zeros(2, requires_grad=True)
    with bh.context() as ctx:
        ctx.backward(bh.rpc_sync(2, root_of_zero, args=(a,)).sum(), timeout=DEADLINE_SECONDS)
        return [torch.is_anomaly_enabled(), bool(ctx.grads[a].isnan().all()), bh.rpc_sync(2, sees)]


def drive_while_a_handler_is_in_it(gate: str) -> list[bool] | None:
    if bh.get_worker_info().id:
        return None
    with torch.autograd.detect_anomaly(), bh.context():
        waiting = bh.rpc_async(1, wait_at, args=(gate,))
        assert bh.rpc_sync(1, await_gate, args=(gate,))  # a released context would not switch it on
    found = bh.rpc_sync(1, drive_at_the_handler, args=(gate,))
    bh.rpc_sync(1, open_gate, args=(gate,))
    waiting.wait()
    return found


def test_a_pass_driven_where_a_handler_is_in_it_is_not(request: pytest.FixtureRequest) -> None:
    """torch's switch is on there, but only for the handler."""
    found = bh.launch(drive_while_a_handler_is_in_it, 3, args=(request.node.name,), start_method="forkserver")
    assert found[0] == [True, True, False]


def test_threads_that_share_a_graph() -> None:
    """A thread outside anomaly mode runs nodes that another thread watches."""
    a, barrier, done = torch.zeros(2, requires_grad=True), threading.Barrier(2), []
    with bh.cluster(1) as workers, bh.context() as ctx:
        y = own_function(a)
        y.register_hook(lambda _: (barrier.wait(DEADLINE_SECONDS), None)[1])

        def run() -> None:
            with workers[0]:
                ctx.backward(y.sum())
                done.append(True)

        thread = threading.Thread(target=run)
        with anomaly.watching([y.grad_fn], anomaly.CHECK_NAN):
            thread.start()
            barrier.wait(DEADLINE_SECONDS)
            thread.join(DEADLINE_SECONDS)
        assert done
        assert ctx.grads[a].isnan().all()
