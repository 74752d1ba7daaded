"""What a worker keeps of a module on another worker: its place, and a reference to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from backhaul._remote_tensors.driven_modules import send_changes
from backhaul._rref.handle import RRef
from backhaul._runtime.compile_marks import graph_break


class ModuleReference:
    """Calls functions of ``owner`` with a module. What stands for modules inside it has this, not what contains it.
    So there is no reference cycle, and the owner drops the module as soon as the program does.

    Attributes:
        on: Name of the worker that has the module.
    """

    def __init__(self, on: str, module_rref: RRef[nn.Module]) -> None:
        self.on = on
        self._module_rref = module_rref

    @graph_break
    def ask_owner(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a function with the module, on the worker that has it. Returns the result."""
        send_changes(self._module_rref._rrefs.worker)
        return self._module_rref._call_and_wait(function, args, kwargs, None)


class ModuleOnOwner(nn.Module):
    """The local side of a module on another worker. It has no tensors and no submodules.

    Attributes:
        on: Name of the worker that has the module.
        device: The module's device there.
        module_rref: A reference to the module.
    """

    on: str
    device: str
    module_rref: RRef[nn.Module]

    @graph_break
    def _ask_owner(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a function of ``owner`` with the module, on the worker that has it. Returns the result."""
        self._send_changes()
        return self.module_rref._call_and_wait(function, args, kwargs, None)

    def _send_changes(self) -> None:
        """Send changes of parameters that the owner does not know yet."""
        send_changes(self.module_rref._rrefs.worker)
