"""Calls that scripted functions make: results, types, errors at run time and threads."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.futures import Future

import backhaul as bh
from backhaul import rpc_async as start
from backhaul._rpc import api as rpc_api

from . import functions
from .conftest import TIMEOUT_SECONDS
from .functions import blend, script, three

A, B = torch.tensor([1.0, 2.0]), torch.tensor([0.5, 4.0])
CALLERS = {"rpc_sync": functions.sync, "rpc_async": functions.async_, "remote": functions.remote}

pytestmark = pytest.mark.usefixtures("workers")


@pytest.mark.parametrize("to", ["worker0", "worker1"])
@pytest.mark.parametrize("call", CALLERS.values(), ids=CALLERS)
def test_results(call: Callable[..., Tensor], to: str) -> None:
    assert torch.equal(call(to, A, B), blend(A, B))


def test_a_called_script_makes_calls_itself() -> None:
    inner = blend(A, B)
    assert torch.equal(functions.two_hops("worker1", "worker2", A, B), inner * blend(B, inner))


def test_the_compiler_knows_the_type_of_the_result() -> None:
    text = str(functions.return_future.graph)
    assert "Future[Tensor] = backhaul::rpc_async" in text
    assert functions.return_future.schema.returns[0].type.annotation_str == "Future[Tensor]"
    assert torch.equal(functions.return_future("worker1", A, B).wait(), blend(A, B))


def test_keywords_and_defaults() -> None:
    @script
    def call(to: str, a: Tensor, b: Tensor) -> list[Tensor]:
        scaled = bh.rpc_sync(to, blend, (a, b), {"scale": 0.5})
        both = bh.rpc_async(to, blend, (a, b, 3.0), {"shift": 7}).wait()
        remote = bh.remote(to, blend, (a, b), {"shift": 0}).to_here()
        return [scaled, both, remote]

    expected = [blend(A, B, scale=0.5), blend(A, B, 3.0, 7), blend(A, B, shift=0)]
    assert all(map(torch.equal, call("worker1", A, B), expected))


def test_types_of_results() -> None:
    @script
    def call(to: str, a: Tensor) -> tuple[int, dict[str, list[Tensor]], tuple[Tensor, str, int | None]]:
        bh.rpc_sync(to, functions.nothing, (a,))
        mixed: dict[str, Any] = {"word": "given"}
        return (
            bh.rpc_sync(to, functions.three),
            bh.rpc_async(to, functions.many, (a, 2)).wait(),
            bh.rpc_sync(to, functions.several, (a,), mixed),
        )

    three, many, several = call("worker1", A)
    assert three == functions.three()
    assert many["none"] == []
    assert all(map(torch.equal, many["a"], [A * 0, A]))
    assert torch.equal(several[0], A + 1)
    assert several[1:] == ("given!", None)


def test_all_ways_to_refer_to_a_function() -> None:
    """A script may import the functions under another name, or reach them through modules."""

    @script
    def call(to: str, a: Tensor, b: Tensor) -> Tensor:
        return (
            start(to, blend, (a, b)).wait()
            + rpc_api.rpc_sync(to, blend, (a, b))
            + bh._rpc.api.rpc_sync(to, blend, (a, b))
        )

    assert torch.equal(call("worker1", A, B), blend(A, B) * 3)


def test_worker_ids_and_calls_from_python() -> None:
    @script
    def call(to: int, a: Tensor, b: Tensor) -> Tensor:
        return bh.rpc_sync(to, blend, (a, b))

    assert torch.equal(call(2, A, B), blend(A, B))
    assert torch.equal(bh.rpc_sync("worker2", functions.sync, ("worker1", A, B)), blend(A, B))


def test_scripted_functions_that_return_futures() -> None:
    assert torch.equal(bh.rpc_sync("worker1", functions.return_future, ("worker2", A, B)), blend(A, B))
    assert torch.equal(bh.remote("worker1", functions.return_future, ("worker2", A, B)).to_here(), blend(A, B))


def test_a_future_passed_from_python_to_script() -> None:
    @script
    def double(future: Future[Tensor]) -> Future[Tensor]:
        return future

    assert torch.equal(double(functions.return_future("worker1", A, B)).wait(), blend(A, B))


def test_many_concurrent_calls() -> None:
    @script
    def call(to: str, a: Tensor, n: int) -> list[Tensor]:
        futures = [bh.rpc_async(to, blend, (a * i, a)) for i in range(n)]
        return [future.wait() for future in futures]

    assert all(map(torch.equal, call("worker1", A, 50), [blend(A * i, A) for i in range(50)]))


# Errors at run time.


def test_unknown_keyword() -> None:
    @script
    def call(to: str, a: Tensor) -> Tensor:
        return bh.rpc_sync(to, blend, (a, a), {"stretch": 1.0})

    with pytest.raises(RuntimeError, match="Unknown keyword argument 'stretch'"):
        call("worker1", A)


def fail_sync(to: str, a: Tensor) -> Tensor:
    return bh.rpc_sync(to, functions.fail, (a,))


def fail_async(to: str, a: Tensor) -> Tensor:
    return bh.rpc_async(to, functions.fail, (a,)).wait()


def fail_remote(to: str, a: Tensor) -> Tensor:
    return bh.remote(to, functions.fail, (a,)).to_here()


@pytest.mark.parametrize("caller", [fail_sync, fail_async, fail_remote])
def test_the_function_raises(caller: Callable[..., Tensor]) -> None:
    with pytest.raises(RuntimeError, match="takes one element, got too many"):
        script(caller)("worker1", A)


def test_an_error_in_a_future_returned_to_python() -> None:
    @script
    def call(to: str, a: Tensor) -> Future[Tensor]:
        return bh.rpc_async(to, functions.fail, (a,))

    future = call("worker1", A)
    with pytest.raises(RuntimeError, match="takes one element, got too many"):
        future.wait()


def test_unknown_worker() -> None:
    with pytest.raises(RuntimeError, match="absent_worker"):
        functions.sync("absent_worker", A, B)


class _Blocker:
    """Blocks a Python function until the test lets it return."""

    def __init__(self) -> None:
        self.released: Future[None] = Future()

    def wait(self) -> None:
        self.released.wait()


blocker = _Blocker()


def block_until_released() -> int:
    """A Python function that the scripted function below calls."""
    blocker.wait()
    return 1


ignored_block_until_released = torch.jit.ignore(block_until_released)


@script
def blocked() -> int:
    return ignored_block_until_released()


def test_timeouts() -> None:
    @script
    def call(to: str, timeout: float) -> int:
        return bh.rpc_sync(to, blocked, (), {}, timeout)

    @script
    def call_remote(to: str, timeout: float) -> int:
        return bh.remote(to, blocked).to_here(timeout)

    blocker.released = Future()
    try:
        for timed_call in (call, call_remote):
            with pytest.raises(RuntimeError, match=r"0\.05 s"):
                timed_call("worker1", 0.05)
        waiting = bh.rpc_async("worker1", call, ("worker2", 0.0))
    finally:
        blocker.released.set_result(None)
    assert waiting.wait() == 1
    assert call("worker1", 30.0) == 1


# Threads.


def counts_here(_: int) -> bool:
    """Whether this thread counts against its worker's limit of threads."""
    return bh.current_worker().thread_pool.inside


ignored_counts = torch.jit.ignore(counts_here)


@script
def counts(_: int) -> bool:
    return ignored_counts(_)


@script
def counts_with_wait(to: str) -> bool:
    found = ignored_counts(0)
    bh.rpc_async(to, three, ()).wait()
    return found


class Waits(torch.nn.Module):
    """A method that waits for a fork."""

    def forward(self, a: Tensor) -> bool:
        found = ignored_counts(0)
        torch.jit.fork(counts, 0).wait()
        return found


def make_waits() -> Any:
    return script(Waits())


def test_handlers_that_wait_in_script_do_not_count() -> None:
    """The worker does not count a thread that waits, although the interpreter does not tell it about the wait."""
    assert bh.rpc_sync("worker1", counts, (0,))
    assert not bh.rpc_sync("worker1", counts_with_wait, ("worker2",))
    assert not bh.remote("worker1", make_waits).rpc_sync().forward(torch.ones(1))
    assert bh.rpc_sync("worker1", counts, (0,))


def block(a: Tensor) -> Tensor:
    """Python code that blocks a thread of the interpreter until other workers have answered."""
    rref = bh.remote("worker2", blend, (a, a))
    fetched = bh.rpc_sync("worker1", functions.fetch, (rref, a), timeout=TIMEOUT_SECONDS)
    return fetched + bh.rpc_sync("worker1", functions.remote, ("worker2", a, a), timeout=TIMEOUT_SECONDS)


ignored_block = torch.jit.ignore(block)


@script
def call_block(a: Tensor) -> Tensor:
    return ignored_block(a)


@script
def fork_blocks(a: Tensor, n: int) -> list[Tensor]:
    futures = [torch.jit.fork(call_block, a) for _ in range(n)]
    return [future.wait() for future in futures]


def test_scripts_called_while_python_blocks_all_threads_of_the_interpreter() -> None:
    """A script that waits for one result at a time needs no thread of the interpreter."""
    wanted = blend(A, A) * A + blend(A, A)
    for made in fork_blocks(A, torch.get_num_interop_threads() + 1):
        torch.testing.assert_close(made, wanted)
