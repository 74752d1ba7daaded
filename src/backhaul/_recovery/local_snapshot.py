"""What the worker that trains holds itself: its tensors and modules, the options of optimizers, schedulers, scalers. It
is restored in place, because the program has the objects. Sends nothing.

A snapshot refers to none of these objects, so that it does not keep them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from backhaul._recovery.trained_state import TrainedState
from backhaul._remote_tensors.remote_tensor import RemoteTensor
from backhaul.optim.nested_state import map_leaves

_PLAIN = (bool, int, float, str, type(None))
_UNFINISHED = ("_per_optimizer_states", "_stages", "_found_inf")
"""What scalers note of a step that has not ended. ``state_dict`` does not have it."""


@dataclass(frozen=True, slots=True)
class OptimizerSnapshot:
    """The part of an optimizer that is on the worker that trains.

    Attributes:
        options: The options of each group.
        attributes: Its attributes that are numbers, such as those that schedulers set.
        state: The state of each parameter, in the order of the groups. It may name remote tensors.
    """

    options: list[dict[str, Any]]
    attributes: dict[str, Any]
    state: list[Any]


@dataclass(frozen=True, slots=True)
class LocalSnapshot:
    """The state of this worker.

    Attributes:
        values: Each tensor and its gradient.
        attributes: For each module, the attributes that are numbers or text.
        optimizers: The optimizers.
        distributed: The options of each group of each distributed optimizer.
        others: What ``state_dict`` of the other objects has returned.
    """

    values: list[tuple[torch.Tensor, torch.Tensor | None, bool]]
    attributes: list[dict[str, Any]]
    optimizers: list[OptimizerSnapshot]
    distributed: list[list[dict[str, Any]]]
    others: list[Any]


@torch.no_grad()
def save_local(state: TrainedState) -> LocalSnapshot:
    """Take a snapshot of what this worker holds."""
    return LocalSnapshot(
        [(each.detach().clone(), _copy(each.grad), each.requires_grad) for each in state.tensors],
        [_plain_attributes(module) for module in state.modules],
        [_save_optimizer(optimizer) for optimizer in state.optimizers],
        [[_copy_all(options) for options in _options_of(optimizer)] for optimizer in state.distributed],
        [copy.deepcopy(each.state_dict()) for each in state.others],
    )


@torch.no_grad()
def restore_local(state: TrainedState, saved: LocalSnapshot) -> None:
    """Make the objects what they were. The state of remote parameters is left to ``cluster_snapshot``."""
    for tensor, (value, grad, requires_grad) in zip(state.tensors, saved.values, strict=True):
        if tensor.is_leaf:
            tensor.requires_grad_(requires_grad)
        tensor.detach().copy_(value)
        tensor.grad = _copy(grad)
    for module, attributes in zip(state.modules, saved.attributes, strict=True):
        for name in _plain_attributes(module).keys() - attributes.keys():
            del module.__dict__[name]
        module.__dict__.update(attributes)
    for optimizer, snapshot in zip(state.optimizers, saved.optimizers, strict=True):
        _restore_optimizer(optimizer, snapshot)
    for each, kept in zip(state.others, saved.others, strict=True):
        each.load_state_dict(copy.deepcopy(kept))
        for name in _UNFINISHED:
            if isinstance(unfinished := getattr(each, name, None), dict):
                unfinished.clear()


def local_mark(state: TrainedState) -> object:
    """Differs if what this worker holds has changed. It has the ids of tensors, and keeps none."""
    seen: list[Any] = [(id(each), each._version, id(each.grad)) for each in state.tensors if not each.is_inference()]
    seen += [_plain_attributes(module) for module in state.modules]
    for optimizer in (*state.optimizers, *state.distributed):
        seen += map(_marks, _options_of(optimizer))
        seen.append(_marks([optimizer.state.get(each) for each in _parameters_of(optimizer)]))
    seen += [_marks(each.state_dict()) for each in state.others]
    return seen


def _marks(value: Any) -> Any:
    def mark(_: Any, leaf: Any) -> Any:
        if isinstance(leaf, RemoteTensor):
            return id(leaf)
        if isinstance(leaf, torch.Tensor):
            return id(leaf), leaf._version
        return leaf

    return map_leaves(mark, value)


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if type(value) in _PLAIN}


def _options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _save_optimizer(optimizer: torch.optim.Optimizer) -> OptimizerSnapshot:
    return OptimizerSnapshot(
        [_copy_all(options) for options in _options_of(optimizer)],
        {name: value for name, value in vars(optimizer).items() if type(value) in _PLAIN},
        [_copy_all(optimizer.state[each]) if each in optimizer.state else None for each in _parameters_of(optimizer)],
    )


def _restore_optimizer(optimizer: torch.optim.Optimizer, saved: OptimizerSnapshot) -> None:
    for group, options in zip(optimizer.param_groups, saved.options, strict=True):
        for name in group.keys() - options.keys() - {"params"}:
            del group[name]
        group.update(_copy_all(options))
    vars(optimizer).update(saved.attributes)
    optimizer.state.clear()
    for parameter, kept in zip(_parameters_of(optimizer), saved.state, strict=True):
        if kept is not None:
            optimizer.state[parameter] = _copy_all(kept)


def remote_leaves(states: Sequence[Any]) -> list[RemoteTensor]:
    """The remote tensors in the state of parameters."""
    found: list[RemoteTensor] = []

    def look(_: Any, leaf: Any) -> None:
        if isinstance(leaf, RemoteTensor):
            found.append(leaf)

    map_leaves(look, list(states))
    return found


def _copy_all(value: Any) -> Any:
    """Containers of their own, with copies of tensors. Remote tensors stay: their values are saved elsewhere."""
    return map_leaves(
        lambda _, leaf: _copy(leaf) if isinstance(leaf, torch.Tensor) and not isinstance(leaf, RemoteTensor) else leaf,
        value,
    )


def _copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().clone()
