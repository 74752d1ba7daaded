"""References in script: annotations, methods, travelling, gradients through them."""

import pytest
import torch
from torch import Tensor

import backhaul as bh
from backhaul.compat import rpc as compat

from . import functions
from .functions import blend, script

A, B = torch.tensor([1.0, 2.0]), torch.tensor([0.5, 4.0])

pytestmark = pytest.mark.usefixtures("workers")


def test_where_it_is() -> None:
    there, here = bh.remote("worker1", torch.mul, (A, 2)), bh.RRef(A)
    there.to_here()  # so that it is confirmed
    assert functions.look_at(there) == (False, "worker1", True, "worker1", 1)
    assert functions.look_at(here) == (True, "worker0", True, "worker0", 0)
    assert bh.rpc_sync("worker1", functions.look_at, (there,)) == (True, "worker1", True, "worker1", 1)


def test_values() -> None:
    there, here = bh.remote("worker1", torch.mul, (A, 2)), bh.RRef(A)
    assert torch.equal(functions.bring(there, B), A * 2 * B)
    assert torch.equal(functions.bring(here, B), A * B)
    assert torch.equal(functions.bring_within(there, 20.0), A * 2)
    assert torch.equal(functions.local(here, B), A * B)
    assert torch.equal(bh.rpc_sync("worker1", functions.local, (there, B)), A * 2 * B)
    assert torch.equal(functions.at_owner(there, B), 2 * A * 2 * B)


def test_local_value_is_for_the_owner() -> None:
    with pytest.raises(RuntimeError, match=r"Can't call RRef.local_value\(\) on a non-owner RRef"):
        functions.local(bh.remote("worker1", torch.mul, (A, 2)), B)


def test_lists_of_them() -> None:
    rrefs = [bh.remote(f"worker{n}", torch.mul, (A, n)) for n in range(3)]
    assert torch.equal(functions.total(rrefs), A * 3)
    assert torch.equal(bh.rpc_sync("worker2", functions.total, (rrefs,)), A * 3)


def test_out_of_script() -> None:
    there = bh.remote("worker1", torch.mul, (A, 2))
    for back in (functions.pass_on(there), bh.rpc_sync("worker2", functions.pass_on, (there,))):
        assert isinstance(back, bh.RRef)
        assert back.owner_name() == "worker1"
        assert torch.equal(back.to_here(), A * 2)
        assert torch.equal(bh.rpc_sync("worker2", functions.bring, (back, B)), A * 2 * B)
        assert torch.equal(functions.pass_on(back).rpc_sync().sum(), (A * 2).sum())
        assert repr(back).startswith("UserRRef")


def test_made_in_script() -> None:
    is_owner, owner, value = functions.made_here("worker1", A, B)
    assert not is_owner
    assert owner == "worker1"
    assert torch.equal(value, blend(A, B, shift=3) + blend(B, A))
    assert torch.equal(functions.hand_out("worker1", A, B).to_here(), blend(A, B))


def test_made_in_script_on_this_worker() -> None:
    @script
    def call(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        rref = bh.remote("worker0", blend, (a, b))
        return rref.local_value(), bh.rpc_sync(rref.owner(), blend, (b, a))

    torch.testing.assert_close(call(A, B), (blend(A, B), blend(B, A)))


def test_a_value_that_is_not_of_the_type() -> None:
    with pytest.raises(RuntimeError, match="str"):
        functions.bring(bh.remote("worker1", str, ("word",)), B)


def test_a_value_that_could_not_be_made() -> None:
    there = bh.remote("worker1", functions.fail, (A,))
    with pytest.raises(RuntimeError, match="too many"):
        functions.bring(there, B)


def test_gradients_through_them(leaves: tuple[Tensor, Tensor]) -> None:
    a, b = leaves
    wanted = torch.autograd.grad((blend(a, b) * b).sum(), leaves)
    with bh.context() as ctx:
        rref = bh.remote("worker1", blend, (a, b))
        value = bh.rpc_sync("worker2", functions.bring, (rref, b))
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
    """Holds references without saying to what."""

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
    """Holds references that are of no use in script, and a list that it does use."""

    def __init__(self) -> None:
        super().__init__()
        self.failed = bh.remote("worker1", functions.fail, (A,))
        self.thing = bh.remote("worker1", object)
        self.listed = [bh.remote("worker1", torch.mul, (A, 2)), bh.remote("worker1", int)]
        self.mixed = [bh.remote("worker1", torch.mul, (A, 2)), "word"]
        self.sizes = [2, 3]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.sizes[1]


def test_attributes_that_scripts_have_nothing_to_do_with() -> None:
    assert torch.equal(script(Bystander())(A), A * 3)


class Careless(Bystander):
    """Uses one of them."""

    def forward(self, x: Tensor) -> Tensor:
        return self.listed[0].to_here()


def test_references_to_values_of_several_types_need_an_annotation() -> None:
    with pytest.raises(RuntimeError, match="try adding a type annotation"):
        script(Careless())


def test_they_are_not_saved() -> None:
    @script
    def save(rref: bh.RRef[Tensor], file: str) -> None:
        torch.save(rref, file)

    with pytest.raises(RuntimeError, match="only allowed inside RPC calls"):
        save(bh.RRef(A), "/dev/null")


def test_those_of_the_other_package() -> None:
    @script
    def bring(rref: compat.RRef[Tensor]) -> Tensor:
        return rref.to_here()

    assert torch.equal(bring(bh.remote("worker1", torch.mul, (A, 2))), A * 2)
