"""Optimizers that stay with their owners: an owner exposes one, and another worker asks it to step.

For workers that do not trust each other. Two messages travel, ``step`` and ``zero_grad``, and neither carries
anything: no parameter, gradient, option or state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from backhaul._rpc.api import get_worker_info
from backhaul._rpc.security.policy import expose as expose_function
from backhaul._types import WorkerInfo
from backhaul.optim.gradients import one_at_a_time
from backhaul.optim.owners import LocalCall, OwnerCall, ask_all, function_call


class ExposedSteps:
    """What others may call of one optimizer. Steps on one worker run one after the other, whoever requested them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def step(self) -> None:
        """Step."""
        with one_at_a_time():
            self._optimizer.step()

    def zero_grad(self) -> None:
        """Clear the gradients."""
        with one_at_a_time():
            self._optimizer.zero_grad()


def expose(optimizer: torch.optim.Optimizer, name: str, *, to: Sequence[str] = ()) -> None:
    """Let other workers step an optimizer of this process, also where they are not trusted.

    They may call its ``step`` and ``zero_grad``, through ``JointOptimizer``. They cannot read or change its parameters,
    gradients, options or state. Hooks of the optimizer run here: ``register_step_pre_hook`` may clip gradients, or
    raise an error to refuse a step, and ``register_step_post_hook`` may step a scheduler.

    Whoever may call a function that uses the parameters can add to their gradients. Expose such functions to the same
    workers, or run them under ``torch.no_grad()``.

    Args:
        optimizer: Any optimizer of ``torch.optim``, over parameters of this process.
        name: The name that others use. It belongs to the process: a second optimizer replaces the first.
        to: Patterns of the names of workers that may step it, as of ``bh.expose``. Default: all.

    Example:
        The other half is in the example of ``JointOptimizer``.

        >>> import torch, backhaul as bh
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> bh.optim.expose(torch.optim.SGD([weight], lr=0.1), "steps of the weight", to=["trainer"])
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"only an optimizer of torch.optim can be exposed here, not a {type(optimizer).__name__}")
    steps = ExposedSteps(optimizer)
    expose_function(steps.step, name=f"{name}.step", to=to)
    expose_function(steps.zero_grad, name=f"{name}.zero_grad", to=to)


class JointOptimizer:
    """Steps an optimizer of this worker, and those that other workers expose to it, all at once.

    Each optimizer stays on its worker, which chose its class, options and parameters. The result is that of one
    optimizer over all parameters, if all have the same class and options: optimizers of torch treat each parameter by
    itself.

    Args:
        exposed: The names of exposed optimizers (``expose``), by the names of their workers.
        own: An optimizer over parameters of this process, if it has any.

    Example:
        >>> import torch, backhaul as bh
        >>> bottom = torch.nn.Linear(4, 2)
        >>> @bh.expose(name="owner.embed", to=("labels",))
        ... def embed(rows):
        ...     return bottom(torch.ones(100, 4)[rows])
        >>> bh.optim.expose(torch.optim.SGD(bottom.parameters(), lr=0.1), "owner.bottom", to=("labels",))
        >>> with bh.cluster(["labels", "owner"], options=bh.Options(security=bh.Security(trusted=False))):
        ...     top = torch.nn.Linear(2, 1)
        ...     optimizer = bh.optim.JointOptimizer(
        ...         {"owner": "owner.bottom"}, torch.optim.SGD(top.parameters(), lr=0.1)
        ...     )
        ...     for _ in range(2):
        ...         optimizer.zero_grad()
        ...         top(bh.rpc_sync("owner", "owner.embed", args=(torch.arange(8),))).square().mean().backward()
        ...         optimizer.step()
    """

    def __init__(self, exposed: Mapping[str, str], own: torch.optim.Optimizer | None = None) -> None:
        self._exposed = dict(exposed)
        self._own = own

    def step(self) -> None:
        """Step all optimizers with the gradients in ``.grad``. Once this returns, each has stepped.

        Raises:
            Exception: The error of the first worker that failed; its notes name all that did. The others have stepped.
        """
        self._ask("step")

    def zero_grad(self) -> None:
        """Clear the gradients of all optimizers."""
        self._ask("zero_grad")

    def _ask(self, what: str) -> None:
        calls: dict[WorkerInfo, OwnerCall] = {
            (worker := get_worker_info(name)): function_call(worker, f"{optimizer}.{what}")
            for name, optimizer in self._exposed.items()
        }
        if self._own is not None:
            me = get_worker_info()
            if me in calls:
                raise ValueError(f"worker '{me.name}' steps its own optimizer: leave its name out of exposed")
            calls[me] = LocalCall(getattr(self._own, what))
        ask_all(calls, what)
