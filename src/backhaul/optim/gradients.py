"""What an owner does with gradients of its parameters, be they in a context or in ``.grad``.

Each function answers None where the context never came: then its parameters have no gradients in it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import torch

from backhaul._autograd.api import find_gradients, replace_gradients
from backhaul._worker.worker import Worker, current_worker

Parameters = Sequence[torch.Tensor]
Gradients = list[torch.Tensor | None]

_attaching = threading.Lock()  # makes sure that a worker gets one turn


class Turn:
    """Attached to a worker: who holds it may use the ``.grad`` of parameters there."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


def _turn_of(worker: Worker) -> Turn:
    with _attaching:
        try:
            return worker.part(Turn)
        except KeyError:  # the first step here
            worker.attach(Turn())
            return worker.part(Turn)


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Steps of one worker run one after the other, whoever asks for them."""
    worker = current_worker()
    lock = _turn_of(worker).lock
    with worker.blocking():
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def read(parameters: Parameters, context: int | None) -> Gradients | None:
    """The gradient of each parameter, None for those without."""
    if context is None:
        return [parameter.grad for parameter in parameters]
    held = find_gradients(context)
    return None if held is None else [held.get(parameter) for parameter in parameters]


@torch.no_grad()
def _change(
    parameters: Parameters, context: int | None, change: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor] | None:
    """Put ``change(gradient)`` in the place of each gradient, and return the new ones.

    Never in place: the gradients of two leaves of a context may be one tensor.
    """
    found = read(parameters, context)
    if found is None:
        return None
    changed = {p: change(g.detach()) for p, g in zip(parameters, found, strict=True) if g is not None}
    if context is None:
        for parameter, gradient in changed.items():
            parameter.grad = gradient
    else:
        replace_gradients(context, changed)
    return list(changed.values())


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _changed(gradient: torch.Tensor, change: Callable[[torch.Tensor], object]) -> torch.Tensor:
    """A copy, with ``change`` applied in place to the elements that are stored."""
    if not gradient.is_sparse:
        copy = gradient.clone(memory_format=torch.preserve_format)
        change(copy)
    else:
        copy = gradient.coalesce().clone()
        change(copy.values())
    return copy


# What owners are asked for.


@torch.no_grad()
def norms(parameters: Parameters, context: int | None, norm_type: float) -> Gradients | None:
    """The norm of each gradient."""
    with one_at_a_time():
        found = read(parameters, context)
        if found is None:
            return None
        made = [None if g is None else torch.linalg.vector_norm(_values(g.detach()), norm_type) for g in found]
    return _to_cpu(made)


def _to_cpu(numbers: Gradients) -> Gradients:
    """The same on the CPU: a device is waited for once, not for each of them."""
    made = list(numbers)
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, number in enumerate(numbers):
        if number is not None and number.device.type != "cpu":
            alike.setdefault((number.device, number.dtype), []).append(index)
    for indices in alike.values():
        together = torch.stack([number for index in indices if (number := numbers[index]) is not None])
        for index, number in zip(indices, together.cpu().unbind(), strict=True):
            made[index] = number
    return made


def scale(parameters: Parameters, context: int | None, factor: torch.Tensor) -> bool | None:
    """Multiply all gradients."""
    with one_at_a_time():
        change = _change(parameters, context, lambda g: _changed(g, lambda values: values.mul_(factor)))
    return None if change is None else True


def clamp(parameters: Parameters, context: int | None, limit: float) -> bool | None:
    """Bring the elements of all gradients between ``-limit`` and ``limit``."""
    with one_at_a_time():
        change = _change(parameters, context, lambda g: _changed(g, lambda values: values.clamp_(-limit, limit)))
    return None if change is None else True


def unscale(parameters: Parameters, context: int | None, factor: torch.Tensor) -> tuple[int, bool] | None:
    """Multiply all gradients; answer how many there are, and whether one was infinite or not a number."""
    finite: dict[torch.device, list[torch.Tensor]] = {}  # looked at last, so that no device is waited for in between

    def multiply(gradient: torch.Tensor) -> torch.Tensor:
        if gradient.dtype is torch.float16:
            raise ValueError("gradients in float16 cannot be unscaled: keep the parameters in float32")
        finite.setdefault(gradient.device, []).append(torch.isfinite(_values(gradient)).all())
        return _changed(gradient, lambda values: values.mul_(factor))

    with one_at_a_time():
        changed = _change(parameters, context, multiply)
    if changed is None:
        return None
    return len(changed), not all(bool(torch.stack(each).all()) for each in finite.values())
