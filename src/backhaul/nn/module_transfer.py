"""Modules that travel by value, with all that pickle drops of them. Sender and receiver use these functions.

Pickle keeps classes, attributes, hooks of modules, modes, buffers, ``requires_grad``, and which tensors are one. It
drops gradients and hooks of parameters. A ``ModuleTransfer`` carries these beside the modules.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

HOOKS = tuple(name for name in nn.Module().__dict__ if "hooks" in name)
"""The attributes in which a module keeps its hooks, by the ids of the hooks."""

Hook = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class ModuleTransfer:
    """Modules and what pickle drops of them.

    Attributes:
        modules: The modules. Tensors and submodules that they share stay shared.
        grads: Parameters with their gradients.
        hooks: Parameters with their hooks: those for the gradient, and those that run after its accumulation.
    """

    modules: list[nn.Module]
    grads: list[tuple[torch.Tensor, torch.Tensor]]
    hooks: list[tuple[torch.Tensor, list[Hook], list[Hook]]]


def pack(modules: Sequence[nn.Module], *, to_cpu: bool = False) -> ModuleTransfer:
    """Prepare modules for a message. The message must be sent under ``no_grad``.

    Args:
        modules: The modules. They stay as they are.
        to_cpu: Send copies on the CPU of tensors on other devices.
    """
    grads, hooks = [], []
    for parameter in _unique(parameter for part in _parts(modules) for parameter in part._parameters.values()):
        if parameter.grad is not None:
            grads.append((parameter, parameter.grad.detach()))
        before, after = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
        if before or after:
            hooks.append((parameter, list((before or {}).values()), list((after or {}).values())))
    transfer = ModuleTransfer(list(modules), grads, hooks)
    tensors = _unique([*_tensors(modules), *(grad for _, grad in grads)])
    if to_cpu and any(tensor.device.type not in ("cpu", "meta") for tensor in tensors):
        return copy.deepcopy(transfer, {id(tensor): _copy_on_cpu(tensor) for tensor in tensors})
    return transfer


def unpack(transfer: ModuleTransfer) -> list[nn.Module]:
    """The modules of a message, on memory of their own. The tensors of a message may be on shared memory of its sender,
    who cannot use that memory for other messages as long as they live.
    """
    sharing: dict[int, list[torch.Tensor]] = {}  # by the address of the memory
    for tensor in _unique([*_tensors(transfer.modules), *(grad for _, grad in transfer.grads)]):
        if _is_ordinary(tensor):
            sharing.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    for tensors in sharing.values():
        memory = tensors[0].untyped_storage().clone()
        for tensor in tensors:
            alone = torch.empty(0, dtype=tensor.dtype)
            tensor.data = alone.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())
    for parameter, grad in transfer.grads:
        parameter.grad = grad
    for parameter, before, after in transfer.hooks:
        for hook in before:
            parameter.register_hook(hook)
        for hook in after:
            parameter.register_post_accumulate_grad_hook(hook)
    # The hooks of modules have ids of the sender. A hook that is registered later must not get the same id.
    ids = (number for part in _parts(transfer.modules) for name in HOOKS for number in getattr(part, name))
    RemovableHandle.next_id = max(RemovableHandle.next_id, 1 + max(ids, default=-1))
    return transfer.modules


def _parts(modules: Sequence[nn.Module]) -> Iterator[nn.Module]:
    return itertools.chain.from_iterable(module.modules() for module in modules)


def _tensors(modules: Sequence[nn.Module]) -> Iterator[Any]:
    """Parameters, buffers, and attributes that are tensors."""
    for part in _parts(modules):
        for values in (part._parameters, part._buffers, vars(part)):
            yield from values.values()


def _unique(values: Iterable[Any]) -> list[torch.Tensor]:
    return list({id(value): value for value in values if isinstance(value, torch.Tensor)}.values())


def _is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether the tensor is an array in the memory of the CPU, and no part of a graph."""
    return (
        type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_nested)
        and tensor.is_leaf
        and tensor.numel() > 0
    )


def _copy_on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    made = tensor.detach().cpu()
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, tensor.requires_grad)
    made.__dict__.update(tensor.__dict__)
    return made
