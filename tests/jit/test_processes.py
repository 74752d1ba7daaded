"""Calls and modules between processes, where each process scripts its own functions."""

from __future__ import annotations

from typing import Any

import torch

import backhaul as bh
import backhaul.jit

from . import functions
from .conftest import TIMEOUT_SECONDS, await_cleanup
from .functions import Layer, Plain, blend, script

X = torch.tensor([[0.1, 0.2], [0.3, -0.4]])
Outcome = dict[str, Any]


def weight_of(rref: bh.RRef[torch.nn.Module], context: int) -> torch.Tensor:
    return bh.get_gradients(context)[rref.local_value().weight]


def program() -> Outcome | None:
    """Use every feature once, from the first worker."""
    if bh.get_worker_info().id != 0:
        return None
    found = {"calls": calls(), "module": module()}
    await_cleanup()
    return found


def leaves() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([0.3, 2.0], requires_grad=True), torch.tensor([1.5, -0.7], requires_grad=True)


def calls() -> Outcome:
    a, b = leaves()
    with bh.context() as ctx:
        forked = functions.forked_twice("worker1", "worker2", a, b)
        first, second, third = functions.after_wait("worker1", a, b)
        rref = bh.remote("worker2", blend, (a, b))
        fetched = bh.rpc_sync("worker1", functions.fetch, (rref, b))
        loss = (forked + first + second + third + fetched).sum()
        grads = functions.differentiate(ctx, loss)
        return {"loss": loss.item(), "grads": [grads[a], grads[b]]}


def module() -> Outcome:
    x, rref = X.clone().requires_grad_(), bh.remote("worker2", functions.make_layer)
    model = script(functions.Async(backhaul.jit.remote_module(rref, Layer)))
    with bh.context() as ctx:
        loss = model(x).sum()
        bh.backward(ctx, [loss])
        grads = bh.get_gradients(ctx)
        weight = bh.rpc_sync("worker2", weight_of, (rref, int(ctx)))
        return {"loss": loss.item(), "grads": [grads[x], grads[model.last], weight]}


def plain_calls() -> Outcome:
    a, b = leaves()
    first = blend(a, b)
    second = blend(b, first)
    value = blend(a, b) * blend(b, a) + blend(b, b) + first + second + blend(second, a) + blend(a, b) * b
    return {"loss": value.sum().item(), "grads": list(torch.autograd.grad(value.sum(), (a, b)))}


def plain_module() -> Outcome:
    x, model = X.clone().requires_grad_(), functions.Model(Plain())
    loss = model(x).sum()
    return {"loss": loss.item(), "grads": list(torch.autograd.grad(loss, [x, model.last, model.inner.weight]))}


def test_a_program_in_three_processes() -> None:
    found = bh.launch(program, 3, timeout=TIMEOUT_SECONDS, start_method="forkserver")[0]
    torch.testing.assert_close(found, {"calls": plain_calls(), "module": plain_module()})
