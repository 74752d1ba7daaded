"""The function of torch through which Backhaul takes over backward passes: it is where Backhaul expects it, or there is
an error before any gradient is lost.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.autograd import graph

import backhaul as bh
from backhaul._autograd.torch_engine import entry, patches
from backhaul.errors import UnsupportedTorchError

CONTEXTS_ONLY = bh.Options(autograd="context")
WAYS = ("torch.Tensor.backward", "torch.autograd.backward", "torch.autograd.grad")


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    patches.uninstall()
    kept = graph._engine_run_backward, torch.autograd._engine_run_backward
    yield
    assert (graph._engine_run_backward, torch.autograd._engine_run_backward) == kept


def gradients() -> list[float]:
    """A step over two workers: the gradients of a leaf here, by ``backward`` and by ``grad``."""
    x = torch.ones(1, requires_grad=True)
    loss = bh.rpc_sync(1, torch.mul, args=(x, 2)).sum() + x.sum()
    (found,) = torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()
    assert x.grad is not None
    return [found.item(), x.grad.item()]


# Canaries.


def test_torch_has_the_function_where_it_is_replaced() -> None:
    assert torch.autograd._engine_run_backward is graph._engine_run_backward
    assert "_engine_run_backward(" in inspect.getsource(torch.autograd.backward)
    assert "_engine_run_backward(" in inspect.getsource(torch.autograd.grad)
    assert "torch.autograd.backward(" in inspect.getsource(torch.Tensor.backward)


def test_backward_passes_come_to_a_worker_only() -> None:
    assert entry.missed() == WAYS
    with bh.cluster(2):
        assert entry.missed() == ()
        assert graph._engine_run_backward is torch.autograd._engine_run_backward
        assert gradients() == [3.0, 3.0]
    assert entry.missed() == WAYS


# What torch, or other code, may have done.


def without_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that imports no such function into ``torch.autograd``."""
    monkeypatch.delattr(torch.autograd, "_engine_run_backward")


def with_an_own_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library has replaced ``backward`` by its own, which holds on to what torch had."""
    run = graph._engine_run_backward

    def backward(tensors: torch.Tensor, *_: Any, **__: Any) -> None:
        run((tensors,), (torch.ones_like(tensors),), False, False, (), allow_unreachable=True, accumulate_grad=True)

    monkeypatch.setattr(torch.autograd, "backward", backward)


def with_other_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that gives the function more than Backhaul knows."""

    def grad(outputs: torch.Tensor, inputs: torch.Tensor) -> Any:
        return torch.autograd._engine_run_backward(
            (outputs,), (torch.ones_like(outputs),), False, False, (inputs,), False, accumulate_grad=False, more=True
        )

    monkeypatch.setattr(torch.autograd, "grad", grad)


def with_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that gives the same arguments in another order."""

    def grad(outputs: torch.Tensor, inputs: torch.Tensor) -> Any:
        return torch.autograd._engine_run_backward(
            (outputs,), (torch.ones_like(outputs),), (inputs,), False, False, False, accumulate_grad=False
        )

    monkeypatch.setattr(torch.autograd, "grad", grad)


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        (without_the_door, WAYS),
        (with_an_own_engine, WAYS[:2]),
        (with_other_arguments, WAYS[2:]),
        (with_another_order, WAYS[2:]),
    ],
)
def test_a_worker_does_not_start(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], None], missing: Sequence[str]
) -> None:
    with monkeypatch.context() as patch:
        change(patch)
        with pytest.raises(UnsupportedTorchError, match="cannot run backward passes over workers") as caught:
            bh.cluster(2).start()
        assert caught.value.missing == missing
        assert caught.value.torch_version == torch.__version__
        assert 'Options(autograd="context")' in str(caught.value)
        with bh.cluster(2, options=CONTEXTS_ONLY), bh.context() as ctx:
            x = torch.ones(1, requires_grad=True)
            ctx.backward(bh.rpc_sync(1, torch.mul, args=(x, 2)).sum())
            assert ctx.grads[x].item() == 2.0
    with bh.cluster(2):
        assert gradients() == [3.0, 3.0]


def test_a_patch_under_ours() -> None:
    """Other code patched torch first, and calls what it found: both see each pass."""
    seen, run = [], graph._engine_run_backward

    def patched(*args: Any, **kwargs: Any) -> Any:
        seen.append(args)
        return run(*args, **kwargs)

    graph._engine_run_backward = torch.autograd._engine_run_backward = patched
    try:
        with bh.cluster(2):
            assert gradients() == [3.0, 3.0]
            (torch.ones(1, requires_grad=True) * 2).backward()
            assert len(seen) == 1  # a pass of this process alone is torch's own
    finally:
        graph._engine_run_backward = torch.autograd._engine_run_backward = run


def test_a_patch_on_ours() -> None:
    seen = []
    with bh.cluster(2):
        run = graph._engine_run_backward

        def patched(*args: Any, **kwargs: Any) -> Any:
            seen.append(args)
            return run(*args, **kwargs)

        graph._engine_run_backward = torch.autograd._engine_run_backward = patched
        try:
            assert gradients() == [3.0, 3.0]
            assert len(seen) >= 2
            assert graph._engine_run_backward is patched
        finally:
            graph._engine_run_backward = torch.autograd._engine_run_backward = run


def test_a_patch_that_is_taken_back_takes_ours_along() -> None:
    """Other code patched torch before the first worker, and puts back what it found while workers run. ``make_fx`` of
    torch does that. The next tensor that is received puts ours back.
    """
    run = graph._engine_run_backward

    def patched(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    graph._engine_run_backward = torch.autograd._engine_run_backward = patched
    with bh.cluster(2):
        graph._engine_run_backward = torch.autograd._engine_run_backward = run
        assert entry.missed() == WAYS
        assert gradients() == [3.0, 3.0]
        assert entry.missed() == ()


def test_code_that_holds_on_to_what_torch_had() -> None:
    """Its pass arrives at a received tensor without Backhaul: that raises, and does not end there silently."""
    run = graph._engine_run_backward
    with bh.cluster(2):
        x = torch.ones(1, requires_grad=True)
        loss = bh.rpc_sync(1, torch.mul, args=(x, 2)).sum()
        with pytest.raises(RuntimeError, match=r"not started by loss\.backward"):
            run((loss,), (torch.ones(()),), False, False, (), allow_unreachable=True, accumulate_grad=True)
        assert x.grad is None


def test_a_pass_after_the_last_worker_has_ended() -> None:
    x = torch.ones(1, requires_grad=True)
    with bh.cluster(2):
        loss = bh.rpc_sync(1, torch.mul, args=(x, 2)).sum()
    with pytest.raises(RuntimeError, match=r"before shutdown\(\)"):
        loss.backward()
    with bh.cluster(2), pytest.raises(bh.errors.BackhaulError, match=r"compute the roots again|shut down"):
        loss.backward()
    assert x.grad is None
