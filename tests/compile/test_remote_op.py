"""Calls that stay inside of graphs, against the same function called in place."""

from __future__ import annotations

import functools
import gc
import logging
import shutil
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import backhaul as bh

from . import functions

pytestmark = [
    pytest.mark.usefixtures("workers"),
    # Forward mode scripts some of its derivatives when it is used for the first time.
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
]

BACKENDS = ["eager", "aot_eager"]
STEPS = 12  # more than the compiler would compile anew
WANTED = 2  # as the operator is told that gradients are


def tensor(*shape: int, seed: int = 0, grad: bool = True) -> Tensor:
    made = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return made.requires_grad_(grad)


def around(function: Callable[..., Any]) -> Callable[..., Tensor]:
    """A program with the function in its middle."""

    def program(x: Tensor, w: Tensor) -> Tensor:
        return function(x.cos(), w, 3) * x + function(w.expand(3, 4) * 2, w)

    return program


def gradients(program: Callable[..., Tensor], *leaves: Tensor, weight: Tensor | None = None) -> Sequence[Tensor]:
    result = program(*leaves)
    return torch.autograd.grad((result * (weight if weight is not None else 1)).sum(), leaves)


# Ways to run it.


def test_eager() -> None:
    leaves = tensor(3, 4), tensor(4, seed=1)
    there = bh.remote_op(functions.head, to="worker1")
    torch.testing.assert_close(around(there)(*leaves), around(functions.head)(*leaves))
    torch.testing.assert_close(gradients(around(there), *leaves), gradients(around(functions.head), *leaves))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled(backend: str, dynamic: bool) -> None:
    there = bh.remote_op(functions.head, to="worker1")
    compiled = torch.compile(around(there), backend=backend, fullgraph=True, dynamic=dynamic)
    for _ in range(3):
        leaves = tensor(3, 4), tensor(4, seed=1)
        torch.testing.assert_close(gradients(compiled, *leaves), gradients(around(functions.head), *leaves))
    with torch.no_grad():
        torch.testing.assert_close(compiled(*leaves), around(functions.head)(*leaves))


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler, and there is no g++")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what inductor imports
@pytest.mark.may_leak  # inductor starts threads when it likes
def test_compiled_by_inductor() -> None:
    leaves = tensor(3, 4), tensor(4, seed=1)
    there = bh.remote_op(functions.head, to="worker1")
    with torch._inductor.config.patch(compile_threads=1):
        compiled = torch.compile(around(there), backend="inductor", fullgraph=True)
        torch.testing.assert_close(gradients(compiled, *leaves), gradients(around(functions.head), *leaves))


def test_sizes_that_change() -> None:
    there = bh.remote_op(functions.head, to="worker1")
    compiled = torch.compile(lambda x, w: there(x * 2, w, x.shape[0]), backend="aot_eager", fullgraph=True)
    for rows in (2, 3, 4, 7):
        leaves = tensor(rows, 4), tensor(4, seed=1)
        wanted = gradients(lambda x, w: functions.head(x * 2, w, x.shape[0]), *leaves)
        torch.testing.assert_close(gradients(compiled, *leaves), wanted)


def test_many_steps_are_compiled_once() -> None:
    there = bh.remote_op(functions.head, to="worker1")
    compiled = torch.compile(lambda x, w: there(x * 2, w), backend="aot_eager", fullgraph=True)
    gradients(compiled, tensor(3, 4), tensor(4, seed=1))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(STEPS):
            with bh.context():
                gradients(compiled, tensor(3, 4, seed=step), tensor(4, seed=1))


def test_transforms() -> None:
    x, w = tensor(3, 4, grad=False), tensor(4, seed=1, grad=False)
    there = bh.remote_op(functions.head, to="worker1")

    def same(transform: Callable[[Callable[..., Any]], Callable[[Tensor], Any]]) -> None:
        torch.testing.assert_close(
            transform(lambda x: there(x, w))(x), transform(lambda x: functions.head(x, w))(x), check_stride=False
        )

    same(lambda f: torch.func.grad(lambda x: f(x).sum()))
    same(lambda f: torch.func.grad(lambda x: torch.func.grad(lambda x: f(x).sum())(x).pow(2).sum()))
    same(lambda f: lambda x: torch.func.vjp(f, x)[1](torch.ones_like(x)))
    same(lambda f: lambda x: torch.func.jvp(f, (x,), (torch.ones_like(x),)))
    same(torch.func.vmap)
    same(torch.func.jacrev)
    same(torch.func.jacfwd)
    same(lambda f: lambda x: torch.func.hessian(lambda x: f(x).sum())(x[0]))
    same(lambda f: torch.func.vmap(torch.func.grad(lambda x: f(x).sum())))
    same(lambda f: torch.func.grad(lambda x: torch.func.vmap(f, in_dims=1, out_dims=1)(x.t().reshape(4, 3)).sum()))


@pytest.mark.parametrize("backend", BACKENDS)
def test_transforms_inside_of_compiled_functions(backend: str) -> None:
    x, w = tensor(3, 4, grad=False), tensor(4, seed=1, grad=False)
    there = bh.remote_op(functions.head, to="worker1")
    for transform in (lambda f: torch.func.grad(lambda x: f(x).sum()), torch.func.vmap):
        compiled = torch.compile(transform(lambda x: there(x, w)), backend=backend, fullgraph=True)
        torch.testing.assert_close(compiled(x), transform(lambda x: functions.head(x, w))(x))


def test_forward_mode() -> None:
    x, w = tensor(3, 4, grad=False), tensor(4, seed=1, grad=False)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        found = forward_ad.unpack_dual(bh.remote_op(functions.head, to="worker1")(dual, w)).tangent
        wanted = forward_ad.unpack_dual(functions.head(dual, w)).tangent
    torch.testing.assert_close(found, wanted)


def test_numerically() -> None:
    there = bh.remote_op(functions.head, to="worker1")
    leaves = tensor(2, 3), tensor(3, seed=1)
    assert torch.autograd.gradcheck(there, leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(there, leaves)
    many = bh.remote_op(functions.several, to="worker1")
    pair = tensor(2, 2), tensor(2, 2, seed=1)
    assert torch.autograd.gradcheck(lambda *xs: many(list(xs), [1])[:2], pair)
    assert torch.autograd.gradgradcheck(lambda *xs: many(list(xs), [1])[:2], pair)


def test_the_third_order() -> None:
    def thrice(function: Callable[..., Tensor]) -> Tensor:
        x = tensor(4)
        result = function(x, x * 2)
        for _ in range(3):
            (result,) = torch.autograd.grad(result.sum(), x, create_graph=True)
        return result

    torch.testing.assert_close(thrice(bh.remote_op(functions.head, to="worker1")), thrice(functions.head))


def test_complex_numbers() -> None:
    x = torch.randn(3, dtype=torch.complex128, generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert torch.autograd.gradcheck(bh.remote_op(functions.head, to="worker1"), (x, x.detach() * 2))


# torch's own checks of operators.

OPERATORS: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (functions.head, (tensor(3, 4), tensor(4), 2)),
    (functions.scaled, (tensor(3), 2.0, "abc", tensor(3), True)),
    (functions.scaled, (tensor(3), 2.0, "abc", None, False)),
    (functions.several, ([tensor(3, 3), tensor(3, 3)], [1, 2])),
    (functions.as_list, (tensor(3), 3)),
    (functions.unchanged, (tensor(3),)),
    (functions.constant, (tensor(3), tensor(3))),
]


# The check itself reads the .grad of tensors that are not leaves, for any operator (torch 2.15).
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(("function", "args"), OPERATORS, ids=lambda value: getattr(value, "__name__", ""))
def test_opcheck(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.library.opcheck(bh.remote_op(function, to="worker1").op, (*args, WANTED, 0))


# Arguments and results.


def test_arguments_by_name_and_defaults() -> None:
    there = bh.remote_op(functions.scaled, to="worker1")
    x, shift = tensor(3), tensor(3, seed=1)
    for options in ({}, {"by": 2.0}, {"name": "abc", "flip": True}, {"shift": shift, "by": 3}):
        compiled = torch.compile(functools.partial(there, **options), backend="aot_eager", fullgraph=True)
        for call in (there, compiled):
            options_of_call = {} if call is compiled else options
            found = call(x, **options_of_call)
            torch.testing.assert_close(found, functions.scaled(x, **options))
            wanted = torch.autograd.grad(functions.scaled(x, **options).sum(), x)
            torch.testing.assert_close(torch.autograd.grad(found.sum(), x), wanted)
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        there(by=2.0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'to'"):
        there(x, to=2.0)
    with pytest.raises(TypeError, match="too many positional"):
        there(x, 2.0)


@pytest.mark.parametrize("backend", [None, *BACKENDS])
def test_results_of_every_kind(backend: str | None) -> None:
    def program(function: Callable[..., Any], x: Tensor, y: Tensor) -> Tensor:
        product, turned, signs = function([x, y], [1, 2])
        assert not signs.requires_grad
        return (product.sum(0) * turned * signs[0]).sum()

    leaves = tensor(3, 3), tensor(3, 3, seed=1)
    run = program if backend is None else torch.compile(program, backend=backend, fullgraph=True)
    found = gradients(functools.partial(run, bh.remote_op(functions.several, to="worker1")), *leaves)
    torch.testing.assert_close(found, gradients(functools.partial(program, functions.several), *leaves))
    parts = bh.remote_op(functions.as_list, to="worker1")(leaves[0], 3)
    assert isinstance(parts, list)
    torch.testing.assert_close(torch.autograd.grad(parts[2].sum(), leaves[0])[0], torch.full((3, 3), 2.0).double())


def test_results_share_no_memory() -> None:
    one, other = bh.remote_op(functions.unchanged, to="worker1")(tensor(3, grad=False))
    one.zero_()
    torch.testing.assert_close(other, tensor(3, grad=False))


def test_what_has_no_gradient_gets_zeros() -> None:
    """As an operator's, it is the function's own business what it depends on."""
    x, y = tensor(3), tensor(3, seed=1)
    bh.remote_op(functions.constant, to="worker1")(x, y).sum().backward()
    assert x.grad is not None
    assert not x.grad.any()


def test_nothing_is_kept_of_calls_without_gradients() -> None:
    there = bh.remote_op(functions.head, to="worker1")
    x, w = tensor(3, 4), tensor(4)
    with torch.no_grad():
        assert not there(x, w).requires_grad
    assert not there(x.detach(), w.detach()).requires_grad
    (of_w,) = torch.autograd.grad(there(x.detach(), w).sum(), w)
    torch.testing.assert_close(of_w, torch.autograd.grad(functions.head(x.detach(), w).sum(), w)[0])


def test_graphs_are_freed() -> None:
    there = bh.remote_op(functions.head, to="worker1")
    x = tensor(3, 4) * 1
    kept = weakref.ref(x)
    gc.disable()
    try:
        result = there(x, tensor(4))
        del x
        assert kept() is not None
        del result
        assert kept() is None
    finally:
        gc.enable()


def test_closures() -> None:
    def maker(factor: float) -> Callable[[Tensor], Tensor]:
        def scale(x: Tensor) -> Tensor:
            return torch.sin(x) * factor

        return scale

    doubled, tripled = maker(2.0), maker(3.0)
    x = tensor(3)
    for function in (doubled, tripled):
        there = bh.remote_op(function, to="worker1")
        torch.testing.assert_close(gradients(there, x), gradients(function, x))
        compiled = torch.compile(lambda x, there=there: there(x), backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(gradients(compiled, x), gradients(function, x))
    assert bh.remote_op(doubled, to="worker1") is not bh.remote_op(tripled, to="worker1")


def test_one_operator_for_a_function_and_a_worker() -> None:
    made = bh.remote_op(functions.head, to="worker1")
    assert bh.remote_op(functions.head, to="worker1") is made
    assert bh.remote_op(functions.head, to=bh.get_worker_info("worker1")) is made
    assert bh.remote_op(functions.head, to="worker2") is not made
    assert repr(made) == "<remote_op head on 'worker1'>"
    assert made.op is not bh.remote_op(functions.head, to="worker1", timeout=5).op
    x, w = tensor(3, 4), tensor(4)
    torch.testing.assert_close(bh.remote_op(functions.head, to=0)(x, w), functions.head(x, w))  # this very worker


def test_what_cannot_be_an_operator() -> None:
    def untyped(x, y: Tensor) -> Tensor: ...  # type: ignore[no-untyped-def]
    def no_result(x: Tensor): ...  # type: ignore[no-untyped-def]
    def any_number(*xs: Tensor) -> Tensor: ...
    def odd(x: dict[str, Tensor]) -> Tensor: ...
    def holes(xs: list[Tensor | None]) -> Tensor: ...
    def number(x: Tensor) -> int: ...

    reasons = {
        untyped: "no annotation for 'x'",
        no_result: "return",
        any_number: "variable number",
        odd: "unsupported type dict",
        holes: "may be None",
        number: "return <class 'int'>",
        torch.sin: "no signature",
    }
    for function, reason in reasons.items():
        with pytest.raises(TypeError, match=f"cannot be a remote_op.*{reason}"):
            bh.remote_op(function, to="worker1")


def test_a_function_that_lies_about_its_result() -> None:
    def liar(x: Tensor) -> Tensor:
        return 3  # type: ignore[return-value]

    with pytest.raises(TypeError, match="must return tensors, but it returned a int"):
        bh.remote_op(liar, to="worker1")(tensor(3))


def test_arguments_are_not_to_be_changed() -> None:
    there = bh.remote_op(functions.in_place, to="worker1")
    x = tensor(3, grad=False)
    with pytest.raises(ValueError, match="in_place changes an argument in place"):
        there(x)
    with pytest.raises(RuntimeError, match="in-place"):
        there(x.clone().requires_grad_())
    with pytest.raises(Exception, match="in_place changes an argument in place"):
        torch.compile(there, backend="aot_eager", fullgraph=True)(x)


# Randomness.


@pytest.mark.parametrize("backend", [None, *BACKENDS])
def test_gradients_of_random_functions(backend: str | None) -> None:
    there = bh.remote_op(functions.dropout, to="worker1")
    run = there if backend is None else torch.compile(there, backend=backend)
    x = tensor(100)
    for _ in range(3):
        result = run(x)
        (found,) = torch.autograd.grad(result.sum(), x)
        torch.testing.assert_close(found, torch.where(result != 0, 4 * x, 0).detach())


@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_that_are_alike_are_all_made(backend: str) -> None:
    there = bh.remote_op(functions.dropout, to="worker1")
    one, other = torch.compile(lambda x: (there(x), there(x)), backend=backend, fullgraph=True)(tensor(100))
    assert not torch.equal(one, other)


def test_random_numbers_are_those_of_the_function() -> None:
    x = tensor(100)
    torch.manual_seed(5)  # all workers are in this process
    wanted = functions.dropout(x), torch.rand(1)
    torch.manual_seed(5)
    found = bh.remote_op(functions.dropout, to="worker1")(x), torch.rand(1)
    torch.testing.assert_close(found, wanted)
    torch.manual_seed(5)
    functions.dropout(x)
    found[0].sum().backward()  # draws nothing that others see
    torch.testing.assert_close(torch.rand(1), wanted[1])


# Tensors of the other worker, and contexts.


def plain_gradients(program: Callable[[Tensor], Tensor], x: Tensor) -> Sequence[Tensor]:
    return torch.autograd.grad(program(x), [x, *functions.layer.parameters()])


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize("plain", [True, False], ids=["loss.backward", "bh.backward"])
def test_parameters_get_their_gradients_in_the_context(backend: str | None, plain: bool) -> None:
    there = bh.remote_op(functions.with_layer, to="worker1")

    def program(x: Tensor) -> Tensor:
        return (there(x * 2) * x).sum()

    run = program if backend is None else torch.compile(program, backend=backend, fullgraph=True)
    x = tensor(3, 4)
    wanted = plain_gradients(lambda x: (functions.with_layer(x * 2) * x).sum(), x)
    with bh.context() as ctx:
        if plain:
            run(x).backward()
        else:
            bh.backward(ctx, [run(x)])
        own = x.grad if plain else bh.get_gradients(ctx)[x]
        found = bh.rpc_sync("worker1", functions.gradients_of_layer, args=(ctx,))
        left = bh.rpc_sync("worker1", bh.get_gradients, args=(ctx,))
    torch.testing.assert_close([own, *found], list(wanted))
    assert len(left) == len(found)  # nothing else stays there


@pytest.mark.parametrize("order", [1, 2])
def test_functions_that_call_other_workers(order: int) -> None:
    there = bh.remote_op(functions.calling, to="worker1", fake=functions.like)
    x = tensor(3, 4)

    def program(function: Callable[[Tensor], Tensor]) -> Tensor:
        result = function(x).sum()
        return result if order == 1 else torch.autograd.grad(result, x, create_graph=True)[0].pow(2).sum()

    wanted = torch.autograd.grad(
        program(lambda x: functions.with_layer(x.sin()).cos()), [x, *functions.layer.parameters()]
    )
    with bh.context() as ctx:
        result = program(there)
        before = bh.rpc_sync("worker2", functions.gradients_of_layer, args=(ctx,)) if order == 2 else [0, 0]
        result.backward()
        after = bh.rpc_sync("worker2", functions.gradients_of_layer, args=(ctx,))
    torch.testing.assert_close(x.grad, wanted[0])
    torch.testing.assert_close([a - b for a, b in zip(after, before, strict=True)], list(wanted[1:]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_functions_that_call_other_workers(backend: str) -> None:
    there = bh.remote_op(functions.calling, to="worker1", fake=functions.like)
    compiled = torch.compile(lambda x: there(x * 2).sum(), backend=backend, fullgraph=True)
    x = tensor(3, 4)
    wanted = plain_gradients(lambda x: functions.with_layer((x * 2).sin()).cos().sum(), x)
    with bh.context() as ctx:
        compiled(x).backward()
        found = bh.rpc_sync("worker2", functions.gradients_of_layer, args=(ctx,))
        torch.testing.assert_close(torch.func.grad(lambda x: there(x * 2).sum())(x.detach()), wanted[0])
    torch.testing.assert_close([x.grad, *found], list(wanted))


def test_no_gradient_is_lost_without_a_word() -> None:
    there = bh.remote_op(functions.with_layer, to="worker1")
    x = tensor(3, 4)
    loss = there(x).sum()
    with pytest.raises(bh.errors.ContextError, match="called outside a context") as caught:
        loss.backward()
    assert caught.value.worker == "worker1"
    with bh.context():
        loss = there(x).sum()
    with pytest.raises(bh.errors.ContextError, match="has ended"):
        loss.backward()
    with pytest.raises(ValueError, match="no argument of this remote_op requires grad"):
        there(x.detach())
    with torch.no_grad():
        torch.testing.assert_close(there(x), functions.with_layer(x))
    with pytest.raises(bh.errors.ContextError, match="calls other workers, or"):
        bh.remote_op(functions.calling, to="worker1")(x).sum().backward()


def test_a_gradient_of_what_has_changed_since_is_refused() -> None:
    with bh.context():
        loss = bh.remote_op(functions.with_layer, to="worker1")(tensor(3, 4)).sum()
        with torch.no_grad():
            functions.layer.bias.add_(1)
        try:
            with pytest.raises(bh.BackhaulError, match="returned other results") as caught:
                loss.backward()
            assert caught.value.worker == "worker1"
        finally:
            with torch.no_grad():
                functions.layer.bias.sub_(1)


def test_together_with_recorded_calls() -> None:
    there = bh.remote_op(functions.head, to="worker1")

    def program(call: Callable[..., Tensor], head: Callable[..., Tensor], x: Tensor, w: Tensor) -> Tensor:
        y = call(head(x, w)) * x
        return head(y, call(w)).sum()

    leaves = tensor(3, 4), tensor(4, seed=1)
    wanted = gradients(functools.partial(program, torch.tanh, functions.head), *leaves)
    with bh.context() as ctx:
        bh.backward(ctx, [program(lambda x: bh.rpc_sync("worker2", torch.tanh, args=(x,)), there, *leaves)])
        held = bh.get_gradients(ctx)
        torch.testing.assert_close([held[leaf] for leaf in leaves], list(wanted))


def test_contexts_do_not_stay() -> None:
    there = bh.remote_op(functions.with_layer, to="worker1")
    for _ in range(3):
        with bh.context():
            there(tensor(3, 4)).sum().backward()
    deadline = 30.0
    waited = threading.Event()
    while any(
        bh.rpc_sync(name, bh.get_debug_info)["num_autograd_contexts"] for name in ("worker0", "worker1", "worker2")
    ):
        deadline -= 0.01
        assert deadline > 0
        waited.wait(0.01)


# Shapes that only the other worker knows.


def test_a_fake_of_ones_own() -> None:
    def fake(x: Tensor) -> Tensor:
        size = torch.library.get_ctx().new_dynamic_size()
        return x.new_empty(size)

    there = bh.remote_op(functions.chosen, to="worker1", fake=fake)
    compiled = torch.compile(lambda x: there(x * 2) * 3, backend="aot_eager", fullgraph=True)
    x = tensor(10)
    torch.testing.assert_close(gradients(compiled, x), gradients(lambda x: functions.chosen(x * 2) * 3, x))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (functions.calling, "it calls other workers, but fake tensors cannot be sent"),
        (functions.scaled_by_sum, "its result depends on the values in a tensor"),
        (functions.by_sign, "it depends on the values in a tensor"),
        (functions.failing, "KeyError: 'no such thing'"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_functions_that_cannot_run_on_fakes(
    function: Callable[[Tensor], Tensor], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    compiled = torch.compile(bh.remote_op(function, to="worker1"), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=f"{function.__name__} cannot run on fake tensors.*{reason}.*fake="):
        compiled(tensor(3, 4))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_fakes_of_functions_that_look_into_tensors() -> None:
    x = tensor(3, 4)
    for function in (functions.scaled_by_sum, functions.by_sign):
        there = bh.remote_op(function, to="worker1", fake=functions.like)
        compiled = torch.compile(lambda x, there=there: there(x * 2), backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(gradients(compiled, x), gradients(lambda x, f=function: f(x * 2), x))


# Tensors that the function changes.


@pytest.mark.parametrize(
    ("function", "changed"),
    [
        (functions.normalized, functions.normalize.num_batches_tracked),
        (functions.counting, functions.calls),
        (functions.averaging, functions.averages[0]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_not_its_own_is_changed_once_at_most(function: Callable[[Tensor], Tensor], changed: Tensor) -> None:
    there = bh.remote_op(function, to="worker1", fake=functions.like)
    x = tensor(3, 4)
    with bh.context():
        loss = there(x).sum()
        before = changed.clone()
        with pytest.raises(
            ValueError, match=rf"{function.__name__} changes tensors of worker 'worker1'.*change them again"
        ):
            loss.backward()
        assert torch.equal(changed, before)
    with torch.no_grad():
        there(x)
    assert not torch.equal(changed, before)


@pytest.mark.parametrize("function", [functions.normalized, functions.counting])
def test_tracing_changes_nothing(function: Callable[[Tensor], Tensor]) -> None:
    compiled = torch.compile(bh.remote_op(function, to="worker1"), backend="aot_eager", fullgraph=True)
    state = [functions.calls, *functions.normalize.buffers()]
    before = [value.clone() for value in state]
    with pytest.raises(Exception, match=r"changes tensors that it did not create.*fake="):
        compiled(tensor(3, 4))
    torch.testing.assert_close(state, before, rtol=0, atol=0)


def test_what_is_its_own_may_change() -> None:
    x = tensor(3, 4)
    for function in (functions.busy, functions.receiving):
        there = bh.remote_op(function, to="worker1", fake=functions.like)
        plain = functions.busy if function is functions.busy else (lambda x: x * 4)
        torch.testing.assert_close(
            gradients(lambda x, op=there: op(x) * x, x), gradients(lambda x, f=plain: f(x) * x, x)
        )


# What goes wrong.


def test_making_operators_inside_of_graphs() -> None:
    def program(x: Tensor) -> Tensor:
        return bh.remote_op(functions.counting, to="worker1", fake=functions.like)(x * 2)

    with pytest.raises(torch._dynamo.exc.Unsupported, match="call remote_op once, outside compiled functions"):
        torch.compile(program, backend="eager", fullgraph=True)(tensor(3))
    x = tensor(3)
    torch.testing.assert_close(torch.compile(program, backend="eager")(x), (x * 2).sin())


def test_autocast_stays_here() -> None:
    there = bh.remote_op(functions.squared, to="worker1")
    x = torch.ones(3, 3)
    found: list[torch.dtype] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        (result,) = graph.graph.find_nodes(op="output")[0].args[0]
        found.append(result.meta["example_value"].dtype)
        return graph

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert there(x).dtype is torch.float32
        assert torch.compile(there, backend=backend, fullgraph=True)(x).dtype is torch.float32
    assert found == [torch.float32]


@pytest.mark.parametrize("compiled", [False, True])
def test_errors_are_those_of_the_call(compiled: bool) -> None:
    there: Any = bh.remote_op(functions.failing, to="worker1", fake=functions.like)
    if compiled:
        there = torch.compile(lambda x, op=there: op(x), backend="aot_eager", fullgraph=True)
    with pytest.raises(KeyError, match="no such thing") as caught:
        there(tensor(3))
    assert isinstance(caught.value.__cause__, bh.errors.RemoteTraceback)


def test_unknown_workers() -> None:
    with pytest.raises(bh.errors.UnknownWorkerError, match="nobody"):
        bh.remote_op(functions.head, to="nobody")(tensor(3), tensor(3))


def test_timeouts() -> None:
    gate.clear()
    try:
        with pytest.raises(bh.CallTimeoutError, match="slowly on worker 'worker1'"):
            bh.remote_op(slowly, to="worker1", timeout=0.05)(tensor(3))
    finally:
        gate.set()


gate = threading.Event()


def slowly(x: Tensor) -> Tensor:
    gate.wait(30)
    return x


def test_empty_batches() -> None:
    there = bh.remote_op(functions.head, to="worker1")
    with pytest.raises(ValueError, match="empty batch"):
        torch.func.vmap(there, in_dims=(0, None))(torch.ones(0, 4), torch.ones(4))
