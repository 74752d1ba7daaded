"""Changes of parameters that their owner makes for the workers that use them.

A worker may send the same changes in several messages, which the owner's threads serve in any order. The changes have
numbers, and the owner makes each once, in the order of the numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from backhaul._remote_tensors.addresses import travels_by_fields
from backhaul._remote_tensors.on_owner import Containers
from backhaul._rref.owner_calls import Named
from backhaul._worker.worker import blocking


@travels_by_fields
@dataclasses.dataclass(frozen=True, slots=True)
class Changes:
    """Changes of a module's parameters that belong together, by the indices of the parameters.

    Attributes:
        number: Greater than those of all earlier changes that the same worker wants.
        cleared: Their gradients become None.
        zeroed: Their gradients become zero.
        assigned: Their new gradients.
        requires_grad: Whether they require grad.
    """

    number: int
    cleared: tuple[int, ...] = ()
    zeroed: tuple[int, ...] = ()
    assigned: Mapping[int, Any] = dataclasses.field(default_factory=dict)
    requires_grad: Mapping[int, bool] = dataclasses.field(default_factory=dict)


class _Made:
    """Which changes of a module were made.

    Attributes:
        lock: The thread that holds it makes changes.
        latest: The number of the latest changes, by the worker that wants them.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.latest: dict[str, int] = {}


_made: weakref.WeakKeyDictionary[nn.Module, _Made] = weakref.WeakKeyDictionary()
_finding = threading.Lock()  # guards _made


@contextlib.contextmanager
def _made_on(module: nn.Module) -> Iterator[_Made]:
    """Which changes of a module were made. No other thread makes changes inside the block."""
    with _finding:
        made = _made.get(module)
        if made is None:
            made = _made[module] = _Made()
    if not made.lock.acquire(blocking=False):
        with blocking():
            made.lock.acquire()
    try:
        yield made
    finally:
        made.lock.release()


def _as_it_is(value: Any) -> Any:
    return value


@torch.no_grad()
def change(module: nn.Module, driver: str, changes: Sequence[Changes], find: Callable[[Any], Any] = _as_it_is) -> None:
    """Make those changes that were not made yet. Once this returns, all of them are made.

    Args:
        module: The module.
        driver: The incarnation of the worker that wants the changes.
        changes: The changes in the order of their numbers.
        find: Returns assigned gradients with tensors in place of their places.

    Raises:
        Exception: What went wrong first. The other changes are made all the same.
    """
    errors: list[Exception] = []
    with _made_on(module) as made:
        for each in changes:
            if each.number > made.latest.get(driver, -1):
                made.latest[driver] = each.number
                try:
                    _make(list(module.parameters()), each, find(dict(each.assigned)))
                except Exception as error:
                    errors.append(error)
    if errors:
        raise errors[0]


def _make(parameters: list[torch.Tensor], changes: Changes, assigned: Mapping[int, torch.Tensor]) -> None:
    for index, given in assigned.items():
        parameters[index].grad = given.to(parameters[index].device)
    for index in changes.cleared:
        parameters[index].grad = None
    for index in changes.zeroed:
        gradient = parameters[index].grad
        if gradient is not None:
            gradient.detach_() if gradient.grad_fn is not None else gradient.requires_grad_(False)
            gradient.zero_()
    for index, wanted in changes.requires_grad.items():
        parameters[index].requires_grad_(wanted)


def change_all(named: Sequence[Named], driver: str, changes: Mapping[int, Sequence[Changes]]) -> None:
    """Make changes to several modules."""
    containers = Containers(named)
    errors: list[Exception] = []
    for container, each in changes.items():
        try:
            change(containers.values[container], driver, each, containers.find_all)
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
