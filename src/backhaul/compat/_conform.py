"""What the reference's suites take for granted of torch's process groups, and torch does not give any more.

For programs that run the suites; others have no use for it. Backhaul has no part in any of this: the suites fail in the
same places with the reference itself.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch.distributed as dist

_kept: list[Any] = []


def before_suites() -> None:
    """Call this in each process before it imports a suite.

    ``init_process_group`` then returns when all processes have a group, as it did before torch made that optional. The
    suites rely on it: a trainer is told to make a second group as soon as another process has its first one.

    Groups live as long as the process. DDP ends its group with the lock of the interpreter held and waits for the
    group's threads; one that has just completed a gradient may wait for the same lock, and the process hangs.
    """
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    dist.destroy_process_group = _keeping(dist.destroy_process_group)


def _keeping(destroy: Any) -> Any:
    @functools.wraps(destroy)
    def destroy_process_group(group: Any = None) -> None:
        _kept.append(group or dist.group.WORLD)
        destroy(group)

    return destroy_process_group
