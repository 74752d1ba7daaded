"""The parameters and buffers of a module on another worker. torch's ``parameters``, ``buffers`` and their ``named_``
forms read ``_parameters`` and ``_buffers`` of every module of a model.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import nn

from backhaul._remote_tensors import on_owner
from backhaul._remote_tensors.module_gradients import ModuleGradients
from backhaul._remote_tensors.module_tensors import ModuleTensors
from backhaul._remote_tensors.on_owner import Description
from backhaul._remote_tensors.remote_tensor import RemoteTensor
from backhaul.nn.module_on_owner import ModuleOnOwner, ModuleReference
from backhaul.nn.parts import RemoteBatchNorm, find_attribute, find_registry


def set_buffer(module: nn.Module, name: str, value: Any) -> bool:
    """If ``name`` is a buffer of a module on another worker, let it take ``value`` there. Returns whether it is."""
    buffer = module.__dict__.get("_buffers", {}).get(name)
    if not isinstance(buffer, RemoteTensor) or not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter):
        return False
    buffer.data = value
    return True


class ListedTensors(ModuleOnOwner):
    """Lists the module's tensors under their names there. Asks the owner for the list when it is first needed."""

    _lists_tensors: ClassVar[bool] = True
    """Whether ``parameters`` and ``buffers`` list the tensors of the module there."""

    _tensors: ModuleTensors | None = None
    _placed: Sequence[tuple[dict[str, Any], list[Any]]] = ()
    _norms: Mapping[str, RemoteBatchNorm] = MappingProxyType({})

    @property
    def _parameters(self) -> dict[str, Any]:
        return self._list_tensors("_parameters")

    @_parameters.setter
    def _parameters(self, value: dict[str, Any]) -> None:
        self.__dict__["_parameters"] = value

    @property
    def _buffers(self) -> dict[str, Any]:
        return self._list_tensors("_buffers")

    @_buffers.setter
    def _buffers(self, value: dict[str, Any]) -> None:
        self.__dict__["_buffers"] = value

    def _list_tensors(self, name: str) -> dict[str, Any]:
        if self._lists_tensors and self._tensors is None and "module_rref" in self.__dict__:
            self._describe(self._ask_owner(on_owner.describe))
        found: dict[str, Any] = self.__dict__[name]
        return found

    def _describe(self, description: Description) -> None:
        """List the tensors of the module."""
        if description.uninitialized:
            names = ", ".join(description.uninitialized)
            raise ValueError(
                f"the module on worker '{self.on}' has parameters without a shape yet ({names}); run it once before "
                "you list its parameters"
            )
        tensors = ModuleTensors(self.module_rref, description)
        tensors.gradients.used = True  # as far as this side knows
        self.__dict__.update(_tensors=tensors, _parameters=tensors.parameters, _buffers=tensors.buffers)
        self._note_placed([self])
        self._note_layers(description)

    def _note_layers(self, description: Description) -> None:
        known, reference = self._norms, ModuleReference(self.on, self.module_rref)
        norms = {
            name: known.get(name) or RemoteBatchNorm(name, momentum, reference.ask_owner)
            for name, momentum in description.norms
        }
        self.__dict__.update(_norms=norms, _non_persistent_buffers_set=set(description.not_persistent))

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """This module, and its batch normalization layers: ``torch.optim.swa_utils.update_bn`` looks for them."""
        memo = set() if memo is None else memo
        yield from super().named_modules(memo, prefix, remove_duplicate)
        if self._lists_tensors and self._tensors is None:
            self._describe_new(self._ask_owner(on_owner.describe))
        for name, layer in self._norms.items():
            if layer not in memo:
                if remove_duplicate:
                    memo.add(layer)
                yield f"{prefix}.{name}" if prefix else name, layer

    def _describe_new(self, description: Description) -> None:
        """List the tensors of a module that was just made."""
        if self._lists_tensors and not description.uninitialized:
            self._describe(description)

    def _describe_again(self, description: Description) -> None:
        """The module there has changed: change the list if there is one."""
        if self._tensors is not None:
            self._tensors.update(description)
            self._tensors.gradients.forget()
            self._note_placed([self])
            self._note_layers(description)

    def _given(self) -> dict[str, Any]:
        """Tensors that ``torch.func.functional_call`` has put in the place of those of the module, by name."""
        for listed, tensors in self._placed:
            if len(listed) != len(tensors) or not all(map(operator.is_, listed.values(), tensors)):
                return self._find_given()
        return {}

    def _find_given(self) -> dict[str, Any]:
        assert self._tensors is not None
        own = self.__dict__["_parameters"], self.__dict__["_buffers"]
        self._check_names(name for listed in own for name in listed)
        return self._tensors.others_in("", *own)

    def _note_placed(self, modules: Iterable[nn.Module]) -> None:
        """Remember what ``modules`` list, which are this one and those that stand for modules inside it."""
        dicts = [module.__dict__[kind] for module in modules for kind in ("_parameters", "_buffers")]
        self.__dict__["_placed"] = [(each, list(each.values())) for each in dicts]

    def _check_names(self, names: Iterable[str]) -> None:
        """Raise an error if the program has deleted a tensor here."""
        if self._tensors is not None and (missing := self._tensors.missing_in(names)):
            raise RuntimeError(
                f"'{missing[0]}' was deleted here, but the module on worker '{self.on}' has it; change the module "
                "before you move it, or there with apply()"
            )

    def __setattr__(self, name: str, value: Any) -> None:
        if not set_buffer(self, name, value):
            super().__setattr__(name, value)

    def _find_tensor(self, name: str) -> Any:
        """The tensor of that name, or what stands for the submodule of that name; None if there is none."""
        if not self._lists_tensors or name.startswith("_"):
            return find_registry(name) if self._lists_tensors else None
        return find_attribute({**self._parameters, **self._buffers}, name)

    @property
    def _gradients(self) -> ModuleGradients | None:
        """What this side knows of the module's gradients; None before the parameters were listed."""
        return None if self._tensors is None else self._tensors.gradients
