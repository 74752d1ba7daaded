"""Optimizers for parameters on many workers, gradient clipping, and loss scaling for mixed precision."""

from backhaul.optim import remote_step as _remote_step  # noqa: F401 (steps of torch's own optimizers)
from backhaul.optim.checkpoint import read_checkpoint
from backhaul.optim.clip import clip_grad_norm_, clip_grad_value_
from backhaul.optim.exposed import JointOptimizer, expose
from backhaul.optim.optimizer import DistributedOptimizer
from backhaul.optim.scaler import GradScaler

__all__ = [
    "DistributedOptimizer",
    "GradScaler",
    "JointOptimizer",
    "clip_grad_norm_",
    "clip_grad_value_",
    "expose",
    "read_checkpoint",
]
