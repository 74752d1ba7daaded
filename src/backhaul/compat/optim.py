"""The optimizer over many workers, under the name of ``torch.distributed.optim``'s."""

from backhaul.optim import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
