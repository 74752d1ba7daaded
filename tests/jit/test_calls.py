"""Calls that scripted functions make: results, their types, what the compiler refuses and what goes wrong later."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.futures import Future

import backhaul as bh
from backhaul import rpc_async as start
from backhaul._rpc import api as inner

from . import functions
from .conftest import PATIENCE
from .functions import blend, script, three

A, B = torch.tensor([1.0, 2.0]), torch.tensor([0.5, 4.0])
WAYS = {"sync": functions.sync, "later": functions.later, "far": functions.far}

pytestmark = pytest.mark.usefixtures("workers")


@pytest.mark.parametrize("to", ["worker0", "worker1"])
@pytest.mark.parametrize("call", WAYS.values(), ids=WAYS)
def test_results(call: Callable[..., Tensor], to: str) -> None:
    assert torch.equal(call(to, A, B), blend(A, B))


def test_calls_go_on_from_where_they_arrive() -> None:
    there = blend(A, B)
    assert torch.equal(functions.two_hops("worker1", "worker2", A, B), there * blend(B, there))


def test_the_compiler_knows_the_type() -> None:
    text = str(functions.give_future.graph)
    assert "Future[Tensor] = backhaul::rpc_async" in text
    assert functions.give_future.schema.returns[0].type.annotation_str == "Future[Tensor]"
    assert torch.equal(functions.give_future("worker1", A, B).wait(), blend(A, B))


def test_keywords_and_defaults() -> None:
    @script
    def call(to: str, a: Tensor, b: Tensor) -> list[Tensor]:
        scaled = bh.rpc_sync(to, blend, (a, b), {"scale": 0.5})
        both = bh.rpc_async(to, blend, (a, b, 3.0), {"shift": 7}).wait()
        kept = bh.remote(to, blend, (a, b), {"shift": 0}).to_here()
        return [scaled, both, kept]

    expected = [blend(A, B, scale=0.5), blend(A, B, 3.0, 7), blend(A, B, shift=0)]
    assert all(map(torch.equal, call("worker1", A, B), expected))


def test_kinds_of_values() -> None:
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


def test_names_of_calls() -> None:
    """However a function refers to them."""

    @script
    def call(to: str, a: Tensor, b: Tensor) -> Tensor:
        return (
            start(to, blend, (a, b)).wait()
            + inner.rpc_sync(to, blend, (a, b))
            + bh._rpc.api.rpc_sync(to, blend, (a, b))
        )

    assert torch.equal(call("worker1", A, B), blend(A, B) * 3)


def test_workers_by_number_and_in_python() -> None:
    @script
    def call(to: int, a: Tensor, b: Tensor) -> Tensor:
        return bh.rpc_sync(to, blend, (a, b))

    assert torch.equal(call(2, A, B), blend(A, B))
    assert torch.equal(bh.rpc_sync("worker2", functions.sync, ("worker1", A, B)), blend(A, B))


def test_scripted_functions_that_answer_later() -> None:
    assert torch.equal(bh.rpc_sync("worker1", functions.give_future, ("worker2", A, B)), blend(A, B))
    assert torch.equal(bh.remote("worker1", functions.give_future, ("worker2", A, B)).to_here(), blend(A, B))


def test_a_future_of_python_in_script() -> None:
    @script
    def double(future: Future[Tensor]) -> Future[Tensor]:
        return future

    assert torch.equal(double(functions.give_future("worker1", A, B)).wait(), blend(A, B))


def test_many_calls_at_once() -> None:
    @script
    def call(to: str, a: Tensor, n: int) -> list[Tensor]:
        futures = [bh.rpc_async(to, blend, (a * i, a)) for i in range(n)]
        return [future.wait() for future in futures]

    assert all(map(torch.equal, call("worker1", A, 50), [blend(A * i, A) for i in range(50)]))


# What the compiler refuses.


def refused(function: Callable[..., Any], text: str) -> None:
    with pytest.raises(RuntimeError, match=text):
        script(function)


def test_arguments_by_name_only() -> None:
    """The compiler looks at positional arguments alone, so that those without a default have to be among them."""

    def call(to: str, a: Tensor) -> Tensor:
        return bh.rpc_sync(to, blend, (a,), {"b": a})

    refused(call, "Argument b not provided")


def test_too_few_arguments() -> None:
    def call(to: str, a: Tensor) -> Tensor:
        return bh.rpc_sync(to, blend, (a,))

    refused(call, "Argument b not provided")


def test_too_many_arguments() -> None:
    def call(to: str, a: Tensor) -> Tensor:
        return bh.rpc_async(to, blend, (a, a, 1.0, 1, a)).wait()

    refused(call, "Expected at most 4 arguments but found 5 positional arguments")


def test_wrong_type_of_argument() -> None:
    def call(to: str, a: Tensor) -> Tensor:
        return bh.remote(to, blend, (a, "word")).to_here()

    refused(call, "Expected a value of type 'Tensor' for argument 'b'")


def test_wrong_type_of_result() -> None:
    def call(to: str, a: Tensor) -> str:
        return bh.rpc_async(to, blend, (a, a)).wait()

    refused(call, "Return value was annotated as having type str but is actually of type Tensor")


def test_wrong_form() -> None:
    def call(to: str, a: Tensor) -> Tensor:
        return bh.rpc_sync(to, blend, (a, a), {}, 1.0, 2)

    refused(call, "Possible forms of call to rpc_sync")


def test_keywords_of_the_call_itself() -> None:
    def call(to: str, a: Tensor) -> Tensor:
        return bh.rpc_sync(to, blend, args=(a, a))

    refused(call, "does not support kwargs")


def test_a_function_that_cannot_be_scripted() -> None:
    def plain(a: Any) -> Any:
        yield a

    def call(to: str, a: Tensor) -> Tensor:
        return bh.rpc_sync(to, plain, (a,))

    with pytest.raises(torch.jit.frontend.NotSupportedError, match="Yield aren't supported"):
        script(call)


def test_not_a_function() -> None:
    def call(to: str, a: Tensor) -> Tensor:
        return bh.rpc_sync(to, A, (a,))

    refused(call, "rpc|Tensor")


# What goes wrong later.


def test_unknown_keyword() -> None:
    @script
    def call(to: str, a: Tensor) -> Tensor:
        return bh.rpc_sync(to, blend, (a, a), {"stretch": 1.0})

    with pytest.raises(RuntimeError, match="Unknown keyword argument 'stretch'"):
        call("worker1", A)


@pytest.mark.parametrize("way", ["rpc_sync", "rpc_async", "remote"])
def test_the_function_raises(way: str) -> None:
    calls = {
        "rpc_sync": lambda: script(fail_sync)("worker1", A),
        "rpc_async": lambda: script(fail_later)("worker1", A),
        "remote": lambda: script(fail_far)("worker1", A),
    }
    with pytest.raises(RuntimeError, match="more than one, which is too many"):
        calls[way]()


def fail_sync(to: str, a: Tensor) -> Tensor:
    return bh.rpc_sync(to, functions.fail, (a,))


def fail_later(to: str, a: Tensor) -> Tensor:
    return bh.rpc_async(to, functions.fail, (a,)).wait()


def fail_far(to: str, a: Tensor) -> Tensor:
    return bh.remote(to, functions.fail, (a,)).to_here()


def test_an_error_in_a_future_given_to_python() -> None:
    @script
    def call(to: str, a: Tensor) -> Future[Tensor]:
        return bh.rpc_async(to, functions.fail, (a,))

    future = call("worker1", A)
    with pytest.raises(RuntimeError, match="more than one, which is too many"):
        future.wait()


def test_no_such_worker() -> None:
    with pytest.raises(RuntimeError, match="nobody"):
        functions.sync("nobody", A, B)


def slow() -> int:
    """Not scripted itself: called by name from the function below."""
    hold.wait()
    return 1


class _Hold:
    def __init__(self) -> None:
        self.one_shot: Future[None] = Future()

    def wait(self) -> None:
        self.one_shot.wait()


hold = _Hold()
ignored_slow = torch.jit.ignore(slow)


@script
def wait_there() -> int:
    return ignored_slow()


def test_timeouts() -> None:
    @script
    def call(to: str, timeout: float) -> int:
        return bh.rpc_sync(to, wait_there, (), {}, timeout)

    @script
    def call_far(to: str, timeout: float) -> int:
        return bh.remote(to, wait_there).to_here(timeout)

    hold.one_shot = Future()
    try:
        for slow_call in (call, call_far):
            with pytest.raises(RuntimeError, match=r"0\.05 s"):
                slow_call("worker1", 0.05)
        waiting = bh.rpc_async("worker1", call, ("worker2", 0.0))
    finally:
        hold.one_shot.set_result(None)
    assert waiting.wait() == 1
    assert call("worker1", 30.0) == 1


# What the compiler is not to be asked for.


class Holder:
    """A script class, if it is compiled."""

    def __init__(self, a: Tensor) -> None:
        self.a = a

    def call(self) -> Tensor:
        return bh.rpc_sync("worker1", blend, (self.a, self.a))


def use_holder(a: Tensor) -> Tensor:
    return Holder(a).call()


@pytest.mark.parametrize("what", [Holder, use_holder])
def test_calls_in_script_classes(what: Any) -> None:
    with pytest.raises(RuntimeError, match=r"rpc_sync cannot be called here: .* not in methods of script classes"):
        script(what)


def test_contexts_in_script() -> None:
    def enters(a: Tensor) -> Tensor:
        with bh.context():
            return bh.rpc_sync("worker1", blend, (a, a))

    with pytest.raises(RuntimeError, match=r"a context cannot be entered in script: .* pass its id in"):
        script(enters)


def test_contexts_beside_script() -> None:
    def enters(a: Tensor) -> Tensor:
        if not torch.jit.is_scripting():
            with bh.context():
                return a
        return bh.rpc_sync("worker1", blend, (a, a))

    assert torch.equal(script(enters)(A), blend(A, A))


def test_references_to_nobody_knows_what() -> None:
    def bring(rref: bh.RRef) -> Tensor:  # type: ignore[type-arg]
        return rref.to_here()

    with pytest.raises(Exception, match=r"write RRef\[T\](.|\n)*rref: bh.RRef"):
        script(bring)


# Threads.


def counts_here(_: int) -> bool:
    """Whether what runs here counts against the limit of its worker's threads."""
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
    """Likewise, as a method."""

    def forward(self, a: Tensor) -> bool:
        found = ignored_counts(0)
        torch.jit.fork(counts, 0).wait()
        return found


def make_waits() -> Any:
    return script(Waits())


def test_handlers_that_wait_in_script_do_not_count() -> None:
    """The interpreter waits without a word to the worker."""
    assert bh.rpc_sync("worker1", counts, (0,))
    assert not bh.rpc_sync("worker1", counts_with_wait, ("worker2",))
    assert not bh.remote("worker1", make_waits).rpc_sync().forward(torch.ones(1))
    assert bh.rpc_sync("worker1", counts, (0,))


def block(a: Tensor) -> Tensor:
    """Python on a thread of the interpreter's, which it holds until there is an answer."""
    rref = bh.remote("worker2", blend, (a, a))
    brought = bh.rpc_sync("worker1", functions.bring, (rref, a), timeout=PATIENCE)
    return brought + bh.rpc_sync("worker1", functions.far, ("worker2", a, a), timeout=PATIENCE)


ignored_block = torch.jit.ignore(block)


@script
def call_block(a: Tensor) -> Tensor:
    return ignored_block(a)


@script
def fork_blocks(a: Tensor, n: int) -> list[Tensor]:
    futures = [torch.jit.fork(call_block, a) for _ in range(n)]
    return [future.wait() for future in futures]


def test_scripts_called_while_python_holds_all_threads_of_the_interpreter() -> None:
    """Those that wait for one thing after the other need none of them."""
    wanted = blend(A, A) * A + blend(A, A)
    for made in fork_blocks(A, torch.get_num_interop_threads() + 1):
        torch.testing.assert_close(made, wanted)
