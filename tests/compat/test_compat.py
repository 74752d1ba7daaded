"""The reference's API in one process. The reference's own suites, in tests/reference, test it between processes."""

from __future__ import annotations

import operator
import pickle
from typing import Any

import pytest
import torch

import backhaul as bh
from backhaul.compat import autograd, rpc
from backhaul.compat.rpc import internal, membership
from backhaul.compat.rpc.rref import adopt
from backhaul.errors import BackhaulError


class CountingPickler(internal._InternalRPCPickler):
    """A pickler that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def serialize(self, obj: Any) -> tuple[bytes, list[torch.Tensor]]:
        self.calls += 1
        return super().serialize(obj)


def add_to(rref: rpc.RRef[torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    return rref.to_here() + tensor


@rpc.functions.async_execution
def add_async(rref: rpc.RRef[torch.Tensor], tensor: torch.Tensor) -> Any:
    return rpc.rpc_async("single", add_to, args=(rref, tensor))


@pytest.mark.usefixtures("single_worker")
@pytest.mark.parametrize("function", [add_to, add_async])
def test_a_pickler_of_the_user_pickles_tensors_and_rrefs(function: Any) -> None:
    pickler, rref = CountingPickler(), rpc.RRef(torch.ones(2))
    with rpc.api._use_rpc_pickler(pickler):
        assert rpc.rpc_sync("single", function, args=(rref, torch.ones(2))).tolist() == [2.0, 2.0]
    assert pickler.calls >= 1


def gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    (tensor * 3).sum().backward()
    return tensor.grad


@pytest.mark.usefixtures("single_worker")
def test_a_tensor_received_without_a_context_is_a_leaf() -> None:
    """As in the reference, it has its own gradient, which is not sent back."""
    weight = torch.ones(2, requires_grad=True)
    result = rpc.rpc_sync("single", torch.mul, args=(weight, 2))
    assert gradient_of(result).tolist() == [3.0, 3.0]
    assert rpc.rpc_sync("single", gradient_of, args=(weight,)).tolist() == [3.0, 3.0]
    assert weight.grad is None


@pytest.mark.usefixtures("single_worker")
def test_gradients_go_through_calls() -> None:
    weight = torch.ones(2, requires_grad=True)
    with autograd.context() as context:
        assert type(context) is int
        product = rpc.remote("single", torch.mul, args=(weight, 3.0)).to_here()
        autograd.backward(context, [product.sum()])
        assert autograd.get_gradients(context)[weight].tolist() == [3.0, 3.0]
    with pytest.raises(RuntimeError, match=f"Could not find autograd context with id: {context}"):
        autograd.get_gradients(context)


@pytest.mark.usefixtures("single_worker")
def test_errors_are_runtime_errors_caused_by_errors_of_backhaul() -> None:
    with pytest.raises(RuntimeError, match="could not find destination") as caught:
        rpc.rpc_sync("absent_worker", torch.add, args=(1, 2))
    assert type(caught.value) is RuntimeError
    assert isinstance(caught.value.__cause__, BackhaulError)


@pytest.mark.usefixtures("single_worker")
def test_worker_info_has_the_format_of_the_reference() -> None:
    info = rpc.get_worker_info()
    assert str(info) == "WorkerInfo(id=0, name=single)"
    assert pickle.loads(pickle.dumps(info)) == info == rpc.RRef(1).owner()
    assert rpc.rpc_sync(info, torch.neg, args=(torch.ones(1),)) == -1


@pytest.mark.usefixtures("single_worker")
def test_the_default_timeout_can_be_changed() -> None:
    assert rpc.get_rpc_timeout() == 30
    rpc._set_rpc_timeout(5)
    assert rpc.get_rpc_timeout() == 5


@pytest.mark.usefixtures("single_worker")
def test_repr_of_an_rref_after_shutdown() -> None:
    held = rpc.RRef(1)
    before = repr(held)
    rpc.shutdown()
    assert repr(held) == before == "OwnerRRef(GloballyUniqueId(created_on=0, local_id=0))"


def test_an_rref_cannot_be_used_after_its_worker_has_ended() -> None:
    with bh.cluster(2):
        held = adopt(bh.remote("worker1", torch.add, args=(torch.ones(2), 1)))
        held.to_here()
    with pytest.raises(RuntimeError, match=r"^UserRRef\(.*Cannot call to_here\(\) on it after deletion"):
        held.to_here()
    with pytest.raises(RuntimeError, match=r"^UserRRef\(.*Cannot call fork an UserRRef after deletion"):
        internal.serialize(held)


def make_rref() -> bh.RRef[int]:
    return bh.RRef(1)


def test_repr_of_an_rref_whose_maker_has_left() -> None:
    with bh.cluster(2):
        held = adopt(bh.rpc_sync("worker1", make_rref))
        membership.remove_member(1)
        assert repr(held).startswith("UserRRef(RRefId = GloballyUniqueId(created_on=1, ")
        del held


def test_calls_without_a_worker_raise() -> None:
    with pytest.raises(RuntimeError, match=r"^RPC has not been initialized"):
        rpc.rpc_sync("single", torch.add, args=(1, 2))
    with pytest.raises(RuntimeError, match=r"^Current RPC agent is not set"):
        rpc.RRef(1)


def test_a_backend_can_be_registered_once() -> None:
    made = rpc.backend_registry.register_backend("test_backend", dict, dict)
    assert made is rpc.BackendType.test_backend
    assert isinstance(made, rpc.BackendType)
    with pytest.raises(RuntimeError, match="already registered"):
        rpc.backend_registry.register_backend("test_backend", dict, dict)
    del rpc.BackendType._known["test_backend"]


@pytest.mark.usefixtures("single_worker")
@pytest.mark.parametrize("call", [rpc.rpc_sync, rpc.rpc_async, rpc.remote])
def test_args_may_be_any_iterable_but_a_tensor(call: Any) -> None:
    for tensor in (torch.ones(1), torch.zeros(1), torch.tensor(0.0), torch.ones(2)):
        with pytest.raises(TypeError, match=r"args=\(x,\)"):
            call("single", torch.add, args=tensor)
    for args in ((1, 2), [1, 2], {1: "a", 2: "b"}):  # as in the reference
        result = call("single", operator.add, args=args)
        assert (result.to_here() if call is rpc.remote else result.wait() if call is rpc.rpc_async else result) == 3


@pytest.mark.usefixtures("single_worker")
@pytest.mark.parametrize("error", [SystemExit("raised"), GeneratorExit("raised"), ValueError("raised")], ids=repr)
def test_a_future_is_done_when_its_callback_raises(error: BaseException) -> None:
    def fail(_: Any) -> None:
        raise error

    future = rpc.rpc_async("single", operator.add, args=(1, 2)).then(fail)
    for wait in (future.wait, lambda: torch.futures.wait_all([future]), torch.futures.collect_all([future]).wait):
        with pytest.raises(RuntimeError, match=f"{type(error).__name__}: raised"):
            wait()
