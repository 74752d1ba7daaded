"""Reading of checkpoints into optimizers that have no state yet."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch


def read_checkpoint(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """What ``torch.distributed.checkpoint.save`` has written, as it was given to it, but that all keys are strings.

    ``torch.distributed.checkpoint.load`` fills in what is there already. A new optimizer has no state before its first
    step: loaded that way, it would start anew. This asks the checkpoint what is in it.

    Args:
        directory: The ``checkpoint_id`` under which it was saved.

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
    # Here, as they take more than half a second to import.
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
    """What leads to leaves; a leaf may be a dict too."""


def _nested(leaves: Mapping[tuple[str | int, ...], Any]) -> dict[str, Any]:
    """Dicts and lists again, of leaves and the paths to them."""
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
