"""Restores behavior of torch's process groups that the reference's test suites rely on and that torch has changed.

Only programs that run the suites need this. It does not concern Backhaul: the suites fail in the same places with the
reference itself.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch.distributed as dist

_destroyed_groups: list[Any] = []  # kept until the process ends


def before_suites() -> None:
    """Call this in each process before it imports a suite.

    ``init_process_group`` then returns only when all processes have a group, as it did before torch made that optional.
    The suites rely on it: a trainer is told to make a second group as soon as another process has its first one.

    Group objects then live as long as the process. Otherwise DDP frees its group while it holds the global interpreter
    lock, and waits for the group's threads. A thread that has just completed a gradient may wait for the same lock, and
    the process hangs.
    """
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    dist.destroy_process_group = _keep_group_object(dist.destroy_process_group)


def _keep_group_object(destroy: Any) -> Any:
    @functools.wraps(destroy)
    def destroy_process_group(group: Any = None) -> None:
        _destroyed_groups.append(group or dist.group.WORLD)
        destroy(group)

    return destroy_process_group
