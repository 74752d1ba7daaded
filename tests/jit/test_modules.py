"""Scripted modules on other workers."""

from typing import Any

import pytest
import torch
from torch import Tensor

import backhaul as bh
import backhaul.jit

from . import functions
from .functions import Layer, Plain, script

X = torch.tensor([[0.1, 0.2], [0.3, -0.4]])

pytestmark = pytest.mark.usefixtures("workers")


def weight_of(rref: bh.RRef[torch.nn.Module], context: int) -> Tensor:
    """The gradient of the layer's weight. Runs on the worker that owns the layer."""
    return bh.get_gradients(context)[rref.local_value().weight]


def test_called_through_a_reference() -> None:
    x, layer = X.clone().requires_grad_(), Plain()
    wanted = torch.autograd.grad((layer(x, 3.0) * layer(x)).sum(), [x, layer.weight])
    rref = bh.remote("worker1", functions.make_layer)
    with bh.context() as ctx:
        in_script = bh.rpc_sync("worker1", functions.run_layer, (rref, x))
        by_method = rref.rpc_sync().forward(x)
        torch.testing.assert_close(in_script, layer(x, 3.0))
        torch.testing.assert_close(by_method, layer(x))
        bh.backward(ctx, [(in_script * by_method).sum()])
        grads = bh.get_gradients(ctx)[x], bh.rpc_sync("worker1", weight_of, (rref, int(ctx)))
        torch.testing.assert_close(grads, wanted)


@pytest.mark.parametrize("outer", [functions.Model, functions.Async])
def test_part_of_a_scripted_module(outer: type[functions.Model]) -> None:
    x, plain = X.clone().requires_grad_(), functions.Model(Plain())
    expected = plain(x)
    wanted = torch.autograd.grad(expected.sum(), [x, plain.last, plain.inner.weight])
    rref = bh.remote("worker1", functions.make_layer)
    model = script(outer(backhaul.jit.remote_module(rref, Layer)))
    with bh.context() as ctx:
        value = model(x)
        torch.testing.assert_close(value, expected)
        bh.backward(ctx, [value.sum()])
        grads = bh.get_gradients(ctx)
        found = grads[x], grads[model.last], bh.rpc_sync("worker1", weight_of, (rref, int(ctx)))
        torch.testing.assert_close(found, wanted)


def test_a_scripted_remote_module_cannot_be_sent() -> None:
    model = script(backhaul.jit.remote_module(bh.remote("worker1", functions.make_layer), Layer))
    with pytest.raises(bh.errors.SerializationError, match="Passing a script RemoteModule over RPC is not supported"):
        bh.rpc_sync("worker1", type, (model,))


def test_a_module_that_does_not_implement_the_interface() -> None:
    model = script(backhaul.jit.remote_module(bh.remote("worker1", make_flatten), Layer))
    with pytest.raises(RuntimeError, match="Layer"):
        model(X)


def make_flatten() -> torch.jit.ScriptModule:
    return script(torch.nn.Flatten())


@pytest.mark.parametrize("other", [Plain, int, Plain.forward])
def test_an_argument_that_is_not_an_interface(other: Any) -> None:
    rref = bh.remote("worker1", functions.make_layer)
    with pytest.raises(TypeError, match=r"is not a torch\.jit\.interface"):
        backhaul.jit.remote_module(rref, other)
