"""Puts modules of a model on workers, and brings them back. See ``split`` and ``gather``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from backhaul._remote_tensors.driven_modules import send_changes
from backhaul._remote_tensors.on_owner import Description
from backhaul._rpc.api import rpc_async
from backhaul._rpc.futures import Future
from backhaul._rpc.move_progress import shown_move
from backhaul._rpc.node import Node
from backhaul._rref.handle import RRef
from backhaul._runtime.compile_marks import graph_break
from backhaul._worker.worker import current_worker
from backhaul.errors import SerializationError
from backhaul.nn import split_owner
from backhaul.nn.left_behind import leave_behind
from backhaul.nn.module_transfer import HOOKS, ModuleTransfer, pack, unpack
from backhaul.nn.remote_module import RemoteModule
from backhaul.nn.split_part import OF_EVERY_PART, make_part, share_proxies
from backhaul.nn.split_plan import MovedPart, make_plan

Model = TypeVar("Model", bound=nn.Module)


@graph_break
def split(model: Model, places: Mapping[str, str], *, timeout: float | None = None) -> Model:
    """Put modules of a model on workers. The model is changed in place, and used as before.

    Each named module moves with its weights, gradients, buffers, modes and hooks, and runs where it is from then on. A
    ``RemoteModule`` takes its place. Names, shapes and order of parameters and of the entries of ``state_dict`` stay
    those of the model. Optimizers must be made after the split.

    Everything is checked before anything moves. If an error is raised, the model is as it was.

    Args:
        model: The model.
        places: By the name of a module, as in ``named_modules``: ``"worker1"``, ``"worker1/cuda:0"`` or
            ``"rank:1/cpu"``; without a device, the CPU. Modules that share parameters must go to the same place. The
            name ``""`` moves the whole model: the result is then a ``RemoteModule``.
        timeout: Seconds that a move may take; 0: no limit; None: the worker's default.

    Returns:
        ``model``, or what replaces it if its name ``""`` is among ``places``.

    Raises:
        ValueError: A name or a place is wrong, or parts share parameters or refer to each other.
        UnknownWorkerError: There is no such worker.
        SerializationError: A module cannot be sent.

    Example:
        >>> import torch, backhaul as bh
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> with bh.cluster(2):
        ...     model = bh.nn.split(model, {"0": "worker1"})
        ...     model(torch.ones(3, 4)).sum().backward()
        ...     print(model)
        ...     model = bh.nn.gather(model)
        Sequential(
          (0): RemoteModule(Linear, on='worker1', device='cpu')
          (1): ReLU()
          (2): Linear(in_features=8, out_features=2, bias=True)
        )
        >>> model[0].weight.grad.shape
        torch.Size([8, 4])
    """
    parts = make_plan(model, places)
    by_worker: dict[str, list[MovedPart]] = {}
    for part in parts:
        by_worker.setdefault(part.home[0].name, []).append(part)
    with torch.no_grad(), shown_move(_modules(len(parts), "to"), list(by_worker), _size_of(parts)):
        sent = [(group, _send(worker, group, timeout)) for worker, group in by_worker.items()]
        made: dict[int, nn.Module] = {}
        for group, taken in sent:
            parts_there = [
                make_part(part.name, part.module, part.home[1], *each)
                for part, each in zip(group, taken.wait(), strict=True)
            ]
            share_proxies((there, part.module) for there, part in zip(parts_there, group, strict=True))
            made.update((id(part.module), there) for there, part in zip(parts_there, group, strict=True))
    for part in parts:
        leave_behind(part.module.parameters(), f"moved to worker '{part.home[0].name}' by bh.nn.split")
    return _replace(model, made)


def _modules(count: int, where: str) -> str:
    return f"moving {count} modules {where}" if count > 1 else f"moving a module {where}"


def _size_of(parts: Sequence[MovedPart]) -> int:
    """The bytes of all parameters, gradients and buffers."""
    modules = [part.module for part in parts]
    tensors = {id(each): each for module in modules for each in (*module.parameters(), *module.buffers())}
    grads = [each.grad for each in tensors.values() if each.grad is not None]
    return sum(each.numel() * each.element_size() for each in (*tensors.values(), *grads))


def _send(
    worker: str, parts: Sequence[MovedPart], timeout: float | None
) -> Future[list[tuple[RRef[nn.Module], Description]]]:
    devices = [part.home[1] for part in parts]
    transfer = pack([part.module for part in parts], to_cpu=all(device.type == "cpu" for device in devices))
    try:
        return rpc_async(worker, split_owner.take, (transfer, devices), timeout=timeout)
    except SerializationError as error:
        names = ", ".join(f"'{part.name}'" for part in parts)
        raise SerializationError(
            f"{names} cannot move to worker '{worker}': {error}", worker=worker, path=error.path, device=error.device
        ) from error


@graph_break
def gather(model: Model, *, timeout: float | None = None) -> Model:
    """Bring the modules of a model that are on other workers back. The model is changed in place.

    Each ``RemoteModule`` is replaced by the module itself, of its own class, with its current weights, gradients,
    buffers, modes and hooks. The owners drop the modules when no other ``RemoteModule`` refers to them. A model without
    remote modules stays as it is. If an error is raised, the model is as it was.

    Args:
        model: The model.
        timeout: Seconds that a move may take; 0: no limit; None: the worker's default.

    Returns:
        ``model``, or the module itself if ``model`` is a ``RemoteModule``.

    Raises:
        PeerLostError: A worker is lost, and with it the modules that it has.
        SerializationError: A module cannot be sent.

    Example:
        >>> import torch, backhaul as bh
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
        >>> with bh.cluster(3):
        ...     model = bh.nn.split(model, {"0": "worker1", "1": "worker2"})
        ...     model = bh.nn.gather(model)
        >>> model
        Sequential(
          (0): Linear(in_features=4, out_features=8, bias=True)
          (1): Linear(in_features=8, out_features=2, bias=True)
        )
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not a {type(model).__name__}")
    by_worker: dict[str, list[RemoteModule]] = {}
    for part in model.modules():
        if isinstance(part, RemoteModule):
            by_worker.setdefault(part.on, []).append(part)
    if not by_worker:
        return model
    send_changes(current_worker())  # such as gradients that zero_grad has cleared
    count = sum(map(len, by_worker.values()))
    with torch.no_grad(), shown_move(_modules(count, "from"), list(by_worker)):
        asked = [(parts, _ask(worker, parts, timeout)) for worker, parts in by_worker.items()]
        found: dict[int, nn.Module] = {}
        for parts, transfer in asked:
            for part, module in zip(parts, unpack(transfer.wait()), strict=True):
                found[id(part)] = module
    for parts in by_worker.values():
        for part in parts:
            _keep_local_changes(part, found[id(part)])
            if part._tensors is not None:
                leave_behind(part._tensors.parameters.values(), f"brought back from worker '{part.on}' by bh.nn.gather")
    return _replace(model, found)


def _ask(worker: str, parts: Sequence[RemoteModule], timeout: float | None) -> Future[ModuleTransfer]:
    client = current_worker().part(Node).client
    here = all(client.has_place_for(worker, torch.device(part.device)) for part in parts)
    references = [part.module_rref for part in parts]
    return rpc_async(worker, split_owner.give, (references, not here), timeout=timeout)


def _replace(model: Model, replacements: Mapping[int, nn.Module]) -> Model:
    """Put modules in place of those with the given ids, under all their names."""
    if (whole := replacements.get(id(model))) is not None:
        return cast(Model, whole)
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child is not None and id(child) in replacements:
                module._modules[name] = replacements[id(child)]
    return model


def _keep_local_changes(part: RemoteModule, module: nn.Module) -> None:
    """Give a module that came back the hooks and attributes that this worker has added to its ``RemoteModule``."""
    taken = {number for name in HOOKS for number in getattr(part, name)}
    renamed: dict[int, int] = {}  # ids of the owner that are taken here
    for name in HOOKS:
        ours, theirs = getattr(part, name), {}
        for number, hook in getattr(module, name).items():
            if number in taken and number not in renamed:
                renamed[number], RemovableHandle.next_id = RemovableHandle.next_id, RemovableHandle.next_id + 1
            theirs[renamed.get(number, number)] = hook
        # Hooks of this side are the outer ones. Their handles refer to this very dict.
        merged = {**ours, **theirs} if "pre" in name else {**theirs, **ours}
        ours.clear()
        ours.update(merged)
        vars(module)[name] = ours
    if module._is_full_backward_hook is None:
        module._is_full_backward_hook = part._is_full_backward_hook
    for name, value in vars(part).items():
        if name not in OF_EVERY_PART:
            setattr(module, name, value)
