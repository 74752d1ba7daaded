"""Loss scaling for mixed precision. Small gradients survive, and all workers take the same decision on each step."""

from __future__ import annotations

import enum
import math
from typing import Any, TypeVar

import torch

from backhaul._runtime.compile_marks import graph_break
from backhaul.optim import gradients
from backhaul.optim.optimizer import DistributedOptimizer
from backhaul.optim.owners import check_context

Outputs = TypeVar("Outputs", torch.Tensor, list[torch.Tensor], tuple[torch.Tensor, ...])


class _Stage(enum.Enum):
    UNSCALED = enum.auto()
    STEPPED = enum.auto()


class GradScaler:
    """Scales losses, and skips a step on all workers if any gradient on any worker is infinite or NaN.

    It follows the rules of ``torch.amp.GradScaler``, and the two can load each other's state: the scale shrinks after a
    skipped step, and grows after ``growth_interval`` steps in a row that were not skipped.

    Args:
        init_scale: The first scale.
        growth_factor: The factor by which the scale grows; more than 1.
        backoff_factor: The factor by which the scale shrinks; between 0 and 1.
        growth_interval: The scale grows after this many steps in a row.
        enabled: If False, the scaler changes no loss and skips no step.

    Example:
        >>> import torch, backhaul as bh
        >>> with bh.cluster(2):
        ...     weight = bh.remote("worker1", torch.ones, args=(2,), kwargs={"requires_grad": True})
        ...     optimizer = bh.optim.DistributedOptimizer(torch.optim.SGD, [weight], lr=0.5)
        ...     scaler = bh.optim.GradScaler(init_scale=1024.0)
        ...     with bh.context() as ctx:
        ...         bh.backward(ctx, [scaler.scale(weight.rpc_sync().sum())])
        ...         scaler.step(optimizer, ctx)
        ...         scaler.update()
        ...     weight.to_here().detach()
        True
        tensor([0.5000, 0.5000])
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        if enabled and growth_factor <= 1.0:
            raise ValueError(f"growth_factor must be more than 1, got {growth_factor}")
        if enabled and not 0.0 < backoff_factor < 1.0:
            raise ValueError(f"backoff_factor must be between 0 and 1, got {backoff_factor}")
        self._scale = _single(init_scale)
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._growth_tracker = 0
        self._enabled = enabled
        self._stages: dict[DistributedOptimizer, _Stage] = {}  # since the last update
        self._found_inf: dict[DistributedOptimizer, bool] = {}

    @graph_break
    def scale(self, outputs: Outputs) -> Outputs:
        """Multiply a loss, or each of several losses, by the scale."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, torch.Tensor):
            return outputs * torch.tensor(self._scale, dtype=torch.float32, device=outputs.device)
        return type(outputs)(self.scale(output) for output in outputs)

    @graph_break
    def unscale_(self, optimizer: DistributedOptimizer, context_id: int | None = None) -> None:
        """Divide the gradients of an optimizer by the scale, on their owners. ``step`` calls this if you have not.

        Args:
            optimizer: The optimizer of the parameters.
            context_id: The context that holds the gradients. None: the gradients are in ``.grad``.

        Raises:
            RuntimeError: The gradients are already unscaled, or there are none.
        """
        if not self._enabled:
            return
        if optimizer in self._stages:
            done = "unscaled" if self._stages[optimizer] is _Stage.UNSCALED else "stepped with"
            raise RuntimeError(f"the gradients of this optimizer were already {done}; call update() first")
        factor = torch.tensor(1.0 / self._scale, dtype=torch.float32)
        answers = [answer for _, answer in optimizer.ask("unscaling gradients", gradients.unscale, context_id, factor)]
        check_context(context_id, answers)
        if not sum(count for count, _ in filter(None, answers)):
            raise RuntimeError("no parameter of this optimizer has a gradient; run backward on this context first")
        self._found_inf[optimizer] = any(found for _, found in filter(None, answers))
        self._stages[optimizer] = _Stage.UNSCALED

    @graph_break
    def step(self, optimizer: DistributedOptimizer, context_id: int | None = None) -> bool:
        """Step on all workers, or on none if any gradient on any worker is infinite or NaN.

        Args:
            optimizer: The optimizer to step.
            context_id: The context that holds the gradients. None: the gradients are in ``.grad``.

        Returns:
            True if the workers stepped, False if the step was skipped.
        """
        if not self._enabled:
            optimizer.step(context_id)
            return True
        if self._stages.get(optimizer) is _Stage.STEPPED:
            raise RuntimeError("this optimizer has already stepped; call update() first")
        if optimizer not in self._stages:
            self.unscale_(optimizer, context_id)
        skip = self._found_inf[optimizer]
        if not skip:
            optimizer.step(context_id)
        self._stages[optimizer] = _Stage.STEPPED
        return not skip

    @graph_break
    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adapt the scale after all optimizers have stepped, or set it to ``new_scale``."""
        if not self._enabled:
            return
        if new_scale is not None:
            self._scale = _single(float(new_scale))
        elif not self._found_inf:
            raise RuntimeError("no optimizer was unscaled or stepped since the last update(); call step() first")
        elif any(self._found_inf.values()):
            self._scale = _single(self._scale * self._backoff_factor)
            self._growth_tracker = 0
        else:
            self._growth_tracker += 1
            if self._growth_tracker == self._growth_interval:
                grown = _single(self._scale * self._growth_factor)
                self._scale = grown if math.isfinite(grown) else self._scale
                self._growth_tracker = 0
        self._stages.clear()
        self._found_inf.clear()

    def get_scale(self) -> float:
        """Return the current scale; 1 if the scaler is disabled."""
        return self._scale if self._enabled else 1.0

    def is_enabled(self) -> bool:
        """Return whether the scaler is enabled."""
        return self._enabled

    def state_dict(self) -> dict[str, Any]:
        """Return the state, in the format of ``torch.amp.GradScaler``; empty if the scaler is disabled."""
        if not self._enabled:
            return {}
        return {
            "scale": self._scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._growth_tracker,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of another scaler, a ``bh.optim.GradScaler`` or a ``torch.amp.GradScaler``."""
        if not self._enabled:
            return
        if not state_dict:
            raise RuntimeError("the state is empty because it was saved by a disabled scaler")
        self._scale = _single(state_dict["scale"])
        self._growth_factor = state_dict["growth_factor"]
        self._backoff_factor = state_dict["backoff_factor"]
        self._growth_interval = state_dict["growth_interval"]
        self._growth_tracker = state_dict["_growth_tracker"]


def _single(value: float) -> float:
    """Round to float32, the precision in which torch keeps scales."""
    return torch.tensor(value, dtype=torch.float32).item()
