"""Reducers of ``DistributedDataParallel``: they use accumulation nodes in C++, where Python cannot see them."""

from __future__ import annotations

import gc

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary


class Reducers:
    """Knows the parameters of DDP modules.

    A search through all objects, once, finds the modules that exist. ``patches`` calls ``on_submodule`` when any module
    gets a submodule, which tells of the modules made later.
    """

    def __init__(self) -> None:
        self._parameters: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._searched = False

    def forget_search(self) -> None:
        """Search once more at the next question: modules may have been made that ``on_submodule`` did not see."""
        self._searched = False

    def module_of(self, leaf: torch.Tensor) -> int | None:
        """The id of the DDP module that reduces ``leaf``; None if no module does."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return None  # there are no DDP modules
        if not self._searched:
            self._searched = True
            for thing in gc.get_objects():
                if issubclass(type(thing), DistributedDataParallel):  # not isinstance: there may be dead proxies
                    self._note(thing, thing)
        found: int | None = self._parameters.get(leaf)
        return found

    def on_submodule(self, module: torch.nn.Module, name: str, submodule: torch.nn.Module | None) -> None:
        """Torch calls this when ``module`` gets a submodule."""
        if isinstance(module, DistributedDataParallel) and submodule is not None:
            self._note(module, submodule)

    def _note(self, module: torch.nn.Module, part: torch.nn.Module) -> None:
        for parameter in part.parameters():
            self._parameters[parameter] = id(module)


reducers = Reducers()
