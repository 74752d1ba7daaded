"""Reducers of ``DistributedDataParallel``: they use accumulation nodes in C++, where Python cannot see them."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from backhaul.errors import BackhaulError

_TWICE = "mark a variable ready only once"  # in torch's text, for a parameter that it has taken for unused


class Reducers:
    """Knows the parameters of DDP modules.

    A search through all objects, once, finds the modules that exist. ``patches`` calls ``on_submodule`` when any module
    gets a submodule, which tells of the modules made later.
    """

    def __init__(self) -> None:
        self._parameters: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._modules: weakref.WeakValueDictionary[int, DistributedDataParallel] = weakref.WeakValueDictionary()
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

    @contextlib.contextmanager
    def explaining(self, leaves: Sequence[torch.Tensor]) -> Iterator[None]:
        """In the block accumulation nodes run, in a pass over workers. Say what is wrong where a DDP module, which
        knows only the graph of this worker, cannot.
        """
        try:
            yield
        except RuntimeError as error:
            if _TWICE not in str(error) or not any(map(self._finds_unused, leaves)):
                raise
            raise BackhaulError(
                "DistributedDataParallel(find_unused_parameters=True) cannot take part in a backward pass over workers "
                "with parameters in front of a call: it looks for them in the graph of this worker only, and takes them"
                " for unused; make it without find_unused_parameters"
            ) from error

    def _finds_unused(self, leaf: torch.Tensor) -> bool:
        number = self.module_of(leaf)
        module = None if number is None else self._modules.get(number)
        return module is not None and module.find_unused_parameters

    def on_submodule(self, module: torch.nn.Module, name: str, submodule: torch.nn.Module | None) -> None:
        """Torch calls this when ``module`` gets a submodule."""
        if isinstance(module, DistributedDataParallel) and submodule is not None:
            self._note(module, submodule)

    def _note(self, module: torch.nn.Module, part: torch.nn.Module) -> None:
        self._modules[id(module)] = module  # type: ignore[assignment]
        for parameter in part.parameters():
            self._parameters[parameter] = id(module)


reducers = Reducers()
