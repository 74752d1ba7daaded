"""Methods of ``torch.nn.Module`` that a module on another worker cannot have: nothing is added to it here."""

from __future__ import annotations

from typing import NoReturn, Self

import torch
from torch import nn

from backhaul.nn.module_on_owner import ModuleOnOwner


class NoLocalTensors(ModuleOnOwner):
    """Raises ``ValueError``."""

    def register_buffer(self, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        """Not possible: register it where the module is made."""
        self._refuse("register_buffer")

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Not possible: register it where the module is made."""
        self._refuse("register_parameter")

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Not possible: put both modules into a module of your own."""
        self._refuse("add_module")

    def share_memory(self) -> Self:
        """Not possible."""
        self._refuse("share_memory")

    def _refuse(self, method: str) -> NoReturn:
        raise ValueError(f"{method}() is not supported by RemoteModule: the module is on worker '{self.on}'")
