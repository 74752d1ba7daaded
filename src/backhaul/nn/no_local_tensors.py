"""Methods of ``torch.nn.Module`` that a module on another worker cannot have: it has no tensors here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn, Self

import torch
from torch import nn

from backhaul.nn.module_on_owner import ModuleOnOwner


class NoLocalTensors(ModuleOnOwner):
    """Raises ``ValueError`` and names what to use instead. With ``recurse=False`` there are no tensors, and no error:
    code that walks over all modules of a model asks each of them like that.
    """

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Not possible: use ``remote_parameters``."""
        return self._no_tensors("parameters", recurse)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Not possible: use ``remote_parameters``."""
        return self._no_tensors("named_parameters", recurse)

    def buffers(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        """Not possible: use ``state_dict`` for a copy."""
        return self._no_tensors("buffers", recurse)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Not possible: use ``state_dict`` for a copy."""
        return self._no_tensors("named_buffers", recurse)

    def _no_tensors(self, method: str, recurse: bool) -> Iterator[Any]:
        if recurse:
            raise ValueError(
                f"{method}() is not supported by RemoteModule: its tensors are on worker '{self.on}'; use "
                "remote_parameters() for references to its parameters, or state_dict() for a copy of all"
            )
        return iter(())

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
