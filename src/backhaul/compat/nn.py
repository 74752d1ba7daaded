"""Replaces ``RemoteModule`` of ``torch.distributed.nn``. It raises the same errors for unsupported methods."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from backhaul import nn
from backhaul.compat.rpc import agent
from backhaul.compat.rpc.futures import Future, follow
from backhaul.compat.rpc.rref import RRef, adopt
from backhaul.compat.rpc.serving import positional
from backhaul.nn import owner

_REMOTE_MODULE_PICKLED_ATTRIBUTES = (
    "on",
    "device",
    "is_device_map_set",
    "is_scriptable",
    "generated_methods",
    "module_rref",
)

_UNSUPPORTED_METHODS = (
    *("add_module", "apply", "bfloat16", "buffers", "children", "cpu", "cuda", "double", "extra_repr", "float"),
    *("load_state_dict", "modules", "named_buffers", "named_children", "named_modules", "named_parameters"),
    *("register_backward_hook", "register_buffer", "register_forward_hook", "register_forward_pre_hook"),
    *("register_parameter", "requires_grad_", "share_memory", "state_dict", "to", "type", "zero_grad"),
)


_interfaces: weakref.WeakKeyDictionary[RemoteModule, type] = weakref.WeakKeyDictionary()


class RemoteModule(nn.RemoteModule):
    """A module on another worker.

    It does not support the methods that the reference does not support, although ``backhaul.nn.RemoteModule`` supports
    most of them.
    """

    _lists_tensors = False
    _carries_autocast = False

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., torch.nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        _module_interface_cls: type | None = None,
    ) -> None:
        _check_remote_device(remote_device)
        arguments = positional(args)
        try:
            super().__init__(remote_device, module_cls, arguments, kwargs, _module_interface_cls=_module_interface_cls)
        except ValueError as error:
            raise ValueError(
                f"Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, but: {error}"
            ) from error
        if _module_interface_cls is not None:
            _interfaces[self] = _module_interface_cls

    @property
    def is_device_map_set(self) -> bool:
        """Whether this worker has a device map for the module's worker. If so, results stay on their device."""
        current = agent.current()
        return bool(current._get_device_map(current.get_worker_info(self.on)))

    def _runner(self) -> str:
        return owner.RUN_IN_PLACE if self.is_device_map_set else owner.RUN

    def __prepare_scriptable__(self) -> torch.nn.Module:
        """The module that ``torch.jit.script`` compiles in place of this one. It has the methods of the interface."""
        from backhaul.jit import remote_module  # imported here because not every torch has TorchScript

        if self not in _interfaces:
            raise RuntimeError("cannot script this RemoteModule: pass _module_interface_cls when you make it")
        return remote_module(self.module_rref, _interfaces[self])

    def forward_async(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run the module on its worker; returns a future of the result."""
        return follow(super().forward_async(*args, **kwargs))

    def get_module_rref(self) -> RRef[torch.nn.Module]:
        """An RRef to the module."""
        return adopt(super().get_module_rref())

    def remote_parameters(self, recurse: bool = True) -> list[RRef[torch.nn.Parameter]]:  # type: ignore[override]
        """RRefs to the parameters of the module."""
        return [adopt(parameter) for parameter in super().remote_parameters(recurse)]

    def parameters(self, recurse: bool = True) -> NoReturn:
        """Not supported: use ``remote_parameters``."""
        raise ValueError(
            "Method ``parameters`` not supported for RemoteModule. Please use ``remote_parameters`` instead."
        )

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.__reduce_ex__(4)

    def __repr__(self) -> str:
        return f"RemoteModule(on={self.on!r}, device={self.device!r})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RuntimeError(
            "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled when using RPC"
        )


def _check_remote_device(text: str) -> None:
    """Raise the reference's errors for a text that does not name a device of a worker."""
    if not isinstance(text, str):
        return
    worker, *device = text.split("/")
    if len(device) > 1 or not worker:
        raise ValueError(
            f"Could not parse remote_device: {text}. The valid format is '<workername>/<device>' or "
            "'rank:<number>/<device>'"
        )
    for name in device:
        torch.device(name)


def _unsupported_method(name: str) -> Callable[..., NoReturn]:
    def method(self: RemoteModule, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(f"Method ``{name}`` not supported for RemoteModule")

    method.__name__ = name
    return method


for _name in _UNSUPPORTED_METHODS:
    setattr(RemoteModule, _name, _unsupported_method(_name))

_RemoteModule = RemoteModule
