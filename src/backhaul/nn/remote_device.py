"""A device of a worker, as users write it. Knows nothing of modules."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from backhaul._types import check_name

_RANK = re.compile(r"rank:([0-9]+)")


@dataclass(frozen=True, slots=True)
class RemoteDevice:
    """A device of a worker.

    Attributes:
        worker: The worker's name or, if written as ``rank:<number>``, its id.
        device: The device on that worker.
    """

    worker: str | int
    device: torch.device


def parse_place(text: str) -> RemoteDevice:
    """Parse ``worker``, ``worker/device``, ``rank:number`` or ``rank:number/device``. The default device is the CPU.

    Raises:
        ValueError: The text has another form.

    Example:
        >>> parse_place("trainer")
        RemoteDevice(worker='trainer', device=device(type='cpu'))
        >>> parse_place("rank:1/cuda:0")
        RemoteDevice(worker=1, device=device(type='cuda', index=0))
    """
    if not isinstance(text, str):
        raise TypeError(f"remote_device must be a string such as 'worker1/cpu', not a {type(text).__name__}")
    worker, slash, device = text.partition("/")
    try:
        place = torch.device(device if slash else "cpu")
        rank = _RANK.fullmatch(worker)
        return RemoteDevice(int(rank.group(1)) if rank else check_name(worker), place)
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"remote_device must be '<worker>', '<worker>/<device>' or 'rank:<number>/<device>', not {text!r}: {error}"
        ) from None
