"""Calls inside of compiled functions: each ends the graph, once, and gradients are those of plain autograd."""

from __future__ import annotations

import contextlib
import io
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

import backhaul as bh

STEPS = 12  # more than the compiler would compile anew

pytestmark = [
    pytest.mark.usefixtures("workers"),
    # The compiler looks at it after any graph break, and hides that unless warnings are errors.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


def leaf(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


X = torch.tensor([0.3, -1.2, 2.0], dtype=torch.float64)


def gradient_of(program: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """By plain autograd."""
    weight = leaf(1.5, 0.4, -0.7)
    (found,) = torch.autograd.grad(program(weight), weight)
    return found


@contextlib.contextmanager
def no_new_graphs() -> Iterator[None]:
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


def check(
    compiled: Callable[[torch.Tensor], torch.Tensor],
    plain: Callable[[torch.Tensor], torch.Tensor],
    counter: CompileCounter,
    *,
    graphs: int,
) -> None:
    """Run many steps, each in a context of its own: all gradients are right, and nothing is compiled again."""
    wanted = gradient_of(plain)
    for step in range(STEPS):
        with bh.context() as ctx, no_new_graphs() if step else contextlib.nullcontext():
            weight = leaf(1.5, 0.4, -0.7)
            bh.backward(ctx, [compiled(weight)])
            torch.testing.assert_close(bh.get_gradients(ctx)[weight], wanted)
    assert counter.frame_count == graphs


def with_rpc_sync(weight: torch.Tensor) -> torch.Tensor:
    y = torch.sin(weight * X)
    return (bh.rpc_sync("worker1", torch.exp, args=(y,)) * weight).sum()


def with_rpc_async(weight: torch.Tensor) -> torch.Tensor:
    y = torch.sin(weight * X)
    future = bh.rpc_async("worker1", torch.exp, args=(y,))
    return (future.wait() * weight).sum()


def with_wait_all(weight: torch.Tensor) -> torch.Tensor:
    y = torch.sin(weight * X)
    (found,) = bh.wait_all([bh.rpc_async("worker1", torch.exp, args=(y,))])
    return (found * weight).sum()


def with_remote(weight: torch.Tensor) -> torch.Tensor:
    y = torch.sin(weight * X)
    return (bh.remote("worker1", torch.exp, args=(y,)).to_here() * weight).sum()


def with_proxy(weight: torch.Tensor) -> torch.Tensor:
    y = torch.sin(weight * X)
    return (bh.RRef(y).rpc_sync().exp() * weight).sum()


def plainly(weight: torch.Tensor) -> torch.Tensor:
    return (torch.sin(weight * X).exp() * weight).sum()


@pytest.mark.parametrize("program", [with_rpc_sync, with_rpc_async, with_wait_all, with_remote, with_proxy])
def test_a_call_breaks_the_graph_in_two(program: Callable[[torch.Tensor], torch.Tensor]) -> None:
    counter = CompileCounter()
    check(torch.compile(program, backend=counter), plainly, counter, graphs=2)


@pytest.mark.parametrize("program", [with_rpc_sync, with_remote])
def test_gradients_through_aot(program: Callable[[torch.Tensor], torch.Tensor]) -> None:
    counter = CompileCounter()
    check(torch.compile(program, backend="aot_eager"), plainly, counter, graphs=0)


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def chain(weight: torch.Tensor) -> torch.Tensor:
    y = weight * X
    for worker in ("worker1", "worker2", "worker1"):
        y = bh.rpc_sync(worker, double, args=(torch.sin(y),))
    return (y * weight).sum()


def test_calls_in_a_loop() -> None:
    def plain(weight: torch.Tensor) -> torch.Tensor:
        y = weight * X
        for _ in range(3):
            y = 2 * torch.sin(y)
        return (y * weight).sum()

    compiled = torch.compile(chain, backend="aot_eager")
    wanted = gradient_of(plain)
    for step in range(3):
        with bh.context() as ctx, no_new_graphs() if step else contextlib.nullcontext():
            weight = leaf(1.5, 0.4, -0.7)
            bh.backward(ctx, [compiled(weight)])
            torch.testing.assert_close(bh.get_gradients(ctx)[weight], wanted)


def whole_step(weight: torch.Tensor) -> torch.Tensor:
    y = torch.sin(weight * X)
    with bh.context() as ctx:
        z = bh.rpc_sync("worker1", torch.exp, args=(y,))
        bh.backward(ctx, [(z * weight).sum()])
        return bh.get_gradients(ctx)[weight] * 1


def whole_step_by_handle(weight: torch.Tensor) -> torch.Tensor:
    with bh.context() as ctx:
        z = bh.rpc_sync("worker1", torch.exp, args=(torch.sin(weight * X),))
        ctx.backward((z * weight).sum())
        return ctx.grads[weight] * 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("step", [whole_step, whole_step_by_handle])
def test_context_and_backward_inside(step: Callable[[torch.Tensor], torch.Tensor], backend: str) -> None:
    compiled = torch.compile(step, backend=backend)
    for number in range(STEPS):
        with no_new_graphs() if number else contextlib.nullcontext():
            torch.testing.assert_close(compiled(leaf(1.5, 0.4, -0.7)), gradient_of(plainly))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = torch.nn.Linear(3, 4)
        self.there = bh.nn.RemoteModule("worker1", torch.nn.Linear, (4, 4))
        self.after = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(torch.tanh(self.there(torch.tanh(self.before(x)))))


def gradients_there(ctx: int, parameters: list[bh.RRef[Any]]) -> list[torch.Tensor]:
    held = bh.get_gradients(ctx)
    return [held[parameter.local_value()] for parameter in parameters]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_remote_module_in_a_compiled_module(backend: str) -> None:
    torch.manual_seed(0)
    model = Model()
    plain = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)
    )
    plain.load_state_dict(
        {
            f"{number}.{name}": value
            for number, part in ((0, model.before), (2, model.there), (4, model.after))
            for name, value in part.state_dict().items()
        }
    )
    x = torch.randn(5, 3)
    plain(x).sum().backward()
    compiled = torch.compile(model, backend=backend)
    for step in range(3):
        with bh.context() as ctx, no_new_graphs() if step else contextlib.nullcontext():
            bh.backward(ctx, [compiled(x).sum()])
            here = bh.get_gradients(ctx)
            there = bh.rpc_sync("worker1", gradients_there, args=(ctx, model.there.remote_parameters()))
        found = [*map(here.get, model.before.parameters()), *there, *map(here.get, model.after.parameters())]
        torch.testing.assert_close(found, [parameter.grad for parameter in plain.parameters()])
    del model, compiled


def test_optimizer_inside() -> None:
    parameter = leaf(1.0, 2.0, 3.0)
    optimizer = bh.optim.DistributedOptimizer(torch.optim.SGD, [bh.RRef(parameter)], lr=0.5)

    @torch.compile(backend="eager")
    def step() -> None:
        with bh.context() as ctx:
            loss = bh.rpc_sync("worker1", double, args=(parameter * X,)).sum()
            bh.backward(ctx, [loss])
            optimizer.step(ctx)

    step()
    torch.testing.assert_close(parameter.detach(), torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64) - X)


def test_the_whole_graph_cannot_be_had() -> None:
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"talks to other workers.*backhaul\.remote_op"):
        torch.compile(lambda weight: bh.rpc_sync("worker1", double, args=(weight * X,)), fullgraph=True)(X)


def test_nothing_is_said() -> None:
    """No warnings (they are errors here), nothing logged, nothing printed; one reason for each break."""
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logging.getLogger("torch._dynamo").addHandler(handler)
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said), bh.context():
            torch.compile(with_rpc_sync, backend="eager")(leaf(1.5, 0.4, -0.7))
    finally:
        logging.getLogger("torch._dynamo").removeHandler(handler)
    assert not said.getvalue()
    assert len(counters["graph_break"]) == 1


def test_errors_are_those_of_the_call() -> None:
    @torch.compile(backend="eager")
    def fails(weight: torch.Tensor) -> torch.Tensor:
        return bh.rpc_sync("worker1", torch.mm, args=(weight * X, weight))

    with pytest.raises(RuntimeError, match="must be a matrix") as caught:
        fails(X)
    assert isinstance(caught.value.__cause__, bh.errors.RemoteTraceback)


def test_importing_does_not_import_the_compiler() -> None:
    code = "import sys, backhaul; sys.exit('torch._dynamo' in sys.modules or 'torch._inductor' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
