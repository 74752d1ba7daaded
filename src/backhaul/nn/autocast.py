"""Carries ``torch.autocast`` of a caller to the owner of a module. It knows no modules."""

from __future__ import annotations

import contextlib

import torch

_DEVICE_TYPES = ("cpu", "cuda")
"""The devices on which a module of another worker may be."""

Casts = list[tuple[str, str]]
"""For each type of device with autocast: the type, and the name of the dtype to which operations cast."""


def casts_here() -> Casts:
    """What the calling thread casts."""
    return [
        (kind, str(torch.get_autocast_dtype(kind)).removeprefix("torch."))
        for kind in _DEVICE_TYPES
        if torch.is_autocast_enabled(kind)
    ]


def casting(casts: Casts) -> contextlib.ExitStack:
    """Cast in the block as the caller does. The cache is left as it is: each call casts the weights anew."""
    block = contextlib.ExitStack()
    for kind, dtype in casts:
        if kind == "cpu" or torch.cuda.is_available():
            block.enter_context(torch.autocast(kind, dtype=getattr(torch, dtype)))
    return block
