"""torch's optimizers over parameters of several workers, compared with the same training in one process."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn.utils import clip_grad_norm_

from backhaul.nn import RemoteModule

from .modules import batch, seeded

pytestmark = pytest.mark.usefixtures("workers")

CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "SGD without state": (optim.SGD, {"lr": 0.1, "maximize": True}),
    "Adam": (optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "Adam foreach": (optim.Adam, {"lr": 0.01, "foreach": True}),
    "Adam fused": (optim.Adam, {"lr": 0.01, "fused": True}),
    "AdamW": (optim.AdamW, {"lr": 0.01}),
    "AdamW tensor lr": (optim.AdamW, {"lr": torch.tensor(0.01)}),
    "Adagrad": (optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01}),
    "Adadelta": (optim.Adadelta, {"lr": 1.0}),
    "Adamax": (optim.Adamax, {"lr": 0.01}),
    "NAdam": (optim.NAdam, {"lr": 0.01}),
    "RAdam": (optim.RAdam, {"lr": 0.01}),
    "RMSprop": (optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "Rprop": (optim.Rprop, {"lr": 0.01}),
    "ASGD": (optim.ASGD, {"lr": 0.01, "t0": 2.0}),
    "Adafactor": (optim.Adafactor, {"lr": 0.01}),
}


def pair(make: Callable[[int], nn.Module] = seeded) -> tuple[nn.Module, nn.Module]:
    """A model over three workers, and the same model in one process."""
    there = nn.Sequential(
        nn.Linear(4, 4).double(), RemoteModule("worker1", make, (1,)), RemoteModule("worker2", last, (2,))
    )
    here = nn.Sequential(nn.Linear(4, 4).double(), make(1), last(2))
    there.load_state_dict(here.state_dict())
    return there, here


def last(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(3, 2).double()


def train(model: nn.Module, optimizer: optim.Optimizer, seeds: range, *, clip: float = 1.0) -> None:
    scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for seed in seeds:
        optimizer.zero_grad()
        model(batch(seed)).pow(2).sum().backward()
        clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        scheduler.step()


def assert_same(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("name", CLASSES)
def test_every_optimizer(name: str) -> None:
    kind, options = CLASSES[name]
    there, here = pair()
    optimizers = [kind(model.parameters(), **copy.deepcopy(options)) for model in (there, here)]
    for model, optimizer in zip((there, here), optimizers, strict=True):
        train(model, optimizer, range(5))
    assert_same(there.state_dict(), here.state_dict())
    found, wanted = [optimizer.state_dict() for optimizer in optimizers]
    assert_same(found["state"], wanted["state"])
    assert str(found["param_groups"]) == str(wanted["param_groups"])


def matrices(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False))


@pytest.mark.skipif(not hasattr(optim, "Muon"), reason="this torch has no Muon")
def test_muon() -> None:
    there, here = RemoteModule("worker1", matrices, (1,)), matrices(1)
    for model in (there, here):
        optimizer = optim.Muon(model.parameters(), lr=0.01)
        for seed in range(3):
            optimizer.zero_grad()
            model(batch(seed).float()).pow(2).sum().backward()
            optimizer.step()
    assert_same(there.state_dict(), here.state_dict())


def bag(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.EmbeddingBag(10, 4, sparse=True)


def test_sparse_adam() -> None:
    there, here = RemoteModule("worker1", bag, (1,)), bag(1)
    optimizers = [optim.SparseAdam(list(model.parameters()), lr=0.1) for model in (there, here)]
    for model, optimizer in zip((there, here), optimizers, strict=True):
        for seed in range(3):
            optimizer.zero_grad()
            model(torch.tensor([[seed, 2, 5]])).pow(2).sum().backward()
            assert next(iter(model.parameters())).grad.is_sparse
            optimizer.step()
    assert_same(there.state_dict(), here.state_dict())
    assert_same(*(optimizer.state_dict()["state"] for optimizer in optimizers))


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs(search: str | None) -> None:
    there, here = pair(matrices_double)
    for model in (there, here):
        optimizer = optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, line_search_fn=search)

        def closure(model: nn.Module = model, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch()).pow(2).sum()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
    torch.testing.assert_close(there.state_dict(), here.state_dict())


def matrices_double(seed: int) -> nn.Module:
    return matrices(seed).double()


def test_a_closure_sees_gradients() -> None:
    there, here = pair()
    seen = []
    for model in (there, here):
        optimizer = optim.AdamW(model.parameters(), lr=0.01)

        def closure(model: nn.Module = model, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch()).pow(2).sum()
            loss.backward()
            seen.append([each.grad is not None for each in model.parameters()])
            return loss

        losses = [optimizer.step(closure) for _ in range(3)]
        losses.append(optimizer.step(closure=closure))
        seen.append([loss.item() for loss in losses])  # type: ignore[arg-type]
    assert seen[:5] == seen[5:]
    assert_same(there.state_dict(), here.state_dict())


def test_a_step_that_fails_shows_gradients_again() -> None:
    there, _ = pair()
    optimizer = optim.SGD(there.parameters(), lr=0.1)
    there(batch()).sum().backward()

    def closure() -> float:
        raise KeyError("closure")

    with pytest.raises(KeyError, match="closure"):
        optimizer.step(closure)
    assert all(each.grad is not None for each in there.parameters())


def test_groups_that_mix_workers() -> None:
    there, here = pair()
    for model in (there, here):
        named = dict(model.named_parameters())
        weights = [value for name, value in named.items() if name.endswith("weight")]
        others = [value for name, value in named.items() if not name.endswith("weight")]
        optimizer = optim.AdamW([{"params": weights, "weight_decay": 0.1}, {"params": others[:2], "lr": 0.1}], lr=0.01)
        train(model, optimizer, range(2))
        optimizer.add_param_group({"params": others[2:], "lr": 0.05})
        train(model, optimizer, range(2, 5))
    assert_same(there.state_dict(), here.state_dict())


def test_accumulation_and_parameters_without_gradients() -> None:
    there, here = pair()
    for model in (there, here):
        optimizer = optim.Adam(model.parameters(), lr=0.01)
        model[1].requires_grad_(False)
        for seed in range(4):
            model(batch(seed)).pow(2).sum().backward()
            if seed % 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            if seed == 1:
                model[1].requires_grad_(True)
    assert_same(there.state_dict(), here.state_dict())


# State.


def test_state_moves_between_remote_and_local_optimizers() -> None:
    there, here = pair()
    optimizers = [optim.AdamW(model.parameters(), lr=0.01) for model in (there, here)]
    for model, optimizer in zip((there, here), optimizers, strict=True):
        train(model, optimizer, range(3))
    file = io.BytesIO()
    torch.save([each.state_dict() for each in optimizers], file)
    file.seek(0)
    from_there, from_here = torch.load(file)
    saved = copy.deepcopy(from_here)
    assert_same(from_there["state"], from_here["state"])
    optimizers = [optim.AdamW(model.parameters(), lr=0.5) for model in (there, here)]
    optimizers[0].load_state_dict(from_here)
    optimizers[1].load_state_dict(from_there)
    for model, optimizer in zip((there, here), optimizers, strict=True):
        train(model, optimizer, range(3, 6))
    assert_same(there.state_dict(), here.state_dict())
    for model, optimizer in zip((there, here), optimizers, strict=True):
        optimizer.load_state_dict(copy.deepcopy(saved))  # an optimizer that has stepped
        train(model, optimizer, range(3))
    assert_same(there.state_dict(), here.state_dict())
    assert_same(*(each.state_dict()["state"] for each in optimizers))


def test_state_is_shown_and_can_be_changed() -> None:
    there, here = pair()
    optimizers = [optim.Adam(model.parameters(), lr=0.01) for model in (there, here)]
    for model, optimizer in zip((there, here), optimizers, strict=True):
        train(model, optimizer, range(2))
        for parameter in model.parameters():
            state = optimizer.state[parameter]
            assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
            assert state["exp_avg"].shape == parameter.shape
            assert float(state["step"]) == 2
            state["exp_avg"].mul_(2)  # in place
            state["exp_avg_sq"] = torch.ones_like(parameter, requires_grad=False)
        del optimizer.state[next(iter(model[2].parameters()))]
        train(model, optimizer, range(2, 4))
    assert_same(there.state_dict(), here.state_dict())


class Momentum(optim.Optimizer):
    """An optimizer whose constructor takes other arguments than torch's."""

    def __init__(self, rate: float, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"rate": rate})
        self.scale = 0.5

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["count"] = state.get("count", 0) + 1
                    parameter.add_(parameter.grad, alpha=-group["rate"] * self.scale / state["count"])


def test_an_optimizer_of_the_user() -> None:
    there, here = pair()
    for model in (there, here):
        optimizer = Momentum(0.1, model)
        for seed in range(3):
            optimizer.zero_grad()
            model(batch(seed)).pow(2).sum().backward()
            optimizer.step()
        assert {state["count"] for state in optimizer.state.values()} == {3}
    assert_same(there.state_dict(), here.state_dict())


def test_parameters_that_were_replaced() -> None:
    there, here = pair()
    for model in (there, here):
        optimizer = optim.Adam(model.parameters(), lr=0.01)
        train(model, optimizer, range(2))
        # torch's own optimizer would go on with the parameters that were replaced.
        model.load_state_dict(copy.deepcopy(model.state_dict()), assign=model is there)
        for number, parameter in enumerate(there[0].parameters() if model is there else ()):
            old = optimizer.param_groups[0]["params"][number]
            optimizer.state[parameter] = optimizer.state.pop(old)
            optimizer.param_groups[0]["params"][number] = parameter
        train(model, optimizer, range(2, 4))
    assert_same(there.state_dict(), here.state_dict())


def test_hooks_of_the_user_see_the_step() -> None:
    there, _ = pair()
    optimizer = optim.SGD(there.parameters(), lr=0.1)
    weight = next(iter(there[2].parameters()))
    before, seen = weight.detach().to_here(), []
    optimizer.register_step_pre_hook(lambda *_: seen.append(weight.grad is not None))
    optimizer.register_step_post_hook(lambda *_: seen.append(torch.equal(weight.detach(), before)))
    for _ in range(2):
        there(batch()).sum().backward()
        optimizer.step()
    assert seen == [True, False, True, False]


# Mixed precision.


def test_gradient_scaler() -> None:
    there, here = pair()
    scales = []
    for model in (there, here):
        optimizer = optim.AdamW(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        for seed in range(6):
            optimizer.zero_grad()
            loss = model(batch(seed)).pow(2).sum()
            scaler.scale(loss * float("inf") if seed == 2 else loss).backward()
            if seed != 3:
                scaler.unscale_(optimizer)
                clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
    assert scales[:6] == scales[6:]
    assert scales[2] < scales[1]
    assert_same(there.state_dict(), here.state_dict())


def test_a_scaler_with_a_fused_optimizer() -> None:
    there, here = pair()
    for model in (there, here):
        optimizer = optim.Adam(model.parameters(), lr=0.01, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        for seed in range(4):
            optimizer.zero_grad()
            loss = model(batch(seed)).pow(2).sum()
            scaler.scale(loss * float("inf") if seed == 2 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert_same(there.state_dict(), here.state_dict())


# Averages.


@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize("multi", [False, True])
def test_averaged_models(multi: bool, use_buffers: bool) -> None:
    there, here = pair()
    averages = []
    for model in (there, here):
        function = optim.swa_utils.get_ema_multi_avg_fn(0.9) if multi else None
        averaged = optim.swa_utils.AveragedModel(model, multi_avg_fn=function, use_buffers=use_buffers)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        for seed in range(3):
            optimizer.zero_grad()
            model(batch(seed)).pow(2).sum().backward()
            optimizer.step()
            averaged.update_parameters(model)
        averages.append(averaged)
    found, wanted = averages
    assert_same(found.state_dict(), wanted.state_dict())
    assert_same(there.state_dict(), here.state_dict())
    assert torch.equal(found.eval()(batch()), wanted.eval()(batch()))
