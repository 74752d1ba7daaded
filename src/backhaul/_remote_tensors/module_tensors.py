"""The parameters and buffers of a module on another worker, by name, as its driver has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from backhaul._remote_tensors import (  # what remote tensors need to work
    operations,  # noqa: F401
    patches,  # noqa: F401
)
from backhaul._remote_tensors.addresses import Address
from backhaul._remote_tensors.driven_modules import gradients_at
from backhaul._remote_tensors.on_owner import Description
from backhaul._remote_tensors.remote_parameter import RemoteParameter
from backhaul._remote_tensors.remote_tensor import RemoteTensor
from backhaul._rref.handle import RRef


class ModuleTensors:
    """The proxies of a module's tensors. They stay the same objects when the module there changes.

    Attributes:
        gradients: What is known of its gradients.
        parameters: The parameters by name. Tied parameters have several names.
        buffers: The buffers by name.
    """

    def __init__(self, container: RRef[Any], description: Description) -> None:
        self.gradients = gradients_at(container)
        self.parameters: dict[str, RemoteParameter] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        self._by_index: dict[int, RemoteParameter] = {}
        self._listed: dict[str, torch.Tensor] = {}
        self.update(description)

    @torch.inference_mode(False)  # else no graph could have the parameters later
    def update(self, description: Description) -> None:
        """Describe the module anew: names and forms may have changed."""
        known = self._by_index
        for index, (form, requires_grad) in enumerate(description.forms):
            if index in known:
                known[index].update_form(form, requires_grad)
            else:
                known[index] = RemoteParameter(self.gradients, index, form, requires_grad)
        parameters = {name: known[index] for name, index in description.parameters}
        self.parameters.clear()
        self.parameters.update(parameters)
        for index in known.keys() - {index for _, index in description.parameters}:
            del known[index]
        self.buffers.clear()
        for index, (name, form) in enumerate(description.buffers):
            buffer = RemoteTensor(Address(self.gradients.container, "buffer", index), form)
            buffer._gradients = self.gradients
            self.buffers[name] = buffer
        self._listed = {**self.parameters, **self.buffers}

    def share(self, index: int, parameter: RemoteParameter) -> None:
        """Use a proxy of another module for a parameter, because the two modules share that parameter."""
        own = self._by_index[index]
        self._by_index[index] = parameter
        self.parameters.update({name: parameter for name, each in self.parameters.items() if each is own})
        self._listed = {**self.parameters, **self.buffers}

    def others_in(self, prefix: str, *listed: Mapping[str, Any]) -> dict[str, Any]:
        """The tensors that a program has put in the place of proxies, by name.

        Args:
            prefix: What comes before the names in ``listed``.
            listed: Dicts that had proxies.
        """
        known = self._listed
        return {prefix + k: v for each in listed for k, v in each.items() if v is not known.get(prefix + k)}

    @property
    def names(self) -> Iterable[str]:
        """The names of all tensors."""
        return self._listed

    def missing_in(self, names: Iterable[str]) -> list[str]:
        """The tensors that are not among ``names``."""
        return list(self._listed.keys() - set(names))
