"""Rewrites programs from ``torch.distributed.rpc`` to Backhaul: ``backhaul migrate``."""
