"""An owner's share of a ``torch.optim`` optimizer of another worker: the same optimizer over the parameters here."""

from __future__ import annotations

import dataclasses
import operator
import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from backhaul._remote_tensors.addresses import Place
from backhaul._remote_tensors.on_owner import Containers, Gradients, TensorForm, are_gradients, gradients_of
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
        modules: How many of the first containers of the message are modules.
    """

    layout: Layout | None
    options: list[Options]
    state: Mapping[int, Any]
    modules: int


Stepped = tuple[dict[int, Any] | None, list[Gradients] | None]
"""New descriptions of state by the number of the parameter, and the modules' gradients; None: as the driver knows."""


class OwnedOptimizer:
    """The share. One step runs at a time."""

    def __init__(self, maker: Maker) -> None:
        self._maker = maker
        self._optimizer: torch.optim.Optimizer | None = None
        self._parameters: dict[int, torch.Tensor] = {}
        self._places: dict[int, Place] = {}
        self._modules: list[weakref.ref[nn.Module]] = []  # weak: the driver's references keep them
        self._described: dict[int, Any] = {}
        self._seen: dict[int, tuple[Any, ...]] = {}  # the state that was described; torch changes tensors in place
        self._told: list[Gradients] | None = None  # the gradients that the driver knows of

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
            self._modules = [weakref.ref(module) for module in containers.values[: setup.modules]]
        self._told = None
        assert self._optimizer is not None
        self._follow(self._list_parameters())
        _set_options(self._optimizer, setup.options)
        for number, state in setup.state.items():
            self._set_state(self._optimizer, number, None if state is None else containers.find_all(state))

    def step(
        self, options: list[Options] | None, attributes: Mapping[str, Any] | None, scaling: Mapping[str, Any] | None
    ) -> Stepped:
        """Step. Returns what has changed in the form of the state, and of the gradients."""
        optimizer, parameters = self._optimizer, self._list_parameters()
        assert optimizer is not None
        self._follow(parameters)
        if options is not None:
            _set_options(optimizer, options)
        if attributes is not None:
            optimizer.__dict__.update(attributes)
        if scaling is not None:
            optimizer.__dict__.update(scaling)
        try:
            optimizer.step()
        finally:
            for name in scaling or ():
                del optimizer.__dict__[name]
        return self._new_descriptions(optimizer) or None, self._new_gradients(parameters)

    def forget_told(self) -> None:
        """The driver does not know what the last steps have returned."""
        self._described.clear()
        self._seen.clear()
        self._told = None

    def _list_parameters(self) -> list[list[torch.Tensor]]:
        """The parameters of each module, as they are now."""
        modules = [each() for each in self._modules]
        return [[] if module is None else list(module.parameters()) for module in modules]

    def _new_gradients(self, parameters: Sequence[Sequence[torch.Tensor]]) -> list[Gradients] | None:
        told = self._told
        if told is not None and all(map(are_gradients, told, parameters)):
            return None
        self._told = [gradients_of(each) for each in parameters]
        return self._told

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

    def _follow(self, listed: Sequence[Sequence[torch.Tensor]]) -> None:
        """Take over parameters that have replaced others, as ``load_state_dict(assign=True)`` does."""
        optimizer = self._optimizer
        assert optimizer is not None
        for number, place in self._places.items():
            parameters = listed[place.container]
            old, new = self._parameters[number], parameters[place.key] if parameters else None
            if new is not old and new is not None:
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
        self._seen.pop(number, None)
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
        found: dict[int, Any] = {}
        if not optimizer.state:
            return found
        for number, parameter in self._parameters.items():
            state = optimizer.state.get(parameter)
            if state is None:
                continue
            values, seen = tuple(state.values()), self._seen.get(number, ())
            if values and len(values) == len(seen) and all(map(operator.is_, values, seen)):
                continue
            now = map_leaves(lambda _, value: TensorForm.of(value) if isinstance(value, torch.Tensor) else value, state)
            if number not in self._described or self._described[number] != now:
                self._described[number] = found[number] = now
            if not any(isinstance(value, (dict, list, tuple)) for value in values):
                self._seen[number] = values
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


def step_owned(
    owned: OwnedOptimizer,
    again: bool,
    options: list[Options] | None,
    attributes: Mapping[str, Any] | None,
    scaling: Mapping[str, torch.Tensor] | None,
) -> Stepped:
    """Step.

    Args:
        owned: The share.
        again: Whether the driver does not know what the last steps have returned.
        options: The options of the groups that have parameters here; None: as before.
        attributes: Attributes of the optimizer that are new or have changed, if any.
        scaling: Tensors of a ``GradScaler``, for optimizers that unscale gradients themselves.
    """
    with one_at_a_time():
        if again:
            owned.forget_told()
        return owned.step(options, attributes, scaling)
