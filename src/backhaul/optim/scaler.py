"""Scaling of losses for mixed precision, so that small gradients survive, with one decision for all workers."""

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
    """Scales losses, and skips a step on all workers if a gradient on any of them is infinite or not a number.

    The rules are those of ``torch.amp.GradScaler``, with which states can be exchanged: after a skipped step the scale
    shrinks, after ``growth_interval`` steps without one it grows.

    Args:
        init_scale: The scale at the beginning.
        growth_factor: By what it grows, more than 1.
        backoff_factor: By what it shrinks, less than 1.
        growth_interval: After how many steps in a row it grows.
        enabled: If False, losses stay as they are and every step is made.

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
        """Multiply a loss, or each of several."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, torch.Tensor):
            return outputs * torch.tensor(self._scale, dtype=torch.float32, device=outputs.device)
        return type(outputs)(self.scale(output) for output in outputs)

    @graph_break
    def unscale_(self, optimizer: DistributedOptimizer, context_id: int | None = None) -> None:
        """Divide the gradients of an optimizer by the scale, where they are. ``step`` does it if you do not.

        Args:
            optimizer: Whose parameters' gradients.
            context_id: The context that holds them; None: they are in ``.grad``.

        Raises:
            RuntimeError: They are unscaled already, or there are none.
        """
        if not self._enabled:
            return
        if optimizer in self._stages:
            done = "unscaled" if self._stages[optimizer] is _Stage.UNSCALED else "stepped with"
            raise RuntimeError(f"the gradients of this optimizer were {done} already: call update() first")
        factor = torch.tensor(1.0 / self._scale, dtype=torch.float32)
        answers = [answer for _, answer in optimizer.ask("unscaling gradients", gradients.unscale, context_id, factor)]
        check_context(context_id, answers)
        if not sum(count for count, _ in filter(None, answers)):
            raise RuntimeError("no parameter of this optimizer has a gradient: was backward run on this context?")
        self._found_inf[optimizer] = any(found for _, found in filter(None, answers))
        self._stages[optimizer] = _Stage.UNSCALED

    @graph_break
    def step(self, optimizer: DistributedOptimizer, context_id: int | None = None) -> bool:
        """Step on all workers, or on none if a gradient on any of them is infinite or not a number.

        Args:
            optimizer: What steps.
            context_id: The context that holds its gradients; None: they are in ``.grad``.

        Returns:
            Whether the step was made.
        """
        if not self._enabled:
            optimizer.step(context_id)
            return True
        if self._stages.get(optimizer) is _Stage.STEPPED:
            raise RuntimeError("this optimizer has stepped already: call update() first")
        if optimizer not in self._stages:
            self.unscale_(optimizer, context_id)
        skip = self._found_inf[optimizer]
        if not skip:
            optimizer.step(context_id)
        self._stages[optimizer] = _Stage.STEPPED
        return not skip

    @graph_break
    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adapt the scale after the steps of all optimizers, or set it."""
        if not self._enabled:
            return
        if new_scale is not None:
            self._scale = _single(float(new_scale))
        elif not self._found_inf:
            raise RuntimeError("nothing was unscaled or stepped with since the last update()")
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
        """The scale now; 1 if not enabled."""
        return self._scale if self._enabled else 1.0

    def is_enabled(self) -> bool:
        """Whether it does anything."""
        return self._enabled

    def state_dict(self) -> dict[str, Any]:
        """What ``torch.amp.GradScaler`` would save; empty if not enabled."""
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
        """Go on where another scaler was, this one's or torch's."""
        if not self._enabled:
            return
        if not state_dict:
            raise RuntimeError("the state is empty: it was saved by a scaler that was not enabled")
        self._scale = _single(state_dict["scale"])
        self._growth_factor = state_dict["growth_factor"]
        self._backoff_factor = state_dict["backoff_factor"]
        self._growth_interval = state_dict["growth_interval"]
        self._growth_tracker = state_dict["_growth_tracker"]


def _single(value: float) -> float:
    """Rounded to float32, as torch keeps scales."""
    return torch.tensor(value, dtype=torch.float32).item()
