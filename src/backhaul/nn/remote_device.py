"""Where a module lives: a worker and one of its devices, as users write it. Knows nothing of modules."""

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
        worker: Its name or, where it was given as ``rank:<number>``, its id.
        device: The device there.
    """

    worker: str | int
    device: torch.device


def parse_place(text: str) -> RemoteDevice:
    """Read ``worker``, ``worker/device``, ``rank:number`` or ``rank:number/device``; without a device, the CPU.

    Raises:
        ValueError: It is none of these.

    Example:
        >>> parse_place("trainer")
        Place(worker='trainer', device=device(type='cpu'))
        >>> parse_place("rank:1/cuda:0")
        Place(worker=1, device=device(type='cuda', index=0))
    """
    if not isinstance(text, str):
        raise TypeError(f"remote_device is a text like 'worker1/cpu', not a {type(text).__name__}")
    worker, slash, device = text.partition("/")
    try:
        place = torch.device(device if slash else "cpu")
        rank = _RANK.fullmatch(worker)
        return RemoteDevice(int(rank.group(1)) if rank else check_name(worker), place)
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"remote_device is '<worker>', '<worker>/<device>' or 'rank:<number>/<device>', not {text!r}: {error}"
        ) from None
