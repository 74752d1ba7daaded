"""What workers that own modules do for a worker that makes steps with them: they save the modules, and make them anew.

[Note: new objects] A restore never changes a module. It makes new ones, also on workers that were not lost. Calls and
gradients of a failed try may still be on their way, or run. They name the old modules, which nothing else refers to
any more, so they change nothing that counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from backhaul._recovery.random_state import PROCESS, RandomState
from backhaul._remote_tensors.on_owner import Description, describe
from backhaul._rpc.calls.served_call import reply_as_it_is
from backhaul._rref.handle import RRef
from backhaul._worker.worker import current_worker
from backhaul.nn.module_transfer import ModuleTransfer, pack, unpack

Note = int
"""Names what a worker has noted of its state, to see later whether it has changed."""

NO_NOTE: Note = -1
_MAX_NOTES = 64  # a worker forgets older ones; a state without a note counts as changed


class StateNotes:
    """Attached to a worker: what it has noted."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._kept: dict[Note, int] = {}

    def add(self, checksum: int) -> Note:
        """Note a state."""
        number = next(self._numbers)
        self._kept[number] = checksum
        while len(self._kept) > _MAX_NOTES:
            del self._kept[next(iter(self._kept))]
        return number

    def is_same(self, number: Note, checksum: int) -> bool:
        """Whether a state is the one that was noted."""
        return self._kept.get(number) == checksum


def _notes() -> StateNotes:
    worker = current_worker()
    found: StateNotes | None = worker.parts.get(StateNotes)
    if found is None:
        found = StateNotes()
        worker.attach(found)
    return found


@dataclass(frozen=True, slots=True)
class OwnerSnapshot:
    """The state of one worker.

    Attributes:
        transfer: The modules. The last one holds the tensors that were named by themselves.
        devices: The device of each module but the last, and of each such tensor.
        random: The random numbers to come.
    """

    transfer: ModuleTransfer
    devices: list[torch.device]
    random: RandomState


@dataclass(frozen=True, slots=True)
class Installed:
    """What has taken the place of the modules of a worker.

    Attributes:
        incarnation: The worker.
        references: To the modules, then to the tensors.
        descriptions: Of the modules.
        note: Of the new state.
    """

    incarnation: str
    references: list[RRef[Any]]
    descriptions: list[Description]
    note: Note


def save(modules: Sequence[RRef[Any]], tensors: Sequence[RRef[Any]], process: str) -> tuple[OwnerSnapshot, Note, str]:
    """The state of this worker, a note of it, and the incarnation.

    Args:
        modules: References to modules.
        tensors: References to tensors, which may be those of the modules.
        process: The process of the caller.
    """
    reply_as_it_is()
    found, loose = [each.local_value() for each in modules], [each.local_value() for each in tensors]
    for value in found:
        if not isinstance(value, nn.Module):
            raise TypeError(
                f"a reference in `state` is to a {type(value).__name__} on worker '{current_worker().name}'; only "
                "modules can be saved and made again on another worker"
            )
    _refuse_references(found)
    devices = [_device_of(module) for module in found] + [tensor.device for tensor in loose]
    transfer = pack([*found, _holder(loose)], to_cpu=True)
    snapshot = OwnerSnapshot(transfer, devices, RandomState.now())
    return snapshot, _notes().add(_checksum(found, loose, process)), current_worker().incarnation


def note(modules: Sequence[RRef[Any]], tensors: Sequence[RRef[Any]], process: str) -> Note:
    """Note the state of this worker; see ``save``."""
    return _notes().add(_checksum_of(modules, tensors, process))


def is_same(modules: Sequence[RRef[Any]], tensors: Sequence[RRef[Any]], process: str, number: Note) -> bool:
    """Whether the state of this worker is the one that was noted; see ``save``."""
    return _notes().is_same(number, _checksum_of(modules, tensors, process))


def _checksum_of(modules: Sequence[RRef[Any]], tensors: Sequence[RRef[Any]], process: str) -> int:
    return _checksum([each.local_value() for each in modules], [each.local_value() for each in tensors], process)


def install(snapshot: OwnerSnapshot, restore: Callable[[], Any] | None, known: str, process: str) -> Installed:
    """Make the modules and tensors of a snapshot. ``restore`` is called first, unless this is the worker ``known``."""
    incarnation = current_worker().incarnation
    if restore is not None and incarnation != known:
        restore()
    *modules, holder = unpack(snapshot.transfer)
    for module, device in zip(modules, snapshot.devices, strict=False):
        module.to(device)
    loose: list[Any] = list(holder._parameters.values())
    for tensor, device in zip(loose, snapshot.devices[len(modules) :], strict=True):
        if tensor.device != device:
            tensor.data = tensor.data.to(device)
            if tensor.grad is not None:
                tensor.grad = tensor.grad.to(device)
    snapshot.random.put_back()
    return Installed(
        incarnation,
        [RRef(value) for value in (*modules, *loose)],
        [describe(module) for module in modules],
        _notes().add(_checksum(modules, loose, process)),
    )


def _holder(tensors: Sequence[Any]) -> nn.Module:
    """A module that holds tensors, so that they travel with the modules that have them."""
    made = nn.Module()
    made._parameters.update({str(index): tensor for index, tensor in enumerate(tensors)})
    return made


def _device_of(module: nn.Module) -> torch.device:
    return next((tensor.device for tensor in _tensors_of(module)), torch.device("cpu"))


def _tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _checksum(modules: Sequence[nn.Module], tensors: Sequence[torch.Tensor], process: str) -> int:
    """Differs if the state has changed. It is of use in this process only."""
    seen: list[Any] = []
    for module in modules:
        seen += [part.training for part in module.modules()]
        seen += [_version_of(tensor) for tensor in _tensors_of(module)]
    seen += map(_version_of, tensors)
    if process != PROCESS:  # the caller sees to the random numbers of its own process
        seen.append(RandomState.now().checksum())
    return hash(tuple(seen))


def _version_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    own = id(tensor), tensor.requires_grad, 0 if tensor.is_inference() else tensor._version
    grad = tensor.grad if tensor.is_leaf else None
    return own if grad is None else (*own, id(grad), 0 if grad.is_inference() else grad._version)


def _refuse_references(modules: Sequence[nn.Module]) -> None:
    for module in modules:
        for path, part in module.named_modules():
            found = next((value for value in vars(part).values() if isinstance(value, RRef)), None)
            if found is not None:
                raise ValueError(
                    f"the {type(module).__name__} on worker '{current_worker().name}' refers to worker "
                    f"'{found.owner_name()}' (in '{path}'): such a module cannot be made again; let the worker that "
                    "trains call both"
                )
