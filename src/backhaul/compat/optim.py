"""Replaces ``DistributedOptimizer`` of ``torch.distributed.optim``."""

from backhaul.optim import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
