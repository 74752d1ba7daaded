"""The reference's names in one process; its own suites, in tests/reference, look at them between processes."""

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


class Counting(internal._InternalRPCPickler):
    """A pickler of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def serialize(self, obj: Any) -> tuple[bytes, list[torch.Tensor]]:
        self.calls += 1
        return super().serialize(obj)


def add_to(rref: rpc.RRef[torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    return rref.to_here() + tensor


@rpc.functions.async_execution
def add_later(rref: rpc.RRef[torch.Tensor], tensor: torch.Tensor) -> Any:
    return rpc.rpc_async("alone", add_to, args=(rref, tensor))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("function", [add_to, add_later])
def test_a_pickler_of_the_users_carries_calls_with_tensors_and_references(function: Any) -> None:
    pickler, rref = Counting(), rpc.RRef(torch.ones(2))
    with rpc.api._use_rpc_pickler(pickler):
        assert rpc.rpc_sync("alone", function, args=(rref, torch.ones(2))).tolist() == [2.0, 2.0]
    assert pickler.calls >= 1


def gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    (tensor * 3).sum().backward()
    return tensor.grad


@pytest.mark.usefixtures("alone")
def test_what_is_received_outside_of_a_context_is_a_leaf() -> None:
    """In the reference it has a gradient of its own, which goes no further."""
    weight = torch.ones(2, requires_grad=True)
    result = rpc.rpc_sync("alone", torch.mul, args=(weight, 2))
    assert gradient_of(result).tolist() == [3.0, 3.0]
    assert rpc.rpc_sync("alone", gradient_of, args=(weight,)).tolist() == [3.0, 3.0]
    assert weight.grad is None


@pytest.mark.usefixtures("alone")
def test_gradients_go_through_calls() -> None:
    weight = torch.ones(2, requires_grad=True)
    with autograd.context() as context:
        assert type(context) is int
        made = rpc.remote("alone", torch.mul, args=(weight, 3.0)).to_here()
        autograd.backward(context, [made.sum()])
        assert autograd.get_gradients(context)[weight].tolist() == [3.0, 3.0]
    with pytest.raises(RuntimeError, match=f"Could not find autograd context with id: {context}"):
        autograd.get_gradients(context)


@pytest.mark.usefixtures("alone")
def test_errors_are_plain_and_keep_backhauls_as_their_cause() -> None:
    with pytest.raises(RuntimeError, match="could not find destination") as caught:
        rpc.rpc_sync("nobody", torch.add, args=(1, 2))
    assert type(caught.value) is RuntimeError
    assert isinstance(caught.value.__cause__, BackhaulError)


@pytest.mark.usefixtures("alone")
def test_a_worker_is_spelled_as_the_reference_spells_it() -> None:
    info = rpc.get_worker_info()
    assert str(info) == "WorkerInfo(id=0, name=alone)"
    assert pickle.loads(pickle.dumps(info)) == info == rpc.RRef(1).owner()
    assert rpc.rpc_sync(info, torch.neg, args=(torch.ones(1),)) == -1


@pytest.mark.usefixtures("alone")
def test_the_default_timeout_can_be_changed() -> None:
    assert rpc.get_rpc_timeout() == 30
    rpc._set_rpc_timeout(5)
    assert rpc.get_rpc_timeout() == 5


@pytest.mark.usefixtures("alone")
def test_a_reference_can_be_shown_after_shutdown() -> None:
    held = rpc.RRef(1)
    before = repr(held)
    rpc.shutdown()
    assert repr(held) == before == "OwnerRRef(GloballyUniqueId(created_on=0, local_id=0))"


def test_a_reference_says_that_it_was_deleted_with_its_worker() -> None:
    with bh.cluster(2):
        held = adopt(bh.remote("worker1", torch.add, args=(torch.ones(2), 1)))
        held.to_here()
    with pytest.raises(RuntimeError, match=r"^UserRRef\(.*Cannot call to_here\(\) on it after deletion"):
        held.to_here()
    with pytest.raises(RuntimeError, match=r"^UserRRef\(.*Cannot call fork an UserRRef after deletion"):
        internal.serialize(held)


def make_reference() -> bh.RRef[int]:
    return bh.RRef(1)


def test_a_reference_can_be_shown_when_the_worker_that_made_it_has_left() -> None:
    with bh.cluster(2):
        held = adopt(bh.rpc_sync("worker1", make_reference))
        membership.dismiss(1)
        assert repr(held).startswith("UserRRef(RRefId = GloballyUniqueId(created_on=1, ")
        del held


def test_without_a_worker_calls_say_so() -> None:
    with pytest.raises(RuntimeError, match=r"^RPC has not been initialized"):
        rpc.rpc_sync("alone", torch.add, args=(1, 2))
    with pytest.raises(RuntimeError, match=r"^Current RPC agent is not set"):
        rpc.RRef(1)


def test_a_backend_can_be_registered_once() -> None:
    made = rpc.backend_registry.register_backend("of_this_test", dict, dict)
    assert made is rpc.BackendType.of_this_test
    assert isinstance(made, rpc.BackendType)
    with pytest.raises(RuntimeError, match="already registered"):
        rpc.backend_registry.register_backend("of_this_test", dict, dict)
    del rpc.BackendType._known["of_this_test"]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("call", [rpc.rpc_sync, rpc.rpc_async, rpc.remote])
def test_args_that_are_a_tensor_are_refused_and_other_iterables_are_not(call: Any) -> None:
    for tensor in (torch.ones(1), torch.zeros(1), torch.tensor(0.0), torch.ones(2)):
        with pytest.raises(TypeError, match=r"args=\(x,\)"):
            call("alone", torch.add, args=tensor)
    for args in ((1, 2), [1, 2], {1: "a", 2: "b"}):  # as in the reference
        made = call("alone", operator.add, args=args)
        assert (made.to_here() if call is rpc.remote else made.wait() if call is rpc.rpc_async else made) == 3


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("error", [SystemExit("leaving"), GeneratorExit("leaving"), ValueError("leaving")], ids=repr)
def test_a_future_is_done_whatever_its_callback_raises(error: BaseException) -> None:
    def leave(_: Any) -> None:
        raise error

    made = rpc.rpc_async("alone", operator.add, args=(1, 2)).then(leave)
    for wait in (made.wait, lambda: torch.futures.wait_all([made]), torch.futures.collect_all([made]).wait):
        with pytest.raises(RuntimeError, match=f"{type(error).__name__}: leaving"):
            wait()
