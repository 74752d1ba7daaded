"""An owner's share of a distributed optimizer: a plain ``torch.optim`` optimizer over the parameters of that worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from backhaul._rpc.calls.served_call import reply_as_it_is
from backhaul._rref.handle import RRef
from backhaul.optim.gradients import one_at_a_time, read

Options = dict[str, Any]
"""The options of a parameter group: learning rate, betas, ..."""

Group = tuple[Options, list[RRef[Any]]]
"""The options of a group, and those of its parameters that live on one worker."""


Made = tuple[RRef["Local"], Options, list[Options]]
"""An owner's share, the defaults of its optimizer, and the completed options of the groups that were added."""


def make(optimizer_class: Any, args: Any, kwargs: Any, groups: Sequence[Group]) -> Made:
    """Create an optimizer on this worker."""
    local = Local(optimizer_class([_torch_group(*group) for group in groups], *args, **kwargs))
    return RRef(local), local.optimizer.defaults, local.options()


def add(share: RRef[Local], groups: Sequence[Group]) -> Made:
    """Add groups to an optimizer on this worker."""
    local = share.local_value()
    with one_at_a_time():
        for group in groups:
            local.optimizer.add_param_group(_torch_group(*group))
        return share, local.optimizer.defaults, local.options()[-len(groups) :]


def _torch_group(options: Options, rrefs: Sequence[RRef[Any]]) -> dict[str, Any]:
    return {**options, "params": [rref.local_value() for rref in rrefs]}


class Local:
    """One owner's share. Its methods never run at the same time as another optimizer step of the worker."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def parameters(self) -> list[torch.Tensor]:
        """All parameters of this share, in the order of the groups."""
        groups = self.optimizer.param_groups
        return groups[0]["params"] if len(groups) == 1 else [each for group in groups for each in group["params"]]

    def options(self) -> list[Options]:
        """Return the options of each group."""
        return [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]

    def keep_groups(self, count: int) -> None:
        """Remove all groups after the first ``count``."""
        with one_at_a_time():
            del self.optimizer.param_groups[count:]

    def apply(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call ``function(parameters, *args)``."""
        return function(self.parameters, *args)

    def _set_options(self, changes: Sequence[Options]) -> None:
        for group, change in zip(self.optimizer.param_groups, changes, strict=False):
            group.update(change)

    def step(self, context: int | None, changes: Sequence[Options] = ()) -> bool | None:
        """Step with the gradients of a context, or with ``.grad``. None if this worker is not part of the context."""
        with one_at_a_time():
            self._set_options(changes)
            if context is None:
                self.optimizer.step()
                return True
            parameters = self.parameters
            gradients = read(parameters, context)
            before = [parameter.grad for parameter in parameters]
            try:
                for parameter, gradient in zip(parameters, gradients or [None] * len(parameters), strict=True):
                    parameter.grad = gradient
                self.optimizer.step()
            finally:
                for parameter, grad in zip(parameters, before, strict=True):
                    parameter.grad = grad
            return None if gradients is None else True

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear ``.grad``."""
        with one_at_a_time():
            self.optimizer.zero_grad(set_to_none)

    def state_dict(self, changes: Sequence[Options] = ()) -> dict[str, Any]:
        """Return the optimizer's state, copied to the CPU because the caller may lack this worker's devices."""
        reply_as_it_is()
        with one_at_a_time():
            self._set_options(changes)
            state: dict[str, Any] = pytree.tree_map_only(torch.Tensor, _to_cpu, self.optimizer.state_dict())
            return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state into the optimizer."""
        with one_at_a_time():
            self.optimizer.load_state_dict(dict(state))


def _to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu()
