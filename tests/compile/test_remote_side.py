"""Compiled functions and modules on the worker that is called, forward and backward."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backhaul as bh

BACKENDS = ["eager", "aot_eager"]

# The compiler looks at it where an input is no leaf, and hides that unless warnings are errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


def network(x: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(x * weight).exp() + torch.sin(x)


@functools.cache
def compiled_by(backend: str) -> Any:
    return torch.compile(network, backend=backend)


def run_compiled(backend: str, x: Tensor, weight: Tensor) -> Tensor:
    return compiled_by(backend)(x, weight)


@torch.compile(backend="aot_eager")
def decorated(x: Tensor, weight: Tensor) -> Tensor:
    return network(x, weight)


def leaves() -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(0)
    return tuple(torch.randn(3, 4, dtype=torch.float64, generator=make).requires_grad_() for _ in range(2))


def gradients(program: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
    """By plain autograd."""
    x, weight = leaves()
    return list(torch.autograd.grad(program(x, weight).sum(), [x, weight]))


def gradients_over(call: Callable[[Tensor, Tensor], Tensor], **options: Any) -> list[Tensor]:
    """Over workers, of one step in a context."""
    x, weight = leaves()
    with bh.context() as ctx:
        ctx.backward(call(x, weight).sum(), **options)
        held = bh.get_gradients(ctx)
        return [held[x], held[weight]]


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("backend", BACKENDS)
def test_functions_by_name(backend: str) -> None:
    call = functools.partial(bh.rpc_sync, "worker1", run_compiled)
    for _ in range(3):
        found = gradients_over(lambda x, weight: call(args=(backend, x, weight)))
        torch.testing.assert_close(found, gradients(network))


@pytest.mark.usefixtures("workers")
def test_functions_that_are_compiled_where_they_are_defined() -> None:
    found = gradients_over(lambda x, weight: bh.rpc_sync("worker1", decorated, args=(x, weight)))
    torch.testing.assert_close(found, gradients(network))


@pytest.mark.usefixtures("workers")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler, and there is no g++")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what inductor imports
@pytest.mark.may_leak  # inductor starts threads when it likes
def test_inductor() -> None:
    with torch._inductor.config.patch(compile_threads=1):
        call = functools.partial(bh.rpc_sync, "worker1", run_compiled)
        found = gradients_over(lambda x, weight: call(args=("inductor", x, weight)))
    torch.testing.assert_close(found, gradients(network))


# Modules.


def build(backend: str) -> Any:
    torch.manual_seed(0)
    return torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double(), backend=backend)


def build_and_keep(backend: str) -> bh.RRef[Any]:
    return bh.RRef(build(backend))


def gradients_there(ctx: int, module: bh.RRef[nn.Module]) -> list[Tensor]:
    held = bh.get_gradients(ctx)
    return [held[parameter] for parameter in module.local_value().parameters()]


@pytest.fixture(params=["RRef", "RemoteModule"])
def module(request: pytest.FixtureRequest, workers: Any) -> Iterator[tuple[Callable[[Tensor], Tensor], bh.RRef[Any]]]:
    """How to call a compiled module on another worker, and a reference to it."""
    if request.param == "RRef":
        rref = bh.rpc_sync("worker1", build_and_keep, args=("aot_eager",))
        yield rref.rpc_sync().forward, rref
    else:
        made = bh.nn.RemoteModule("worker1", build, ("aot_eager",))
        yield made, made.get_module_rref()


def test_modules(module: tuple[Callable[[Tensor], Tensor], bh.RRef[Any]]) -> None:
    call, rref = module
    plain = build("eager")
    x, _ = leaves()
    wanted = torch.autograd.grad(plain(x * 2).sum(), [x, *plain.parameters()])
    for _ in range(3):
        with bh.context() as ctx:
            ctx.backward(call(x * 2).sum())
            there = bh.rpc_sync("worker1", gradients_there, args=(ctx, rref))
            torch.testing.assert_close([bh.get_gradients(ctx)[x], *there], list(wanted))


# Higher orders.


def twice(call: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    x, weight = leaves()
    with bh.context() as ctx:
        ctx.backward(call(x, weight).sum(), create_graph=True)
        first = bh.get_gradients(ctx)[x]
        ctx.backward(first.pow(2).sum())
        return bh.get_gradients(ctx)[weight] - gradients(network)[1]


@pytest.mark.usefixtures("workers")
def test_the_second_order_where_the_compiler_has_it() -> None:
    x, weight = leaves()
    (first,) = torch.autograd.grad(network(x, weight).sum(), x, create_graph=True)
    (wanted,) = torch.autograd.grad(first.pow(2).sum(), weight)
    found = twice(lambda x, weight: bh.rpc_sync("worker1", run_compiled, args=("eager", x, weight)))
    torch.testing.assert_close(found.detach(), wanted)


@pytest.mark.usefixtures("workers")
def test_the_second_order_where_the_compiler_refuses() -> None:
    with pytest.raises(RuntimeError, match="aot_autograd does not currently support double backward") as caught:
        twice(lambda x, weight: bh.rpc_sync("worker1", run_compiled, args=("aot_eager", x, weight)))
    assert any("worker1" in note for note in caught.value.__notes__)


# Many at once.


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("backend", BACKENDS)
def test_many_calls_at_once(backend: str) -> None:
    """The first of them compile it, all at the same time."""
    x, weight = leaves()
    count = 16
    with bh.context() as ctx:
        calls = [bh.rpc_async("worker1", run_compiled, args=(backend, x * n, weight)) for n in range(count)]
        ctx.backward(sum(result.sum() for result in bh.wait_all(calls)))
        held = bh.get_gradients(ctx)
        found = [held[x], held[weight]]
    wanted = gradients(lambda x, weight: sum(network(x * n, weight) for n in range(count)))
    torch.testing.assert_close(found, wanted)


# With operators.


@pytest.mark.usefixtures("workers")
def test_a_compiled_function_as_an_operator() -> None:
    there = bh.remote_op(decorated, to="worker1")
    torch.testing.assert_close(gradients(there), gradients(network))
    around = torch.compile(lambda x, weight: there(x * 2, weight), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(gradients(around), gradients(lambda x, weight: network(x * 2, weight)))
