"""Loads checkpoints for optimizers that have no state yet."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch


def read_checkpoint(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what ``torch.distributed.checkpoint.save`` has written. All keys of dicts come back as strings.

    ``torch.distributed.checkpoint.load`` only fills in tensors that already exist. A new optimizer has no state before
    its first step, so ``load`` would leave it without the saved state. This function reads the list of contents from
    the checkpoint instead.

    Args:
        directory: The ``checkpoint_id`` that was given to ``save``.

    Example:
        >>> import tempfile, torch, warnings, backhaul as bh
        >>> from torch.distributed import checkpoint
        >>> warnings.filterwarnings("ignore", "torch.distributed is disabled")  # it is not needed for this
        >>> with bh.cluster(2), tempfile.TemporaryDirectory() as directory:
        ...     weight = bh.remote("worker1", torch.ones, args=(2,), kwargs={"requires_grad": True})
        ...     optimizer = bh.optim.DistributedOptimizer(torch.optim.Adam, [weight], lr=0.5)
        ...     _ = checkpoint.save(
        ...         {"weight": weight.to_here(), "optimizer": optimizer.state_dict()}, checkpoint_id=directory
        ...     )
        ...     saved = bh.optim.read_checkpoint(directory)
        ...     optimizer.load_state_dict(saved["optimizer"])
        ...     saved["weight"]
        tensor([1., 1.])
    """
    # Imported here because these modules take more than half a second to import.
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(directory)
    metadata = reader.read_metadata()
    flat: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else None
        for name, entry in metadata.state_dict_metadata.items()
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        load(flat, storage_reader=reader, no_dist=True)
    paths = metadata.planner_data or {}
    return _nested({paths.get(name, (name,)): value for name, value in flat.items()})


class _Branch(dict[str | int, Any]):
    """An inner node of the tree. A type of its own, because a leaf may be a dict too."""


def _nested(leaves: Mapping[tuple[str | int, ...], Any]) -> dict[str, Any]:
    """Rebuild nested dicts and lists from leaves and their paths."""
    root = _Branch()
    for path, value in leaves.items():
        *outer, last = path
        inner = root
        for key in outer:
            inner = inner.setdefault(key, _Branch())
        inner[last] = value
    found: dict[str, Any] = _with_lists(root)
    return found


def _with_lists(value: Any) -> Any:
    if not isinstance(value, _Branch):
        return value
    inner = {key: _with_lists(item) for key, item in value.items()}
    return [inner[place] for place in sorted(inner)] if all(isinstance(key, int) for key in inner) else inner
