"""Runs on the owner of parameters: reads and changes their gradients, in a context or in ``.grad``.

Each function returns None if this worker never took part in the context. Its parameters then have no gradients there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType

import torch

from backhaul._autograd.api import find_gradients, replace_gradients
from backhaul._worker.worker import Worker, current_worker

Parameters = Sequence[torch.Tensor]
Gradients = list[torch.Tensor | None]

_attaching = threading.Lock()  # guards the creation of a worker's StepLock


class StepLock:
    """Attached to a worker. The thread that holds the lock may use the ``.grad`` of parameters there."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


def _step_lock_of(worker: Worker) -> StepLock:
    found: StepLock | None = worker.parts.get(StepLock)
    if found is None:
        with _attaching:
            found = worker.parts.get(StepLock) or StepLock()
            worker.attach(found)
    return found


class one_at_a_time:
    """Run the block alone: optimizer steps on one worker run one after the other, whoever requested them."""

    __slots__ = ("_lock",)

    def __enter__(self) -> None:
        worker = current_worker()
        self._lock = _step_lock_of(worker).lock
        if not self._lock.acquire(blocking=False):
            with worker.blocking():
                self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()


def read(parameters: Parameters, context: int | None) -> Gradients | None:
    """Return the gradient of each parameter, None for a parameter without one."""
    if context is None:
        return [parameter.grad for parameter in parameters]
    held = find_gradients(context)
    return None if held is None else [held.get(parameter) for parameter in parameters]


@torch.no_grad()
def _change(
    parameters: Parameters, context: int | None, change: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor] | None:
    """Replace each gradient by ``change(gradient)``, and return the new gradients.

    Never changes a gradient in place: two leaves of a context may share one gradient tensor.
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
    """Copy a gradient and apply ``change`` in place to the stored elements of the copy."""
    if not gradient.is_sparse:
        copy = gradient.clone(memory_format=torch.preserve_format)
        change(copy)
    else:
        copy = gradient.coalesce().clone()
        change(copy.values())
    return copy


# Called by the holders of optimizers.


@torch.no_grad()
def norms(parameters: Parameters, context: int | None, norm_type: float) -> Gradients | None:
    """Return the norm of each gradient."""
    with one_at_a_time():
        found = read(parameters, context)
        if found is None:
            return None
        made = [None if g is None else torch.linalg.vector_norm(_values(g.detach()), norm_type) for g in found]
    return _to_cpu(made)


def _to_cpu(numbers: Gradients) -> Gradients:
    """Copy numbers to the CPU, with one wait for each device instead of one for each number."""
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
    """Multiply all gradients by ``factor``."""
    with one_at_a_time():
        change = _change(parameters, context, lambda g: _changed(g, lambda values: values.mul_(factor)))
    return None if change is None else True


def clamp(parameters: Parameters, context: int | None, limit: float) -> bool | None:
    """Clamp the elements of all gradients to the range from ``-limit`` to ``limit``."""
    with one_at_a_time():
        change = _change(parameters, context, lambda g: _changed(g, lambda values: values.clamp_(-limit, limit)))
    return None if change is None else True


def unscale(parameters: Parameters, context: int | None, factor: torch.Tensor) -> tuple[int, bool] | None:
    """Multiply all gradients by ``factor``. Returns how many there are, and whether one of them was infinite or NaN."""
    finite: dict[torch.device, list[torch.Tensor]] = {}  # read at the end, so that the loop waits for no device

    def multiply(gradient: torch.Tensor) -> torch.Tensor:
        if gradient.dtype is torch.float16:
            raise ValueError("gradients in float16 cannot be unscaled; keep the parameters in float32")
        finite.setdefault(gradient.device, []).append(torch.isfinite(_values(gradient)).all())
        return _changed(gradient, lambda values: values.mul_(factor))

    with one_at_a_time():
        changed = _change(parameters, context, multiply)
    if changed is None:
        return None
    return len(changed), not all(bool(torch.stack(each).all()) for each in finite.values())
