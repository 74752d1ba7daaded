"""References in script: annotations, methods, passing them between workers, gradients through them."""

import pytest
import torch
from torch import Tensor

import backhaul as bh
from backhaul.compat import rpc as compat

from . import functions
from .functions import blend, script

A, B = torch.tensor([1.0, 2.0]), torch.tensor([0.5, 4.0])

pytestmark = pytest.mark.usefixtures("workers")


def test_owner() -> None:
    remote, local = bh.remote("worker1", torch.mul, (A, 2)), bh.RRef(A)
    remote.to_here()  # so that the owner has confirmed it
    assert functions.describe(remote) == (False, "worker1", True, "worker1", 1)
    assert functions.describe(local) == (True, "worker0", True, "worker0", 0)
    assert bh.rpc_sync("worker1", functions.describe, (remote,)) == (True, "worker1", True, "worker1", 1)


def test_values() -> None:
    remote, local = bh.remote("worker1", torch.mul, (A, 2)), bh.RRef(A)
    assert torch.equal(functions.fetch(remote, B), A * 2 * B)
    assert torch.equal(functions.fetch(local, B), A * B)
    assert torch.equal(functions.fetch_with_timeout(remote, 20.0), A * 2)
    assert torch.equal(functions.local(local, B), A * B)
    assert torch.equal(bh.rpc_sync("worker1", functions.local, (remote, B)), A * 2 * B)
    assert torch.equal(functions.at_owner(remote, B), 2 * A * 2 * B)


def test_local_value_is_for_the_owner() -> None:
    with pytest.raises(RuntimeError, match=r"Can't call RRef.local_value\(\) on a non-owner RRef"):
        functions.local(bh.remote("worker1", torch.mul, (A, 2)), B)


def test_lists_of_references() -> None:
    rrefs = [bh.remote(f"worker{n}", torch.mul, (A, n)) for n in range(3)]
    assert torch.equal(functions.total(rrefs), A * 3)
    assert torch.equal(bh.rpc_sync("worker2", functions.total, (rrefs,)), A * 3)


def test_references_returned_from_script() -> None:
    remote = bh.remote("worker1", torch.mul, (A, 2))
    for returned in (functions.pass_on(remote), bh.rpc_sync("worker2", functions.pass_on, (remote,))):
        assert isinstance(returned, bh.RRef)
        assert returned.owner_name() == "worker1"
        assert torch.equal(returned.to_here(), A * 2)
        assert torch.equal(bh.rpc_sync("worker2", functions.fetch, (returned, B)), A * 2 * B)
        assert torch.equal(functions.pass_on(returned).rpc_sync().sum(), (A * 2).sum())
        assert repr(returned).startswith("UserRRef")


def test_made_in_script() -> None:
    is_owner, owner, value = functions.create_and_use("worker1", A, B)
    assert not is_owner
    assert owner == "worker1"
    assert torch.equal(value, blend(A, B, shift=3) + blend(B, A))
    assert torch.equal(functions.return_reference("worker1", A, B).to_here(), blend(A, B))


def test_made_in_script_on_this_worker() -> None:
    @script
    def call(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        rref = bh.remote("worker0", blend, (a, b))
        return rref.local_value(), bh.rpc_sync(rref.owner(), blend, (b, a))

    torch.testing.assert_close(call(A, B), (blend(A, B), blend(B, A)))


def test_a_value_of_another_type() -> None:
    with pytest.raises(RuntimeError, match="str"):
        functions.fetch(bh.remote("worker1", str, ("word",)), B)


def test_the_function_that_makes_the_value_raises() -> None:
    remote = bh.remote("worker1", functions.fail, (A,))
    with pytest.raises(RuntimeError, match="too many"):
        functions.fetch(remote, B)


def test_gradients_through_references(leaves: tuple[Tensor, Tensor]) -> None:
    a, b = leaves
    wanted = torch.autograd.grad((blend(a, b) * b).sum(), leaves)
    with bh.context() as ctx:
        rref = bh.remote("worker1", blend, (a, b))
        value = bh.rpc_sync("worker2", functions.fetch, (rref, b))
        grads = functions.differentiate(ctx, value.sum())
        torch.testing.assert_close((grads[a], grads[b]), wanted)


def test_attributes_of_modules(leaves: tuple[Tensor, Tensor]) -> None:
    a, _ = leaves
    caller = functions.Caller("worker2", [bh.remote("worker1", torch.mul, (A, n)) for n in range(3)])
    scripted = script(caller)
    wanted = torch.autograd.grad(blend(a + A * 3, caller.weight).sum(), [a, caller.weight])
    with bh.context() as ctx:
        value = scripted(a)
        torch.testing.assert_close(value, blend(a + A * 3, caller.weight))
        bh.backward(ctx, [value.sum()])
        grads = bh.get_gradients(ctx)
        torch.testing.assert_close((grads[a], grads[scripted.weight]), wanted)


class Holder(torch.nn.Module):
    """Holds references without annotations."""

    def __init__(self) -> None:
        super().__init__()
        self.one = bh.remote("worker1", torch.mul, (A, 2))
        self.several = [bh.remote(f"worker{n}", torch.mul, (A, n)) for n in range(3)]
        self.named = {"three": bh.remote("worker2", functions.three)}
        self.both = bh.remote("worker1", torch.mul, (A, 5)), 7

    def forward(self) -> Tensor:
        made = self.one.to_here() * self.named["three"].to_here()
        for rref in self.several:
            made = made + rref.to_here()
        return made + self.both[0].to_here() * self.both[1]


def test_attributes_of_modules_without_annotations() -> None:
    assert torch.equal(script(Holder())(), A * 2 * 3 + A * 3 + A * 5 * 7)


class Bystander(torch.nn.Module):
    """Holds references that script cannot use, and a list that it uses."""

    def __init__(self) -> None:
        super().__init__()
        self.failed = bh.remote("worker1", functions.fail, (A,))
        self.thing = bh.remote("worker1", object)
        self.listed = [bh.remote("worker1", torch.mul, (A, 2)), bh.remote("worker1", int)]
        self.mixed = [bh.remote("worker1", torch.mul, (A, 2)), "word"]
        self.sizes = [2, 3]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.sizes[1]


def test_attributes_that_the_script_does_not_use() -> None:
    assert torch.equal(script(Bystander())(A), A * 3)


class MixedTypes(Bystander):
    """Uses a list of references to values of two types."""

    def forward(self, x: Tensor) -> Tensor:
        return self.listed[0].to_here()


def test_references_to_values_of_several_types_need_an_annotation() -> None:
    with pytest.raises(RuntimeError, match="try adding a type annotation"):
        script(MixedTypes())


def test_references_cannot_be_saved() -> None:
    @script
    def save(rref: bh.RRef[Tensor], file: str) -> None:
        torch.save(rref, file)

    with pytest.raises(RuntimeError, match="only allowed inside RPC calls"):
        save(bh.RRef(A), "/dev/null")


def test_a_reference_annotated_with_the_class_of_compat() -> None:
    @script
    def fetch(rref: compat.RRef[Tensor]) -> Tensor:
        return rref.to_here()

    assert torch.equal(fetch(bh.remote("worker1", torch.mul, (A, 2))), A * 2)
