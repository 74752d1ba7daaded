"""What a step changes, sorted by how it is saved. Sends nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from backhaul._remote_tensors.module_gradients import ModuleGradients
from backhaul._remote_tensors.remote_parameter import RemoteParameter
from backhaul._remote_tensors.remote_tensor import RemoteTensor
from backhaul._rref.handle import RRef
from backhaul.nn.remote_module import RemoteModule
from backhaul.nn.split_inner import SplitInner
from backhaul.optim.optimizer import DistributedOptimizer


class TrainedState:
    """The state that a program has named. It refers to the objects of the program, and holds no state itself.

    Attributes:
        given: The objects that the program has named.
        modules: The modules of this worker, and what stands for modules of others.
        remote: What stands for modules of other workers.
        references: References to modules of other workers, by worker; each once.
        loose: References to tensors of other workers, by worker; each once.
        tensors: The parameters and buffers of this worker, each once.
        optimizers: Optimizers of torch, and those like them.
        distributed: Distributed optimizers.
        others: Other objects that have ``state_dict`` and ``load_state_dict``.
    """

    def __init__(self, given: Sequence[Any]) -> None:
        self.given = given
        self.modules: list[nn.Module] = []
        self.remote: list[RemoteModule] = []
        self.references: dict[str, list[RRef[Any]]] = {}
        self.loose: dict[str, list[RRef[Any]]] = {}
        self.optimizers: list[torch.optim.Optimizer] = []
        self.distributed: list[DistributedOptimizer] = []
        self.others: list[Any] = []
        self._tensors: dict[int, torch.Tensor] = {}
        self._seen: set[int] = set()
        for value in given:
            self._sort(value)
        self._check_parameters()
        self.tensors = list(self._tensors.values())

    @property
    def workers(self) -> list[str]:
        """The names of the other workers that have a part of the state."""
        return list(dict.fromkeys((*self.references, *self.loose)))

    def references_to(self, worker: str) -> tuple[list[RRef[Any]], list[RRef[Any]]]:
        """The references to modules and to tensors of a worker."""
        return self.references.get(worker, []), self.loose.get(worker, [])

    def _sort(self, value: Any) -> None:
        if isinstance(value, nn.Module):
            for module in value.modules():
                self._add_module(module)
        elif isinstance(value, RRef):
            self._add_reference(value, self.references)
        elif isinstance(value, DistributedOptimizer):
            if self._is_new(value):
                self.distributed.append(value)
                for rref in _parameters_of(value):
                    self._add_reference(rref, self.loose)
        elif isinstance(value, torch.optim.Optimizer):
            if self._is_new(value):
                self.optimizers.append(value)
                self._add_tensors(each for each in _parameters_of(value) if not isinstance(each, RemoteTensor))
        elif callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
            if self._is_new(value):
                self.others.append(value)
        else:
            raise TypeError(
                f"`state` has a {type(value).__name__}, which cannot be saved; pass modules, references to modules, "
                "optimizers, schedulers, and objects with state_dict() and load_state_dict()"
            )

    def _is_new(self, value: object) -> bool:
        new = id(value) not in self._seen
        self._seen.add(id(value))
        return new

    def _add_module(self, module: nn.Module) -> None:
        if not self._is_new(module):
            return
        self.modules.append(module)
        if isinstance(module, RemoteModule):
            self.remote.append(module)
            self._add_reference(module.module_rref, self.references)
            if module._lists_tensors and (module._parameters is not None) and module._gradients is not None:
                self._add_reference(module._gradients.container, self.references)
        elif not isinstance(module, SplitInner):
            self._add_tensors(module._parameters.values())
            self._add_tensors(module._buffers.values())
            for value in vars(module).values():
                if isinstance(value, RRef) and not value.is_owner():
                    self._add_reference(value, self.references)

    def _add_reference(self, rref: RRef[Any], to: dict[str, list[RRef[Any]]]) -> None:
        if rref.is_owner():
            value = rref.local_value()
            if isinstance(value, torch.Tensor):
                self._add_tensors([value])
            else:
                self._sort(value)
        elif self._is_new(rref):
            to.setdefault(rref.owner_name(), []).append(rref)

    def _add_tensors(self, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, RemoteTensor):
                self._tensors.setdefault(id(tensor), tensor)

    def _check_parameters(self) -> None:
        """Raise an error if an optimizer has parameters of a module that nothing here would make again."""
        known: set[ModuleGradients | None] = {module._gradients for module in self.remote}
        for optimizer in self.optimizers:
            for parameter in _parameters_of(optimizer):
                if isinstance(parameter, RemoteParameter) and parameter._gradients not in known:
                    raise ValueError(
                        f"the {type(optimizer).__name__} in `state` has a parameter of worker "
                        f"'{parameter.owner_name()}' whose module is not in `state`; pass the model too"
                    )


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [each for group in optimizer.param_groups for each in group["params"]]
