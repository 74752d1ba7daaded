"""An owner's share of a ``torch.optim`` optimizer of another worker: the same optimizer over the parameters here."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from backhaul._remote_tensors.addresses import Place
from backhaul._remote_tensors.on_owner import Containers, Gradients, TensorForm, gradients_of
from backhaul._rref.handle import RRef
from backhaul._rref.owner_calls import Named
from backhaul.optim.gradients import one_at_a_time
from backhaul.optim.nested_state import map_leaves

Options = dict[str, Any]

Layout = list[list[tuple[int, Place]]]
"""For each group, the parameters that are here, each with the number by which the driver knows it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Maker:
    """How torch's optimizer is made anew. Its constructor is not needed for that.

    Attributes:
        kind: Its class, which is torch's own.
        defaults: Its default options.
    """

    kind: type[torch.optim.Optimizer]
    defaults: Options


@dataclasses.dataclass(frozen=True, slots=True)
class Setup:
    """What the share takes over before it steps.

    Attributes:
        layout: The parameters of each group that has some here; None: as before.
        options: The options of these groups.
        state: State that the driver has set, by the number of the parameter; None: it has deleted the state.
    """

    layout: Layout | None
    options: list[Options]
    state: Mapping[int, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class OwnerStep:
    """What a step needs from the driver.

    Attributes:
        options: The options of the groups that have parameters here.
        attributes: Attributes of the optimizer that are new or have changed.
        scaling: Tensors of a ``GradScaler``, for optimizers that unscale gradients themselves.
        modules: How many of the first containers are modules.
    """

    options: list[Options]
    attributes: Mapping[str, Any]
    scaling: Mapping[str, torch.Tensor]
    modules: int


Stepped = tuple[dict[int, Any], list[Gradients]]
"""New descriptions of state by the number of the parameter, and the modules' gradients."""


class OwnedOptimizer:
    """The share. One step runs at a time."""

    def __init__(self, maker: Maker) -> None:
        self._maker = maker
        self._optimizer: torch.optim.Optimizer | None = None
        self._parameters: dict[int, torch.Tensor] = {}
        self._places: dict[int, Place] = {}
        self._described: dict[int, Any] = {}

    def find(self, key: tuple[int, tuple[Any, ...]]) -> torch.Tensor:
        """A tensor of the state."""
        number, path = key
        assert self._optimizer is not None
        found: Any = self._optimizer.state[self._parameters[number]]
        for part in path:
            found = found[part]
        return found  # type: ignore[no-any-return]

    def set_up(self, setup: Setup, containers: Containers) -> None:
        """Take over parameters, options and state."""
        if setup.layout is not None:
            self._lay_out(setup.layout, setup.options, containers)
        optimizer = self._current(containers)
        _set_options(optimizer, setup.options)
        for number, state in setup.state.items():
            self._set_state(optimizer, number, None if state is None else containers.find_all(state))

    def step(self, step: OwnerStep, containers: Containers) -> dict[int, Any]:
        """Step. Returns what has changed in the form of the state."""
        optimizer = self._current(containers)
        _set_options(optimizer, step.options)
        optimizer.__dict__.update(step.attributes)
        optimizer.__dict__.update(step.scaling)
        try:
            optimizer.step()
        finally:
            for name in step.scaling:
                del optimizer.__dict__[name]
        return self._new_descriptions(optimizer)

    def _lay_out(self, layout: Layout, options: list[Options], containers: Containers) -> None:
        groups = [[(number, containers.parameter(place)) for number, place in group] for group in layout]
        self._parameters.update(pair for group in groups for pair in group)
        self._places = {number: place for group in layout for number, place in group}
        param_groups = [
            {**options, "params": [parameter for _, parameter in group]}
            for options, group in zip(options, groups, strict=True)
        ]
        if self._optimizer is None:
            self._optimizer = self._make(param_groups)
        else:
            self._optimizer.param_groups[:] = param_groups

    def _current(self, containers: Containers) -> torch.optim.Optimizer:
        assert self._optimizer is not None
        self._follow(self._optimizer, containers)
        return self._optimizer

    def _follow(self, optimizer: torch.optim.Optimizer, containers: Containers) -> None:
        """Take over parameters that have replaced others, as ``load_state_dict(assign=True)`` does."""
        for number, place in self._places.items():
            old, new = self._parameters[number], containers.parameter(place)
            if new is not old:
                self._parameters[number] = new
                for group in optimizer.param_groups:
                    group["params"] = [new if each is old else each for each in group["params"]]
                if old in optimizer.state:
                    optimizer.state[new] = optimizer.state.pop(old)

    def _make(self, param_groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        made = self._maker.kind.__new__(self._maker.kind)
        made.__setstate__({"defaults": self._maker.defaults, "state": defaultdict(dict), "param_groups": param_groups})
        return made

    def _set_state(self, optimizer: torch.optim.Optimizer, number: int, state: Any) -> None:
        parameter = self._parameters[number]
        self._described.pop(number, None)
        if state is None:
            optimizer.state.pop(parameter, None)
            return
        everywhere = any(
            group.get("capturable") or group.get("fused")
            for group in optimizer.param_groups
            if any(parameter is each for each in group["params"])
        )

        def move(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and (value.dim() or everywhere):
                return value.to(parameter.device)
            return value

        optimizer.state[parameter] = map_leaves(lambda _, value: move(value), state)

    def _new_descriptions(self, optimizer: torch.optim.Optimizer) -> dict[int, Any]:
        found = {}
        for number, parameter in self._parameters.items():
            if parameter not in optimizer.state:
                continue
            now = map_leaves(
                lambda _, value: TensorForm.of(value) if isinstance(value, torch.Tensor) else value,
                optimizer.state[parameter],
            )
            if number not in self._described or self._described[number] != now:
                self._described[number] = found[number] = now
        return found


def _set_options(optimizer: torch.optim.Optimizer, options: list[Options]) -> None:
    for group, each in zip(optimizer.param_groups, options, strict=True):
        group.update(each)


def set_up_owned(named: Sequence[Named], share: int | Maker, setup: Setup) -> RRef[OwnedOptimizer] | None:
    """Prepare a share for steps. ``share``: the container that is the share, or how to make one, which is returned.

    This is a call of its own: if the step fails, the driver knows the share and what it has taken over.
    """
    containers = Containers(named)
    owned = OwnedOptimizer(share) if isinstance(share, Maker) else containers.values[share]
    with one_at_a_time():
        owned.set_up(setup, containers)
    return RRef(owned) if isinstance(share, Maker) else None


def step_owned(named: Sequence[Named], share: int, step: OwnerStep) -> Stepped:
    """Step. ``share``: the container that is the share."""
    containers = Containers(named)
    with one_at_a_time():
        described = containers.values[share].step(step, containers)
        return described, [gradients_of(module) for module in containers.values[: step.modules]]
