"""Whose memory a gradient is: what the context holds may be changed in place, and nobody else's tensors change with
it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import backhaul as bh

from .worlds import gradients_on


def leaf(*values: float) -> torch.Tensor:
    return torch.tensor(values, requires_grad=True)


def test_two_leaves_of_one_message_get_a_gradient_each() -> None:
    """Equal gradients travel once."""
    a, b = leaf(1.0, 1.0), leaf(1.0, 1.0)
    with bh.cluster(2), bh.context() as ctx:
        ctx.backward(bh.rpc_sync(1, torch.add, args=(a, b)).square().sum())
        ctx.grads[a].mul_(0.5)
        assert ctx.grads[a].tolist() == [2.0, 2.0]
        assert ctx.grads[b].tolist() == [4.0, 4.0]


given = {"a": leaf(1.0, 1.0), "b": leaf(1.0, 1.0)}


def give(name: str) -> torch.Tensor:
    return given[name]


def test_two_leaves_of_two_messages_get_a_gradient_each() -> None:
    """The messages are answered together, with one and the same gradient."""
    for each in given.values():
        each.grad = None
    with bh.cluster(2):
        for step in (1.0, 2.0):
            a, b = bh.rpc_sync(1, give, args=("a",)), bh.rpc_sync(1, give, args=("b",))
            ((a + b) * 2).sum().backward()
            assert [each.grad.tolist() for each in given.values() if each.grad is not None] == [[2 * step] * 2] * 2


class FromCache(torch.autograd.Function):
    """A function that returns the same tensor again and again."""

    cache = torch.ones(3)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return FromCache.cache


def through_cache(x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = FromCache.apply(x)
    return made


def test_a_gradient_that_a_function_keeps() -> None:
    w = leaf(1.0, 2.0, 3.0)
    with bh.cluster(2):
        for _ in range(3):
            with bh.context() as ctx:
                ctx.backward((through_cache(w) * bh.rpc_sync(1, torch.ones, args=(3,))).sum())
                assert ctx.grads[w].tolist() == [1.0] * 3
                ctx.grads[w].mul_(0.5)


class Noting(torch.autograd.Function):
    """Remembers the address of its gradient, and passes it on."""

    place = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        Noting.place = grad.data_ptr()
        return grad


def test_a_gradient_that_nobody_else_has_is_not_copied() -> None:
    leaf = torch.ones(3, requires_grad=True)
    with bh.cluster(1), bh.context() as context:
        bh.backward(context, [Noting.apply(leaf)[0]])
        assert bh.get_gradients(context)[leaf].data_ptr() == Noting.place


def test_a_gradient_that_a_hook_keeps() -> None:
    w, kept = leaf(1.0, 2.0), []
    w.register_hook(kept.append)
    with bh.cluster(2), bh.context() as ctx:
        ctx.backward(bh.rpc_sync(1, torch.mul, args=(w * 1, 3)).sum())
        ctx.grads[w].zero_()
        assert kept[0].tolist() == [3.0, 3.0]


def test_a_gradient_that_the_user_gave() -> None:
    w, seed = leaf(1.0, 2.0), torch.tensor([5.0, 6.0], requires_grad=True)
    with bh.cluster(1), bh.context() as ctx:
        ctx.backward([w], grad_tensors=[seed], create_graph=True)
        assert ctx.grads[w] is not seed


def spoil(x: torch.Tensor, alias: torch.Tensor) -> torch.Tensor:
    y = x * x
    alias.mul_(0)
    return y


def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x, x.detach()


@pytest.mark.parametrize("part", [slice(None), slice(1, 3)])
def test_what_travels_with_a_recorded_tensor_may_be_changed(part: slice) -> None:
    x = leaf(2.0, 2.0, 2.0, 2.0)
    with bh.cluster(2), bh.context() as ctx:
        y = bh.rpc_sync(1, spoil, args=(x, x.detach()[part]))
        z, alias = bh.rpc_sync(1, both, args=(x,))
        square = z * z
        alias.mul_(0)
        ctx.backward((y + square).sum())
        assert ctx.grads[x].tolist() == [8.0] * 4


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_sparse_tensors_that_share_their_values() -> None:
    indices, values = torch.tensor([[0, 2]]), torch.tensor([3.0, 4.0])
    one = torch.sparse_coo_tensor(indices, values, (3,), check_invariants=True).requires_grad_()
    other = torch.sparse_coo_tensor(indices, values, (3,), check_invariants=True).requires_grad_()
    with bh.cluster(2), bh.context() as ctx:
        ctx.backward(bh.rpc_sync(1, spoil_sparse, args=(one, other)).sum())
        assert ctx.grads[one].to_dense().tolist() == [6.0, 0.0, 8.0]


def spoil_sparse(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    y = one * one
    with torch.no_grad():
        other._values().mul_(0)
    return y.to_dense()


@pytest.mark.parametrize("accumulate", ["context", "grad"])
@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_sparse_leaves(layout: str, accumulate: Any) -> None:
    dense = torch.tensor([[0.0, 3.0], [4.0, 0.0]])
    w = (dense.to_sparse() if layout == "coo" else dense.to_sparse_csr()).requires_grad_()
    torch.ones(1, requires_grad=True).mul(1).grad_fn.register_hook(lambda *_: None)  # type: ignore[union-attr]
    with bh.cluster(2) as workers, bh.context() as ctx:
        y = bh.rpc_sync(1, torch.mul, args=((w * 2).to_dense(), 3))
        ctx.backward(y.sum(), accumulate=accumulate)
        found = w.grad if accumulate == "grad" else gradients_on(workers[0], ctx)[w]
        assert found is not None
        assert found.to_dense().tolist() == [[0.0, 6.0], [6.0, 0.0]]


def test_an_input_named_twice_counts_once() -> None:
    w = leaf(1.0, 2.0)
    with bh.cluster(2), bh.context() as ctx:
        ctx.backward(bh.rpc_sync(1, torch.mul, args=(w, 2)).sum(), inputs=[w, w])
        assert ctx.grads[w].tolist() == [2.0, 2.0]


def test_an_input_that_keeps_its_gradient_itself() -> None:
    w = leaf(1.0, 2.0)
    with bh.cluster(2), bh.context() as ctx:
        v = w * 3
        v.retain_grad()
        ctx.backward(bh.rpc_sync(1, torch.mul, args=(v, 2)).sum(), inputs=[v, w], accumulate="grad")
        assert v.grad is not None
        assert v.grad.tolist() == [2.0, 2.0]
        assert w.grad is not None
        assert w.grad.tolist() == [6.0, 6.0]


def test_hooks_on_the_way_to_a_leaf_that_was_frozen() -> None:
    w, seen = leaf(1.0, 2.0), []
    with bh.cluster(2), bh.context() as ctx:
        v = w * 3
        v.register_hook(lambda grad: seen.append(grad.tolist()))
        y = bh.rpc_sync(1, torch.mul, args=(v, 2))
        w.requires_grad_(False)
        ctx.backward(y.sum())
        assert seen == [[2.0, 2.0]]
        assert ctx.grads == {}


# What others run inside of a pass is theirs.


def two_values(p: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return p.sin() * 2, q.cos() * 3


def test_a_checkpoint_whose_values_belong_to_two_groups() -> None:
    """Each group recomputes what it needs, perhaps at the same time as the other."""
    w, u = torch.rand(1 << 16).requires_grad_(), torch.rand(1 << 16).requires_grad_()
    with bh.cluster(3):
        for _ in range(10):
            with bh.context() as ctx:
                a, b = checkpoint(two_values, w, u, use_reentrant=False)
                y = bh.rpc_async(1, torch.mul, args=(a, 2.0))
                z = bh.rpc_async(2, torch.mul, args=(b, 3.0))
                ctx.backward(y.wait().sum() + z.wait().sum())
                torch.testing.assert_close(ctx.grads[w], 4 * w.detach().cos())
                torch.testing.assert_close(ctx.grads[u], -9 * u.detach().sin())


def test_a_backward_inside_of_a_hook() -> None:
    """Multi-grad hooks and checkpoints use the local graph, as in one process."""
    p, q, fired = leaf(1.0), leaf(2.0), []
    torch.autograd.graph.register_multi_grad_hook((p, q), lambda grads: fired.append(len(grads)))
    r = checkpoint(torch.sin, p, use_reentrant=False)

    def run_another(grad: torch.Tensor) -> None:
        with torch.enable_grad():
            for _ in range(2):
                (p * 2 + q).sum().backward()
                r.backward(retain_graph=True)

    w = leaf(3.0)
    with bh.cluster(2), bh.context() as ctx:
        y = bh.rpc_sync(1, torch.mul, args=(w, 2))
        y.register_hook(run_another)
        ctx.backward(y.sum())
    assert fired == [2, 2, 2, 2]  # once for each backward that reaches one of them


def test_hooks_of_other_leaves_inside_of_an_accumulation() -> None:
    q, u, calls = leaf(1.0), leaf(2.0), []
    q.register_hook(lambda grad: (calls.append(1), grad * 10)[1])

    def run_another(_: torch.Tensor) -> None:
        with torch.enable_grad():
            (q * 1).sum().backward()

    with bh.cluster(2):
        with bh.context() as ctx:
            ctx.backward(bh.rpc_sync(1, torch.mul, args=(q, 1)).sum(), accumulate="grad")
        q.grad = None
        calls.clear()
        u.register_post_accumulate_grad_hook(run_another)
        with bh.context() as ctx:
            ctx.backward(bh.rpc_sync(1, torch.mul, args=(u, 3)).sum(), accumulate="grad")
    assert calls == [1]
    assert q.grad is not None
    assert q.grad.tolist() == [10.0]
