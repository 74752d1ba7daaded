"""Optimizers whose ``step`` is not torch's over parameters of several workers, compared with one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from .modules import batch
from .test_remote_optimizers import assert_same, pair

pytestmark = pytest.mark.usefixtures("workers")


def compare(make: Callable[[nn.Module], optim.Optimizer], steps: int = 3, *, closure: bool = False) -> None:
    """Train with the optimizers that ``make`` makes, and compare parameters and state."""
    there, here = pair()
    states = []
    for model in (there, here):
        optimizer = make(model)
        train(model, optimizer, range(steps), closure=closure)
        states.append(optimizer.state_dict()["state"])
    assert_same(there.state_dict(), here.state_dict())
    assert_same(*states)


def train(model: nn.Module, optimizer: optim.Optimizer, seeds: range, *, closure: bool = False) -> None:
    for seed in seeds:

        def loss(seed: int = seed) -> torch.Tensor:
            optimizer.zero_grad()
            found = model(batch(seed)).pow(2).sum()
            found.backward()
            return found

        if closure:
            optimizer.step(loss)
        else:
            loss()
            optimizer.step()


def subclass(base: type[optim.Optimizer], *, constructed: bool) -> type[optim.Optimizer]:
    """A class whose step calls that of its base. torch hooks the base's step if an optimizer of it was constructed."""
    copy: Any = type(base.__name__, (base,), {"step": base.step}) if constructed else base

    class Limited(copy):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.clamp_(-0.5, 0.5)
            return super().step(closure)

    if constructed:
        copy([nn.Parameter(torch.ones(1))], lr=1.0)
    return Limited


@pytest.mark.parametrize("constructed", [False, True])
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_a_step_that_calls_the_step_of_its_base(constructed: bool, options: dict[str, Any]) -> None:
    kind: Any = subclass(optim.Adam, constructed=constructed)
    compare(lambda model: kind(model.parameters(), lr=0.1, **options))


def test_a_base_class_of_the_user_that_was_constructed() -> None:
    class Base(optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.add_(parameter.grad, alpha=-group["lr"])

    class Derived(Base):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step(closure)

    Base([nn.Parameter(torch.ones(1))])
    compare(lambda model: Derived(model.parameters()))


class Slowing(optim.Optimizer):
    """Counts its steps in an attribute."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] / self.steps)


def test_attributes_of_an_optimizer() -> None:
    there, here = pair()
    for model in (there, here):
        optimizer = Slowing(model.parameters())
        train(model, optimizer, range(3))
        optimizer.steps = 10
        train(model, optimizer, range(3, 5))
        assert optimizer.steps == 12
    assert_same(there.state_dict(), here.state_dict())


class SharpnessAware(optim.Optimizer):
    """Steps from the gradient at a point up the slope. Calls its closure in the middle of its step."""

    def __init__(self, parameters: Any, base: type[optim.Optimizer], **options: Any) -> None:
        super().__init__(parameters, {"radius": 0.05, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    def _with_gradients(self) -> list[Any]:
        return [each for group in self.param_groups for each in group["params"] if each.grad is not None]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        closure = torch.enable_grad()(closure)
        loss = closure()
        norm = torch.stack([each.grad.norm() for each in self._with_gradients()]).norm()
        for parameter in self._with_gradients():
            self.state[parameter]["old"] = parameter.detach().clone()
            parameter.add_(parameter.grad * (self.param_groups[0]["radius"] / (norm + 1e-12)))
        closure()
        for parameter in self._with_gradients():
            parameter.copy_(self.state[parameter]["old"])
        self.base.step()
        return loss


@pytest.mark.parametrize("base", [optim.SGD, optim.AdamW])
def test_a_step_that_calls_its_closure_in_the_middle(base: type[optim.Optimizer]) -> None:
    compare(lambda model: SharpnessAware(model.parameters(), base, lr=0.1), closure=True)


class Normalized(optim.Optimizer):
    """Steps by the norm of all gradients, of all workers."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = closure()
        parameters = [each for group in self.param_groups for each in group["params"]]
        with torch.no_grad():
            norm = nn.utils.get_total_norm([each.grad for each in parameters])
            for parameter in parameters:
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                parameter.sub_(mean.lerp_(parameter.grad, 0.1) / norm)
        return loss


def test_a_step_that_uses_the_norm_of_all_gradients() -> None:
    compare(lambda model: Normalized(model.parameters()), closure=True)


class Halved(optim.SGD):
    """Overrides a private method that torch's step calls."""

    def _init_group(self, group: Any, params: Any, grads: Any, momenta: Any) -> bool:
        found = super()._init_group(group, params, grads, momenta)
        grads[:] = [each / 2 for each in grads]
        return found


def test_a_private_method_that_the_step_calls() -> None:
    compare(lambda model: Halved(model.parameters(), lr=0.1, momentum=0.9))


def test_a_decorated_step_of_torch() -> None:
    def twice(step: Any) -> Any:
        def stepped(self: Any, closure: Any = None) -> Any:
            step(self, closure)
            return step(self, closure)

        stepped.__module__, stepped.__wrapped__ = step.__module__, step  # type: ignore[attr-defined]
        return stepped

    kind: Any = type("Twice", (optim.SGD,), {"step": twice(optim.SGD.step)})
    compare(lambda model: kind(model.parameters(), lr=0.1, momentum=0.9))


def test_a_class_that_owners_cannot_import() -> None:
    class Named(optim.Adam):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=0.1)
            self.function = lambda: None

    compare(lambda model: Named(model.parameters()))


def test_state_of_the_step_is_saved_and_loaded() -> None:
    there, here = pair()
    states = []
    for model in (there, here):
        optimizer = Normalized(model.parameters())
        train(model, optimizer, range(2), closure=True)
        saved = optimizer.state_dict()
        assert all(type(state["mean"]) is torch.Tensor for state in saved["state"].values())
        optimizer = Normalized(model.parameters())
        optimizer.load_state_dict(saved)
        train(model, optimizer, range(2, 4), closure=True)
        states.append(optimizer.state_dict()["state"])
    assert_same(there.state_dict(), here.state_dict())
    assert_same(*states)


def test_a_gradient_scaler() -> None:
    kind: Any = subclass(optim.SGD, constructed=False)
    there, here = pair()
    for model in (there, here):
        optimizer = kind(model.parameters(), lr=0.1, momentum=0.9, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        for seed in range(4):
            optimizer.zero_grad()
            loss = model(batch(seed)).pow(2).sum()
            scaler.scale(loss * float("inf") if seed == 2 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert_same(there.state_dict(), here.state_dict())


def test_a_fused_step_with_state_that_was_loaded() -> None:
    """Its state is here until a step makes it anew; the operation cannot write to two workers at once."""
    kind: Any = subclass(optim.Adam, constructed=False)
    there, _ = pair()
    optimizer = kind(there.parameters(), lr=0.1, fused=True)
    train(there, optimizer, range(1))
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(NotImplementedError, match="several workers at once"):
        train(there, optimizer, range(1))
