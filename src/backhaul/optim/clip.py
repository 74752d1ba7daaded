"""Clips gradients that are spread over workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from backhaul._rref.handle import RRef
from backhaul._runtime.compile_marks import graph_break
from backhaul.optim import gradients
from backhaul.optim.optimizer import DistributedOptimizer
from backhaul.optim.owners import Listed, Owners, check_context


@graph_break
def clip_grad_norm_(
    context_id: int | None,
    params_rref: Sequence[RRef[Any]] | DistributedOptimizer,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients down so that their total norm over all workers is at most ``max_norm``.

    The result equals that of ``torch.nn.utils.clip_grad_norm_`` on all parameters in one process. Each owner gets one
    call for its norms, and a second one only if the total norm is too large.

    Args:
        context_id: The context that holds the gradients. None: the gradients are in ``.grad``.
        params_rref: References to the parameters, or the optimizer of these parameters, which is faster.
        max_norm: The largest norm allowed.
        norm_type: Which p-norm; ``float("inf")`` for the largest element.
        error_if_nonfinite: If the norm is infinite or NaN, raise ``RuntimeError`` and change nothing.

    Returns:
        The norm before clipping.

    Example:
        >>> import torch, backhaul as bh
        >>> with bh.cluster(2):
        ...     weight = bh.remote("worker1", torch.full, args=((2,), 3.0), kwargs={"requires_grad": True})
        ...     with bh.context() as ctx:
        ...         bh.backward(ctx, [weight.rpc_sync().square().sum()])
        ...         bh.optim.clip_grad_norm_(ctx, [weight], max_norm=1.0)
        ...         bh.optim.clip_grad_norm_(ctx, [weight], max_norm=1.0)
        tensor(8.4853)
        tensor(1.0000)
    """
    owners = _owners(params_rref)
    answers = owners.ask("measuring gradients", gradients.norms, context_id, float(norm_type))
    check_context(context_id, [answer for _, answer in answers])
    found: dict[int, torch.Tensor] = {}
    for places, answer in answers:
        if answer is not None:
            found.update((place, norm) for place, norm in zip(places, answer, strict=True) if norm is not None)
    if not found:
        return torch.tensor(0.0)
    # In the order of the parameters, so that the sum equals that of a single process to the last bit.
    norms = torch.stack([found[place] for place in sorted(found)])
    total: torch.Tensor = torch.linalg.vector_norm(norms, float(norm_type))
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"the gradients have a norm of order {norm_type} of {total.item()} and cannot be clipped; pass "
            "error_if_nonfinite=False to scale them by it anyway"
        )
    factor = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
    if factor != 1.0:
        owners.ask("clipping gradients", gradients.scale, context_id, factor)
    return total


@graph_break
def clip_grad_value_(
    context_id: int | None, params_rref: Sequence[RRef[Any]] | DistributedOptimizer, clip_value: float
) -> None:
    """Clamp each element of the gradients to the range from ``-clip_value`` to ``clip_value``.

    Args:
        context_id: The context that holds the gradients. None: the gradients are in ``.grad``.
        params_rref: References to the parameters, or the optimizer of these parameters, which is faster.
        clip_value: The largest absolute value allowed.

    Example:
        >>> import torch, backhaul as bh
        >>> with bh.cluster(2):
        ...     weight = bh.remote("worker1", torch.ones, args=(2,), kwargs={"requires_grad": True})
        ...     with bh.context() as ctx:
        ...         bh.backward(ctx, [5 * weight.rpc_sync().sum()])
        ...         bh.optim.clip_grad_value_(ctx, [weight], 0.5)
        ...         optimizer = bh.optim.DistributedOptimizer(torch.optim.SGD, [weight], lr=1.0)
        ...         optimizer.step(ctx)
        ...     weight.to_here().detach()
        tensor([0.5000, 0.5000])
    """
    answers = _owners(params_rref).ask("clipping gradients", gradients.clamp, context_id, float(clip_value))
    check_context(context_id, [answer for _, answer in answers])


def _owners(params: Sequence[RRef[Any]] | DistributedOptimizer) -> Owners:
    return params if isinstance(params, DistributedOptimizer) else Listed(params)
