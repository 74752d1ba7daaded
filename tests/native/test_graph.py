"""Recv nodes that the core makes are those that Python makes."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.autograd.graph import GradientEdge

from backhaul._autograd.forward.functions import receive
from backhaul._autograd.torch_engine.boundary import BoundaryNode
from backhaul._wire.frames import Frame
from tools.fuzz.twins import CORE

from .twins import needs_core

pytestmark = needs_core


class Owner:
    """Stands for a recv end."""

    boundary = BoundaryNode("a text with a ü")
    count = 0


def received(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Tensors as they arrive in one message."""
    frame = CORE.request(tensors)
    request = CORE.read_request(Frame(3, 1, bytearray(frame.body), [bytearray(b) for b in frame.buffers]))
    found: list[torch.Tensor] = request.tensors(None)
    return found


def put_all(tensors: list[torch.Tensor], positions: tuple[Any, ...], owner: Any) -> list[torch.Tensor] | None:
    return Owner.boundary.put_all(tensors, positions, owner)


def test_nodes_are_those_that_python_makes() -> None:
    owner, expected_owner = Owner(), Owner()
    sent = [torch.ones(3, requires_grad=True), torch.ones(2), torch.full((500,), 2.0, requires_grad=True)]
    tensors = received(*sent)
    made = put_all(tensors, (0, 2), owner)
    assert made is not None
    expected: Any = received(*sent)
    expected[0], expected[2] = receive(expected_owner, [expected[0], expected[2]], [expected[1]])  # type: ignore[arg-type]
    assert made[1] is tensors[1]
    for tensor, other in zip(made, expected, strict=True):
        assert torch.equal(tensor, other)
        assert (tensor.requires_grad, tensor.is_leaf, tensor._version) == (other.requires_grad, other.is_leaf, 0)
        assert type(tensor.grad_fn) is type(other.grad_fn)
        assert tensor.untyped_storage().nbytes() == other.untyped_storage().nbytes()
    for index, place in enumerate((0, 2)):
        assert BoundaryNode.mark_of(made[place].grad_fn) == (owner, index)
        assert BoundaryNode.mark_of(expected[place].grad_fn) == (expected_owner, index)
        assert made[place].data_ptr() == tensors[place].data_ptr()
        assert made[place].output_nr == 0


def test_gradients_arrive_at_the_nodes() -> None:
    (first, second) = put_all(received(torch.ones(3), torch.ones(3)), (0, 1), Owner()) or []
    loss = (first * 2 + second * first * 3).sum()
    edges = [GradientEdge(tensor.grad_fn, 0) for tensor in (first, second)]
    found = torch.autograd.grad(loss, edges)  # type: ignore[arg-type]
    assert [grad.tolist() for grad in found] == [[5.0] * 3, [3.0] * 3]


def test_the_node_raises_if_it_runs() -> None:
    (made,) = put_all(received(torch.ones(3)), (0,), Owner()) or []
    with pytest.raises(RuntimeError, match="a text with a ü"):
        (made * 2).sum().backward()


def test_a_received_tensor_may_be_changed_in_place() -> None:
    (made,) = put_all(received(torch.ones(3)), (0,), Owner()) or []
    node = made.grad_fn
    made.mul_(3)
    (grad,) = torch.autograd.grad(made.sum(), [GradientEdge(node, 0)])  # type: ignore[arg-type]
    assert grad.tolist() == [3.0] * 3


def test_grad_mode_and_anomaly_mode_do_not_matter() -> None:
    with torch.no_grad():
        (made,) = put_all(received(torch.ones(3)), (0,), Owner()) or []
    assert made.requires_grad
    with torch.autograd.set_detect_anomaly(True):
        (made,) = put_all(received(torch.ones(3)), (0,), Owner()) or []
    assert "traceback_" in made.grad_fn.metadata


def test_what_python_has_to_do() -> None:
    one, other = received(torch.ones(3), torch.ones(3))
    graph = torch.ones(3, requires_grad=True) * 2
    with torch.inference_mode():
        inferred = torch.ones(3)
    shared = torch.ones(4)
    cases: list[tuple[Any, Any]] = [
        ([torch.nn.Parameter(torch.ones(3))], (0,)),
        ([torch.ones(3, dtype=torch.int64)], (0,)),
        ([torch.eye(2).to_sparse()], (0,)),
        ([graph], (0,)),
        ([one, graph], (0,)),
        ([inferred], (0,)),
        ([shared[:2], shared[2:]], (0, 1)),
        ([one, one], (0,)),
        ([one, other], (0, 0)),
        ([one, other], (0, 2)),
        ([one, other], (-1,)),
        ([one, other], ("0",)),
        ([one, None], (0,)),
        ((one, other), (0,)),
    ]
    for tensors, positions in cases:
        assert put_all(tensors, positions, Owner()) is None
        assert one.grad_fn is None
    assert put_all([one, other], (), Owner()) == [one, other]


def test_nothing_keeps_the_owner() -> None:
    owner = Owner()
    gone = weakref.ref(owner)
    made = put_all(received(torch.ones(3), torch.ones(2)), (0, 1), owner)
    del owner
    assert gone() is not None
    del made
    gc.collect()
    assert gone() is None
