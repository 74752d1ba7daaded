"""Parameters of modules on other workers, as PyTorch sees them here, compared with the same module in one process."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import backhaul as bh
from backhaul.nn import RemoteModule

from . import modules
from .modules import batch, seeded

pytestmark = pytest.mark.usefixtures("workers")


def pair() -> tuple[nn.Module, nn.Module]:
    """A model over three workers, and the same model in one process."""
    there = nn.Sequential(nn.Linear(4, 4).double(), RemoteModule("worker1", seeded, (1,)), nn.Tanh())
    there.append(RemoteModule("worker2", nn.Linear, (3, 2), {"dtype": torch.float64}))
    here = nn.Sequential(nn.Linear(4, 4).double(), seeded(1), nn.Tanh(), nn.Linear(3, 2).double())
    there.load_state_dict(here.state_dict())
    return there, here


def run_both(there: nn.Module, here: nn.Module, seed: int = 1) -> None:
    for model in (there, here):
        model(batch(seed)).pow(2).sum().backward()


def value(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A tensor of any worker, as a plain one."""
    return tensor.to_here() if hasattr(tensor, "to_here") else tensor  # type: ignore[union-attr]


def assert_same_gradients(there: nn.Module, here: nn.Module) -> None:
    for (name, found), (other, wanted) in zip(there.named_parameters(), here.named_parameters(), strict=True):
        assert name == other
        assert (found.grad is None) == (wanted.grad is None), name
        if wanted.grad is not None:
            torch.testing.assert_close(value(found.grad), wanted.grad, rtol=0, atol=0)


def test_initialization_draws_the_numbers_of_one_process() -> None:
    there, here = pair()
    fills = [nn.init.normal_, nn.init.uniform_, nn.init.xavier_normal_, nn.init.kaiming_uniform_, nn.init.trunc_normal_]
    fills += [lambda p: p.exponential_(), lambda p: p.bernoulli_(0.5), lambda p: p.random_(9)]
    found = []
    for model in (there, here):
        torch.manual_seed(3)
        draw = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for fill in fills:
                for parameter in model.parameters():
                    if parameter.dim() > 1:
                        fill(parameter)
                found.append([value(parameter).clone() for parameter in model.parameters()])
            for parameter in model.parameters():
                parameter.t().normal_(generator=draw)  # one generator: the numbers go on
        found.append([value(parameter).clone() for parameter in model.parameters()])
        found.append([torch.rand(2)])  # both have drawn equally many
    half = len(found) // 2
    for some, wanted in zip(found[:half], found[half:], strict=True):
        assert all(map(torch.equal, some, wanted))


def test_they_are_listed_as_in_one_process() -> None:
    there, here = pair()
    for method in ("named_parameters", "named_buffers"):
        found, wanted = list(getattr(there, method)()), list(getattr(here, method)())
        assert [name for name, _ in found] == [name for name, _ in wanted]
        for (_, tensor), (_, other) in zip(found, wanted, strict=True):
            assert (tensor.shape, tensor.dtype, tensor.device) == (other.shape, other.dtype, other.device)
            assert (tensor.stride(), tensor.requires_grad, tensor.is_leaf) == (
                other.stride(),
                other.requires_grad,
                other.is_leaf,
            )
            assert torch.equal(value(tensor), other)
    assert sum(each.numel() for each in there.parameters()) == sum(each.numel() for each in here.parameters())
    assert all(isinstance(each, nn.Parameter) for each in there.parameters())
    assert [id(each) for each in there.parameters()] == [id(each) for each in there.parameters()]
    assert list(there.state_dict()) == list(here.state_dict())


def test_gradients_are_where_the_parameters_are() -> None:
    there, here = pair()
    assert [each.grad for each in there.parameters()] == [None] * 10
    run_both(there, here)
    assert_same_gradients(there, here)
    run_both(there, here, 2)  # they accumulate
    assert_same_gradients(there, here)
    (first,) = [p for n, p in there.named_parameters() if n == "1.0.weight"]
    assert first.grad is first.grad
    assert first.grad.shape == first.shape


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none: bool) -> None:
    there, here = pair()
    run_both(there, here)
    for model in (there, here):
        model.zero_grad(set_to_none)
    assert_same_gradients(there, here)
    run_both(there, here, 2)
    assert_same_gradients(there, here)
    for model in (there, here):
        loss = model(batch(3)).sum()
        model.zero_grad(set_to_none)  # between forward and backward
        loss.backward()
    assert_same_gradients(there, here)


@pytest.mark.parametrize("norm", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("foreach", [None, False])
def test_clipping(norm: float, foreach: bool | None) -> None:
    there, here = pair()
    run_both(there, here)
    found, wanted = [clip_grad_norm_(model.parameters(), 0.5, norm, foreach=foreach) for model in (there, here)]
    assert torch.equal(found, wanted)
    assert_same_gradients(there, here)
    for model in (there, here):
        clip_grad_value_(model.parameters(), 0.01, foreach=foreach)
    assert_same_gradients(there, here)


def test_gradients_can_be_assigned() -> None:
    there, here = pair()
    run_both(there, here)
    for model in (there, here):
        for index, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, 3.0) if index % 2 else torch.ones(parameter.shape).double()
    assert_same_gradients(there, here)
    with pytest.raises(RuntimeError, match="shape"):
        list(there.parameters())[2].grad = torch.ones(1)


def test_freezing() -> None:
    there, here = pair()
    for model in (there, here):
        model.requires_grad_(False)
        model[3].requires_grad_(True)
    run_both(there, here)
    assert_same_gradients(there, here)
    for model in (there, here):
        for parameter in model[1].parameters():
            parameter.requires_grad = True
    run_both(there, here)
    assert_same_gradients(there, here)


def test_a_parameter_in_the_loss() -> None:
    there, here = pair()
    for model in (there, here):
        decay = sum(parameter.pow(2).sum() for parameter in model.parameters())
        (model(batch()).sum() + 0.1 * decay).backward()
    assert_same_gradients(there, here)
    weight = next(iter(there[3].parameters()))
    with pytest.raises(NotImplementedError, match="grad of the parameter"):
        torch.autograd.grad(there(batch()).sum(), [weight])
    with pytest.raises(bh.errors.BackhaulError, match="inputs="):
        there(batch()).sum().backward(inputs=[weight])
    (gradient,) = torch.autograd.grad(there(batch()).sum(), [there[0].bias])
    (wanted,) = torch.autograd.grad(here(batch()).sum(), [here[0].bias])
    torch.testing.assert_close(gradient, wanted)


def test_operations_stay_on_the_owner() -> None:
    there, here = pair()
    weight, wanted = there[1]._parameters["0.weight"], here[1][0].weight
    with torch.no_grad():
        doubled = weight * 2
        assert type(doubled) is type(weight.detach())
        assert torch.equal(value(doubled), wanted * 2)
        assert type(weight.sum()) is torch.Tensor
        assert torch.equal(weight.sum(), wanted.sum())
        assert torch.equal(weight + wanted, wanted + wanted)  # with a local tensor: here
        weight.mul_(3).add_(wanted)
        local = torch.zeros_like(wanted)
        local.copy_(weight)
        assert torch.equal(local, wanted * 3 + wanted)
        other = there[3]._parameters["weight"]
        assert torch.equal(other @ weight[:3, :3], value(other) @ local[:3, :3])  # two owners: here
        weight.copy_(wanted)
    assert there.state_dict()["1.0.weight"].equal(wanted)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        weight.add_(1)
    with pytest.raises(RuntimeError, match="worker1"):
        weight.data_ptr()
    with pytest.raises(RuntimeError, match="hook"):
        weight.register_hook(print)


def test_copies_and_files() -> None:
    there, here = pair()
    weight = there[1]._parameters["0.weight"]
    wanted = here[1][0].weight
    file = io.BytesIO()
    torch.save([weight, weight.detach()], file)
    file.seek(0)
    parameter, plain = torch.load(file)
    assert type(parameter) is nn.Parameter
    assert type(plain) is torch.Tensor
    assert torch.equal(parameter, wanted)
    assert weight.tolist() == wanted.tolist()
    assert (weight.detach().numpy() == wanted.detach().numpy()).all()
    assert str(wanted.detach()) in repr(weight)
    twin = copy.deepcopy(weight)
    with torch.no_grad():
        twin.zero_()
    assert isinstance(twin, nn.Parameter)
    assert torch.equal(value(weight), wanted)
    assert not value(twin).any()


def test_a_copy_of_a_model() -> None:
    there, here = pair()
    twin = copy.deepcopy(there)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    torch.testing.assert_close(there.state_dict(), here.state_dict())
    assert not any(parameter.any() for parameter in twin.parameters())
    assert twin[1].module_rref is not there[1].module_rref


def test_conversions_change_them_in_place() -> None:
    there, _ = pair()
    before = list(there[1].parameters())
    there[1].float()
    after = list(there[1].parameters())
    assert all(one is other for one, other in zip(before, after, strict=True))
    assert {each.dtype for each in after} == {torch.float32}
    assert all(value(each).dtype is torch.float32 for each in after)


def test_tied_parameters_appear_once() -> None:
    there, here = RemoteModule("worker1", modules.tied), modules.tied()
    assert [name for name, _ in there.named_parameters()] == [name for name, _ in here.named_parameters()]
    named = there.named_parameters(remove_duplicate=False)
    assert [name for name, _ in named] == [name for name, _ in here.named_parameters(remove_duplicate=False)]


def test_modules_without_shapes_yet() -> None:
    there = RemoteModule("worker1", nn.LazyLinear, (3,))
    with pytest.raises(ValueError, match="run it once"):
        list(there.parameters())
    there(torch.ones(2, 4))
    assert [tuple(each.shape) for each in there.parameters()] == [(3, 4), (3,)]


def listed(module: RemoteModule) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(each.shape)) for name, each in module.named_parameters()]


def doubled(tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    return type(tensor).__name__, tensor * 2


def test_parameters_travel_by_value() -> None:
    there, here = pair()
    weight, wanted = there[1]._parameters["0.weight"], here[1][0].weight
    name, found = bh.rpc_sync("worker2", doubled, args=(weight,))
    found.sum().backward()
    assert torch.equal(found, wanted * 2)
    assert torch.equal(value(weight.grad), torch.full_like(wanted, 2))
    with torch.no_grad():
        assert bh.rpc_sync("worker2", doubled, args=(weight,))[0] == "Parameter"
    assert bh.rpc_sync("worker2", doubled, args=(weight.grad,))[0] == name == "Tensor"
    there.requires_grad_(False)  # reaches the owner before the module travels
    assert bh.rpc_sync("worker2", requires_grad, args=(there[1],)) == {False}


def requires_grad(module: nn.Module) -> set[bool]:
    return {parameter.requires_grad for parameter in module.parameters()}


def test_modules_that_contain_remote_modules() -> None:
    there, here = RemoteModule("worker1", modules.nested), pair()[1][1:3]
    assert [tuple(each.shape) for each in there.parameters()] == [tuple(each.shape) for each in here.parameters()]
    for model in (there, here):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for seed in range(3):
            optimizer.zero_grad()
            model(batch(seed)).pow(2).sum().backward()
            clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    found, wanted = list(there.state_dict().values()), list(here.state_dict().values())
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_modules_that_traveled() -> None:
    there = RemoteModule("worker1", nn.Linear, (4, 2))
    assert bh.rpc_sync("worker2", listed, args=(there,)) == [("weight", (2, 4)), ("bias", (2,))]
    again = RemoteModule.init_from_module_rref("worker1", there.module_rref)
    assert torch.equal(again.weight, there.weight.detach())


def test_two_objects_for_one_module() -> None:
    there = RemoteModule("worker1", nn.Linear, (4, 2))
    with torch.inference_mode():
        again = RemoteModule.init_from_module_rref("worker1", there.module_rref)
        assert again.weight.norm() == there.weight.norm()
    (there(torch.ones(1, 4)) + again(torch.ones(1, 4))).sum().backward()
    assert torch.equal(value(again.weight.grad), torch.full((2, 4), 2.0))
    again.weight.grad, there.bias.grad = None, torch.ones(2)
    assert there.weight.grad is None
    assert torch.equal(value(again.bias.grad), torch.ones(2))
