"""Groups whose members come and go."""

from __future__ import annotations

from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]


def announce_static(store: Store) -> None:
    """Say that the group's size is fixed."""


def join(name: str, rank: int, store: Store, options: Any) -> Any:
    """Join a group."""
    raise NotImplementedError("groups without a world_size")
