"""Calls in the legacy profiler's profiles, by the reference's names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from backhaul.compat.rpc import agent
from backhaul.compat.rpc.internal import RPCExecMode, _build_rpc_profiling_key

F = TypeVar("F", bound="torch.futures.Future[Any]")


def is_on() -> bool:
    """Whether the legacy profiler records here; others know nothing of calls."""
    kinds = torch._C._profiler.ActiveProfilerType
    return torch.autograd._profiler_enabled() and torch._C._autograd._profiler_type() == kinds.LEGACY


@contextlib.contextmanager
def recorded(
    mode: RPCExecMode, name: str, to: str, *, wanted: bool = True
) -> Iterator[Callable[[Any], Any]]:
    """Record a call, if there is a profile, until the future is done that is given to what this yields."""
    if not (wanted and is_on()):
        yield lambda future: future
        return
    key = _build_rpc_profiling_key(mode, name, agent.current().get_worker_info().name, to)
    with torch.autograd.profiler.record_function(key) as record:
        yield record._call_end_callbacks_on_future
