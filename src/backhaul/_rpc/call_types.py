"""Types of the arguments of calls, for type checkers. See ``docs/typing.md``."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from typing import Any, TypeAlias, TypeVar

import torch

from backhaul._types import WorkerInfo

T = TypeVar("T")

Target: TypeAlias = str | int | WorkerInfo
"""Name, id or ``WorkerInfo`` of a worker."""

LateResult: TypeAlias = Coroutine[Any, Any, T] | torch.futures.Future[T]
"""What a handler returns whose caller gets a ``T`` later: a coroutine, or the future of an ``async_execution``."""

Positional: TypeAlias = tuple[Any, ...] | list[Any] | None
Named: TypeAlias = Mapping[str, Any]
