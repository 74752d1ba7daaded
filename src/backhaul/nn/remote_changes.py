"""Methods of ``torch.nn.Module`` that change the module: they run on its owner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn

from backhaul.nn import owner
from backhaul.nn.listed_tensors import ListedTensors


class RemoteChanges(ListedTensors):
    """Changes the module on its owner. Once a method returns, the module there has changed."""

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the module. ``training`` tells the mode that this side has last set or seen."""
        if not isinstance(mode, bool):
            raise ValueError(f"mode must be a bool, not a {type(mode).__name__}")
        self._ask_owner(owner.train, mode)
        self.__dict__["training"] = mode
        return self

    @property
    def training(self) -> bool:
        """Whether the module is in training mode. Setting it, as frameworks do after an evaluation, sets the modes of
        all modules inside it back to what they were before the last ``train`` or ``eval``.
        """
        found: bool = self.__dict__["training"]
        return found

    @training.setter
    def training(self, mode: bool) -> None:
        known = self.__dict__.get("training")
        if "module_rref" in self.__dict__ and mode != known:
            self._note_modes(self._ask_owner(owner.restore_mode, mode))
        self.__dict__["training"] = mode

    def _note_modes(self, modes: list[bool]) -> None:
        """The modes of the module and of all that is inside it."""

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Set ``requires_grad`` of all parameters of the module."""
        return self._change("requires_grad_", requires_grad)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear ``.grad`` of the module's parameters. Gradients in contexts stay."""
        self._change("zero_grad", set_to_none)

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Call ``fn`` with the module and each of its submodules, on the owner."""
        return self._change("apply", fn)

    def _change(self, method: str, *args: Any) -> Self:
        self._keep_replaced()
        self._describe_again(self._ask_owner(owner.change, method, args, {}))
        return self

    def _keep_replaced(self) -> None:
        """Proxies that the program has kept stay what they are, although the module gets other tensors."""
        if self._gradients is not None:
            self._gradients.keep("gradient", "parameter", "buffer")

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move the module to another device of its worker, or to another dtype, as ``torch.nn.Module.to`` does."""
        device = torch._C._nn._parse_to(*args, **kwargs)[0]
        return self._convert("to", *args, known=device, **kwargs)

    def cuda(self, device: int | torch.device | None = None) -> Self:
        """Move the module to a GPU of its worker."""
        known = torch.device("cuda", device) if isinstance(device, int) else device or torch.device("cuda")
        return self._convert("cuda", device, known=known)

    def cpu(self) -> Self:
        """Move the module to the CPU of its worker."""
        return self._convert("cpu", known=torch.device("cpu"))

    def to_empty(self, *, device: int | str | torch.device | None, recurse: bool = True) -> Self:
        """Give the module uninitialized memory on a device of its worker. A module on ``meta`` needs this."""
        return self._convert("to_empty", known=None if device is None else torch.device(device), device=device)

    def type(self, dst_type: torch.dtype | str) -> Self:
        """Convert all parameters and buffers to a type."""
        return self._convert("type", dst_type)

    def float(self) -> Self:
        """Convert floating point parameters and buffers to ``float``."""
        return self._convert("float")

    def double(self) -> Self:
        """Convert floating point parameters and buffers to ``double``."""
        return self._convert("double")

    def half(self) -> Self:
        """Convert floating point parameters and buffers to ``half``."""
        return self._convert("half")

    def bfloat16(self) -> Self:
        """Convert floating point parameters and buffers to ``bfloat16``."""
        return self._convert("bfloat16")

    def _convert(self, method: str, *args: Any, known: torch.device | None = None, **kwargs: Any) -> Self:
        self._keep_replaced()
        device = known or torch.device(self.device)
        place, description = self._ask_owner(owner.convert, device, method, args, kwargs)
        self.device = str(place)
        self._describe_again(description)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Called by torch when it moves or converts a module that contains this one. The devices are those of this
        worker, so the module on its owner stays as it is.
        """
        return self
